"""Checkpoints: every rank's residual and what all ranks share, whole or not there at all.

::

    folder/000007-step-00000300/sparsync-rank-0-of-4.pt     this rank's state (``sync.state_dict()``)
                                sparsync-rank-1-of-4.pt     ...
                                shared.pt                   model, optimizer, ...: from rank 0
           000008-step-00000400/...

A file appears under its name only when all of it is on the disk, and a folder is a checkpoint only when
every rank's file is there.  So a crash or a full disk at any moment leaves the last one as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from sparsync.checkpoint_files import (
    SHARED,
    Seat,
    is_whole,
    numbered,
    read_file,
    remove_folder,
    remove_old,
    states_in,
    whole_checkpoints,
    write_file,
)
from sparsync.errors import CheckpointError, ConfigurationError, SparsyncError
from sparsync.reducer import Reducer
from sparsync.resharding import Conserve, state_like
from sparsync.transports.base import Communicator, run

__all__ = ["Saveable", "load", "load_states", "save", "save_state"]

T = TypeVar("T")


class Saveable(Protocol):
    """What ``attach`` returns, or an optimizer of this library."""

    reducer: Reducer

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state."""

    def load_state_dict(self, state: Any) -> None:
        """Take it over again."""


def save(sync: Saveable, folder: Path | str, *, keep: int | None = 2, **shared: Any) -> Path:
    """Write a checkpoint; all ranks call it together, between two steps.

    Args:
        sync: what ``attach`` returned.
        folder: for this run's checkpoints, which all ranks see; made if it is not there.
        keep: older checkpoints than the newest so many are removed; None: none is.
        shared: by name, what is equal on all ranks and saved once, by rank 0: anything with a
            ``state_dict()`` (a model, an optimizer, a scaler, a scheduler), tensors, numbers.

    Returns:
        The folder of this checkpoint.

    Raises:
        CheckpointError: on all ranks, if any of them could not write: it names the file and why.  The
            checkpoints of before are untouched.

    Cost: writes n elements per rank, and waits until they are on the disk; three messages of 8 bytes.

    Example:
        >>> import sparsync, tempfile, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = sparsync.UpdateSpaceSGD(model, lr=0.1)
        >>> folder = tempfile.mkdtemp()
        >>> save(optimizer, folder, model=model, epoch=3).name
        '000001-step-00000000'
        >>> load(optimizer, folder, model=model)
        {'epoch': 3}
    """
    if keep is not None and keep < 1:
        raise ConfigurationError(f"keep is {keep}; give at least 1 checkpoint, or None for all")
    folder, seat = Path(folder), _seat(sync)
    content = {n: v.state_dict() if hasattr(v, "state_dict") else v for n, v in shared.items()}
    number = 1 + _greatest(sync, max(numbered(folder), default=0))
    target = folder / f"{number:06d}-step-{sync.reducer.step:08d}"

    def write() -> None:
        save_state(sync, target)
        if seat.place == 0:
            write_file(target / SHARED, content)

    try:
        _together(sync, write, f"write its part of {target}")
    except CheckpointError as error:
        for name in [seat.name, SHARED] if seat.place == 0 else [seat.name]:
            (target / name).unlink(missing_ok=True)
        remove_folder(target)
        raise CheckpointError(f"{error}; the checkpoints of before are as they were") from error
    if keep is not None:
        remove_old(folder, keep)
    return target


