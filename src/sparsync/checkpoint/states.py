"""The states of all ranks: read, found to fit, and loaded, by all ranks or by none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar, cast

import torch
from torch import Tensor

from sparsync.checkpoint.files import Seat, first_line, is_whole, read_file, states_in, write_file
from sparsync.errors import CheckpointError, ConfigurationError, SparsyncError
from sparsync.reducer import Reducer
from sparsync.resharding import Conserve, state_like
from sparsync.transports.base import Communicator, run

__all__ = [
    "Saveable",
    "greatest",
    "is_local",
    "load_states",
    "read_states",
    "save_state",
    "seat_of",
    "take_state",
    "together",
]

T = TypeVar("T")


class Saveable(Protocol):
    """What ``attach`` returns, or an optimizer of this library."""

    reducer: Reducer

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state."""

    def load_state_dict(self, state: Any) -> None:
        """Take it over again."""


def is_local(state: Mapping[str, Any]) -> bool:
    """Tell whether ranks have weights of their own, beside the shared ones (``LocalUpdates``)."""
    return "shared" in state


def save_state(sync: Saveable, folder: Path, **beside: Any) -> None:
    """Write this rank's file into a folder, without asking other ranks.

    Args:
        sync: see ``save``.
        folder: made if it is not there.
        beside: what ``load_states`` is to find equal.
    """
    write_file(folder / seat_of(sync).name, {**sync.state_dict(), **beside})


def load_states(sync: Saveable, folder: Path, *, conserve: Conserve = "sum", **beside: Any) -> None:
    """Load what ``save_state`` wrote on all ranks: this rank's file, or its part of all of them.

    Args:
        sync: see ``load``.
        folder: that was given to ``save_state``.
        conserve: see ``load``.
        beside: what was saved with it; a file that knows nothing of it is taken.

    Raises:
        CheckpointError: a file is missing or damaged.
        ConfigurationError: it does not fit this run, or something else was saved with it.
    """
    before, state = read_states(sync, folder, conserve)

    def compare() -> None:
        for name, value in beside.items():
            if state.get(name, value) != value:
                raise ConfigurationError(
                    f"the state in {folder} was saved with other {name}: one of them is of another step "
                    "or run, as when a job ends between the two; resume from another checkpoint, or "
                    "without that folder (residuals then start at zero)"
                )

    together(sync, compare, f"load {folder}")
    take_state(sync, state, before, folder)


def read_states(
    sync: Saveable, folder: Path, conserve: Conserve
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return this rank's present state and its saved one, which all ranks found to fit."""
    seat, before = seat_of(sync), sync.state_dict()
    files = together(sync, lambda: states_in(folder), f"list {folder}")

    def mine() -> dict[str, Any] | None:
        state = read_file(files[seat]) if seat in files else None
        same = state is not None and state.get("pieces", {}) == before.get("pieces", {})
        return state if same else None

    def part_of_all() -> dict[str, Any]:
        if not is_whole(list(files)):
            raise CheckpointError(
                f"{folder} has the files of {len(files)} ranks, which are not all of a job's; give "
                "those of all ranks"
            )
        states = [read_file(file, mapped=True) for file in files.values()]
        return state_like(before, states, conserve=conserve)

    state = together(sync, mine, f"read its file in {folder}")
    if greatest(sync, int(state is None)):
        state = together(sync, part_of_all, f"read the files in {folder}")
    found = cast(dict[str, Any], state)
    together(sync, lambda: _rehearse(sync, found), f"load its state in {folder}")
    return before, found


class _Fits(Exception):
    """A state was checked, and the other ranks are asked next."""


class _Rehearsal:
    """Stands for a communicator until the first message.

    ``load_state_dict`` asks the other ranks when it has checked the state and before it changes
    anything.  If one rank refused its state by itself there, the others would wait for it.
    """

    def __init__(self, comm: Communicator) -> None:
        self.rank, self.world_size = comm.rank, comm.world_size

    async def allgather(self, tensor: Tensor, phase: str) -> NoReturn:
        """End the rehearsal."""
        raise _Fits


def _rehearse(sync: Saveable, state: Mapping[str, Any]) -> None:
    """Check a state as ``load_state_dict`` does, and change nothing."""
    comm = sync.reducer.comm
    sync.reducer.comm = cast(Communicator, _Rehearsal(comm))
    try:
        sync.load_state_dict(state)
    except _Fits:
        return
    finally:
        sync.reducer.comm = comm


def take_state(
    sync: Saveable, state: Mapping[str, Any], before: Mapping[str, Any], folder: Path
) -> None:
    """Let this rank's state be loaded; if that fails on any rank, all go back."""
    scale = sync.reducer.scale
    try:
        together(sync, lambda: sync.load_state_dict(state), f"load its state in {folder}")
    except (CheckpointError, ConfigurationError):
        sync.reducer.scale = scale  # to which a state is brought
        sync.load_state_dict(before)
        raise


# ---- all ranks together ---------------------------------------------------------------------------


def _communicators(sync: Saveable) -> Sequence[Communicator]:
    """Return the replicas of this shard and, where parameters are divided, this replica's shards."""
    found: Sequence[Communicator] = getattr(sync, "communicators", (sync.reducer.comm,))
    return found


def seat_of(sync: Saveable) -> Seat:
    """Return whose file this rank's is."""
    outer, *inner = _communicators(sync)
    part, parts = (inner[0].rank, inner[0].world_size) if inner else (0, 1)
    return Seat(outer.rank, outer.world_size, part, parts)


def greatest(sync: Saveable, number: int) -> int:
    """Return the greatest of all ranks' numbers."""
    for comm in _communicators(sync):
        mine = torch.tensor([number], dtype=torch.int64)
        number = int(run(comm.allreduce(mine, "checkpoint", op="max")))
    return number


def together(sync: Saveable, action: Callable[[], T], what: str) -> T:
    """Return what an action returns, once all ranks have done it; raise on all if any of them fails."""
    result: T | None = None
    error: SparsyncError | None = None
    try:
        result = action()
    except SparsyncError as caught:
        error = caught
    except Exception as caught:
        error = CheckpointError(f"cannot {what}: {type(caught).__name__}: {first_line(caught)}")
        error.__cause__ = caught
    failed = greatest(sync, 0 if error is None else seat_of(sync).place + 1)
    if failed and error is None:
        error = CheckpointError(f"rank {failed - 1} could not {what}; it says why")
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # there was no error