def load(
    sync: Saveable,
    folder: Path | str,
    *,
    step: int | None = None,
    conserve: Conserve = "sum",
    **shared: Any,
) -> dict[str, Any]:
    """Continue from the last whole checkpoint; all ranks call it together.

    With as many ranks as it was saved by, training goes on bit for bit.  With another number, or with the
    parameters divided in another way, every rank reads the files that it needs and takes its part of the
    residuals (``reshard``).

    Args:
        sync: what ``attach`` returned, in this run.
        folder: that was given to ``save``.
        step: the checkpoint of this step, rather than the last one.
        conserve: see ``reshard``; for another number of ranks.
        shared: by name, what takes its state back: the model, the optimizer, ...

    Returns:
        What else was saved: by name, as it was given to ``save``.

    Raises:
        CheckpointError: there is no whole checkpoint, a file is damaged, or holds more than tensors and
            plain values: files are read with ``weights_only=True`` and run no code.
        ConfigurationError: it does not fit this run.  Nothing was changed.

    Cost: reads n elements per rank; with another number of ranks, those that it adds up.
    """
    folder = Path(folder)
    whole = whole_checkpoints(folder, step)
    number = -_greatest(sync, -max(whole, default=0))  # what every rank sees is whole
    if number not in whole:
        at = "" if step is None else f" of step {step}"
        raise CheckpointError(
            f"there is no whole checkpoint{at} in {folder}: every rank must see the folder, and in it "
            "the files of all ranks"
        )
    content = _together(sync, lambda: read_file(whole[number] / SHARED), "read what is shared")
    missing = [name for name in shared if name not in content]
    if missing:
        raise ConfigurationError(
            f"the checkpoint {whole[number]} has no {missing[0]!r}, only {sorted(content)}; give "
            "load() the names that save() was given"
        )
    load_states(sync, whole[number], conserve=conserve)
    for name, value in shared.items():
        value.load_state_dict(content[name])
    return {name: value for name, value in content.items() if name not in shared}


def save_state(sync: Saveable, folder: Path) -> None:
    """Write this rank's file into a folder, without asking other ranks."""
    write_file(folder / _seat(sync).name, sync.state_dict())


def load_states(sync: Saveable, folder: Path, *, conserve: Conserve = "sum") -> None:
    """Load what ``save_state`` wrote on all ranks: this rank's file, or its part of all of them.

    Raises:
        CheckpointError: a file is missing or damaged.
        ConfigurationError: it does not fit this run.
    """
    seat, files = _seat(sync), states_in(folder)
    template = sync.state_dict()

    def mine() -> dict[str, Any] | None:
        state = read_file(files[seat]) if seat in files else None
        same = state is not None and state.get("pieces", {}) == template.get("pieces", {})
        return state if same else None

    def part_of_all() -> dict[str, Any]:
        if not is_whole(list(files)):
            raise CheckpointError(
                f"{folder} has the files of {len(files)} ranks, which are not all of a job's; give "
                "those of all ranks"
            )
        states = [read_file(file, mapped=True) for file in files.values()]
        return state_like(template, states, conserve=conserve)

    state = _together(sync, mine, f"read its file in {folder}")
    if _greatest(sync, int(state is None)):
        state = _together(sync, part_of_all, f"read the files in {folder}")
    sync.load_state_dict(state)


# ---- all ranks together ---------------------------------------------------------------------------


def _communicators(sync: Saveable) -> Sequence[Communicator]:
    """Return the replicas of this shard and, where parameters are divided, this replica's shards."""
    found: Sequence[Communicator] = getattr(sync, "communicators", (sync.reducer.comm,))
    return found


def _seat(sync: Saveable) -> Seat:
    outer, *inner = _communicators(sync)
    part, parts = (inner[0].rank, inner[0].world_size) if inner else (0, 1)
    return Seat(outer.rank, outer.world_size, part, parts)


def _greatest(sync: Saveable, number: int) -> int:
    """Return the greatest of all ranks' numbers."""
    for comm in _communicators(sync):
        mine = torch.tensor([number], dtype=torch.int64)
        number = int(run(comm.allreduce(mine, "checkpoint", op="max")))
    return number


def _together(sync: Saveable, action: Callable[[], T], what: str) -> T:
    """Return what an action returns, once all ranks have done it; raise on all if any of them fails."""
    result: T | None = None
    error: SparsyncError | None = None
    try:
        result = action()
    except SparsyncError as caught:
        error = caught
    failed = _greatest(sync, 0 if error is None else _seat(sync).place + 1)
    if failed and error is None:
        error = CheckpointError(f"rank {failed - 1} could not {what}; it says why")
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # there was no error
