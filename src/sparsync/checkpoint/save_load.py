"""Saves and loads checkpoints collectively, either on all ranks or on none."""

from __future__ import annotations

import copy
import os
import re
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TypeVar, cast, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sparsync.averaging.averager import Averager
from sparsync.checkpoint.files import (
    SHARED,
    Seat,
    await_whole,
    check_file,
    is_whole,
    numbered,
    read_file,
    remove_file,
    remove_folder,
    remove_old,
    states_in,
    step_of,
    whole_checkpoints,
    write_file,
)
from sparsync.checkpoint.reshard import state_like
from sparsync.errors import (
    CheckpointError,
    CommunicationError,
    ConfigurationError,
    NoCheckpointError,
    first_line,
    require,
)
from sparsync.feedback.reducer import Reducer
from sparsync.fields import Fields, check_saved, opened
from sparsync.handle import Handle
from sparsync.state import outside_inference
from sparsync.transports.agree import agree, on_all_or_none, unequal_steps
from sparsync.transports.communicator import Communicator
from sparsync.transports.driver import run, together
from sparsync.updates.outer_averager import OuterAverager

__all__ = [
    "Saveable",
    "Source",
    "Use",
    "check_saveable",
    "load",
    "load_from",
    "load_states",
    "restore",
    "save",
    "save_state",
    "seat_of",
]

# seconds within which a rank must see the other ranks' files in a shared folder
_LATE: Final = 10.0
_MOST: Final = 10**6  # limit on the number of checkpoints to keep
# A scheme of two letters or more, as in s3://bucket; a single letter is a drive.  Path keeps one slash.
_ADDRESS: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
# kinds of states in which the ranks' weights differ
_LOCAL: Final = ("updates", "averager")
# Additions to a rank's state: ``save`` stores the states of other objects and the buffers of modules, and
# ``save_state`` stores a digest.
_BESIDE: Final = Fields({}, {"own": Mapping, "buffers": Mapping, "weights": str})

T = TypeVar("T")

Use = Literal["own", "part", "check"]
"""The purpose of reading a state: to adopt it, to adopt a part of it, or only to check it."""


class Saveable(Protocol):
    """The handle returned by ``attach``, or an optimizer of this library."""

    reducer: Reducer

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, wrapped by ``sparsync.fields.sealed``."""

    def validate(self, state: Any) -> object:
        """Refuse a saved state that does not fit; change nothing, and send nothing."""

    def load_state_dict(self, state: Any) -> None:
        """Adopt a state; this is collective."""


class Source(Protocol):
    """The states of all ranks from one save; error messages contain its ``str()``."""

    def seats(self) -> Collection[Seat]:
        """Return the seats of the saved states, i.e. the rank and part that saved each of them."""

    def read(self, seat: Seat, use: Use) -> dict[str, Any]:
        """Return a rank's state; its tensors may be read lazily."""

    def check(self, seat: Seat) -> None:
        """Refuse a rank's state if it is not as it was saved."""


@final
class _Folder:
    """The files written by ``save``."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def seats(self) -> Collection[Seat]:
        """Return the seats of the files."""
        return states_in(self._path).keys()

    def read(self, seat: Seat, use: Use) -> dict[str, Any]:
        """Read the file of a seat."""
        return read_file(self._path / seat.name, mapped=use != "own")

    def check(self, seat: Seat) -> None:
        """Compare the file of a seat with its checksums."""
        path = self._path / seat.name
        try:
            check_file(path)
        except Exception as error:  # damaged headers raise zipfile.BadZipFile, EOFError, ...
            raise CheckpointError(f"cannot read {path}: {first_line(error)}") from error


def save(sync: Saveable, folder: Path | str, *, keep: int | None = 2, **shared: Any) -> Path:
    """Write a checkpoint; all ranks must call this together, between two steps.

    Args:
        sync: the handle returned by ``attach``.
        folder: the folder for this run's checkpoints, visible to all ranks; created if necessary.  A
            leading ``~`` stands for the home folder; addresses such as s3://bucket are refused.
        keep: the number of newest checkpoints to keep; older ones are removed.  With None, all are
            kept.
        shared: by name, objects and values that are equal on all ranks and saved once, by rank 0:
            anything with a ``state_dict()`` (a model, an optimizer, a scaler, a scheduler), tensors,
            numbers.  Every rank saves the buffers of modules, because they may differ between ranks.  If
            ``sync`` exchanges updates, its state includes every rank's own weights and moments, and every
            rank saves all other objects that have a ``state_dict()``.

    Returns:
        The folder of this checkpoint.

    Raises:
        CheckpointError: raised on all ranks if any of them could not write or does not see all files, or
            if their numbers of local steps or of exchanges differ.  Earlier checkpoints are untouched,
            and training may continue.
        ConfigurationError: ``keep`` or ``folder`` is not valid; an object is divided over ranks (FSDP2, a
            pipeline) and ``sync`` does not hold it; or an earlier exchange was interrupted on this rank,
            in which case the other ranks wait until their timeout.
        CommunicationError: a rank has died, or took longer than the timeout.  The handle then exchanges
            nothing more: ``close()`` it, attach again, and load.

    Cost: a rank writes n elements, and waits until they are on disk.  It also takes five messages of 8
        to 32 bytes, or six if a replica is split over ranks, and one of a byte per unit, and two more.

    Example:
        >>> import tempfile, torch
        >>> from sparsync.updates import OuterAverager
        >>> model = torch.nn.Linear(2, 1)
        >>> local = OuterAverager(model)
        >>> folder = tempfile.mkdtemp()
        >>> save(local, folder, model=model, epoch=3).name
        '000001-step-00000000'
        >>> load(local, folder, model=model)
        {'epoch': 3}
    """
    if keep is not None and (type(keep) is not int or not 1 <= keep <= _MOST):
        raise ConfigurationError(
            f"keep is {str(keep)[:20]}; give a number of checkpoints from 1 to {_MOST}, or None for all"
        )
    _check_open(sync, "save()")
    folder, seat = _named(folder), seat_of(sync)
    _meet(sync)
    _check_alike(sync, shared)
    last = _together(sync, lambda: max(numbered(folder), default=0), f"list {folder}")
    target = folder / f"{1 + _greatest(sync, last):06d}-step-{_same_steps(sync):08d}"

    def write() -> None:
        state = sync.state_dict()
        local = state["kind"] in _LOCAL
        stateful = {n: v for n, v in shared.items() if hasattr(v, "state_dict")}
        plain = {n: v for n, v in shared.items() if n not in stateful}
        # rank 0 has only a part of a sharded object, and every rank's own state already contains
        # its part
        states = {
            n: {} if _holds_shards(sync, v, state) else v.state_dict() for n, v in stateful.items()
        }
        for name, value in {**states, **plain}.items():
            _check_whole(name, value)
        # If updates are exchanged, ranks have different weights, so all other states may differ too, e.g.
        # the states of schedulers and scalers.
        own = {n: states.pop(n) for n in list(states) if local and not _holds(sync, shared[n])}
        # If gradients are exchanged, ranks differ only in buffers, which DDP broadcasts before the next
        # forward pass, or never.
        buffers = {} if local else {n: _buffers(shared[n], its) for n, its in states.items()}
        write_file(target / seat.name, {**state, "beside": {"own": own, "buffers": buffers}})
        if seat.place == 0:
            write_file(target / SHARED, {**states, **plain})

    # All ranks write first and check afterwards: older checkpoints are removed only if every rank sees
    # all of the new one.
    try:
        _together(sync, write, f"write its part of {target}")
        _together(sync, lambda: await_whole(target, _LATE), f"see all files of {target}")
    except CheckpointError as error:
        for name in [seat.name, SHARED] if seat.place == 0 else [seat.name]:
            remove_file(target / name)
        remove_folder(target)
        raise CheckpointError(f"{error}; earlier checkpoints are unchanged") from error
    if keep is not None:
        remove_old(folder, keep)
    return target


@outside_inference
def load(
    sync: Saveable,
    folder: Path | str,
    *,
    step: int | None = None,
    **shared: Any,
) -> dict[str, Any]:
    """Resume from the last complete checkpoint; all ranks must call this together.

    With the same number of ranks as in the checkpoint, training continues bit for bit.  With a different
    number, or if parameters are sharded differently, every rank reads the files that it needs and takes
    its part of the residuals (``reshard``).

    Args:
        sync: the handle returned by ``attach`` in this run.
        folder: the folder given to ``save``.
        step: the step whose checkpoint is loaded; None means the last checkpoint.
        shared: by name, the objects that load their states: the model, the optimizer, ...

    Returns:
        All other values in the checkpoint, by the names given to ``save``.

    Raises:
        NoCheckpointError: there is no complete checkpoint, so training may start from scratch.  This is a
            ``CheckpointError``.
        CheckpointError: ranks do not see the same checkpoint, or a file is damaged or contains more
            than tensors and plain values (files are read with ``weights_only=True`` and run no
            code).
        ConfigurationError: the checkpoint does not fit this run, or an object is divided over ranks, as
            for ``save``.  Other ranks may raise ``CheckpointError`` instead.

    If this raises an error, nothing has changed on any rank: objects that had already loaded their states
    are rolled back.

    Cost: every rank reads n elements; with a different number of ranks, it reads all residuals that it
    sums up.  The states of ``shared`` are copied for a possible rollback.
    """
    _check_open(sync, "load()")
    folder = _named(folder)
    _meet(sync)
    path, older = _chosen(sync, folder, step)
    try:
        return _loaded(sync, path, shared)
    except CheckpointError as error:
        if not older:
            raise
        raise CheckpointError(
            f"{error}; an older checkpoint exists: load it with step={older[-1]}"
        ) from error


def _named(folder: Path | str) -> Path:
    """Return a folder, with a leading ``~`` replaced; refuse what does not name one.

    Raises:
        ConfigurationError: the name is empty, e.g. from a shell variable that is not set, missing (None),
            or the address of an object store.

    Example:
        >>> try: _named("s3://bucket/run")
        ... except ConfigurationError as error: str(error).split(";")[0]
        "'s3://bucket/run' is an address, and checkpoints are files"
    """
    require(folder != "", "the folder for checkpoints has no name; name one, e.g. checkpoints")
    require(
        isinstance(folder, str | os.PathLike),
        f"the folder for checkpoints is {folder!r}; give its name, e.g. 'checkpoints'",
    )
    # without this, Path would make s3://bucket/run a folder of this machine, s3:/bucket/run
    require(
        _ADDRESS.match(str(folder)) is None,
        f"'{folder}' is an address, and checkpoints are files; give a folder that all ranks see, and "
        "copy finished checkpoints from there",
    )
    return Path(folder).expanduser()


def _check_open(sync: Saveable, what: str) -> None:
    """Refuse a closed handle, and objects that are no handle."""
    check_saveable(sync)
    if isinstance(sync, Handle):
        sync.check_open(what)


def _chosen(sync: Saveable, folder: Path, step: int | None) -> tuple[Path, list[int]]:
    """Return the last checkpoint that is complete on all ranks, and the steps of older ones."""
    # Every rank reports the newest checkpoint that it sees, and the oldest of these is chosen: nothing
    # newer is visible to all ranks. A rank may lack even that checkpoint, for instance if it uses a
    # different folder, so ranks then check that all of them see it.
    whole = _together(sync, lambda: whole_checkpoints(folder), f"list {folder}")
    wanted = [number for number, path in whole.items() if step in (None, step_of(path))]
    number = -_greatest(sync, -max(wanted, default=0))
    if not _greatest(sync, int(number not in whole)):
        return whole[number], [step_of(whole[n]) for n in sorted(whole) if n < number]
    at = "" if step is None else f" of step {step}"
    steps = [step_of(whole[n]) for n in sorted(whole)]
    error = CheckpointError if _greatest(sync, len(whole)) else NoCheckpointError
    raise error(
        f"there is no complete checkpoint{at} in {folder} (this rank sees {steps or 'none'}): "
        "every rank must see the folder and the files of all ranks in it"
    )


def _loaded(sync: Saveable, path: Path, shared: Mapping[str, Any]) -> dict[str, Any]:
    """Let every object load its state, and return all other values; if one fails, change nothing."""
    # all ranks read and check everything before any rank changes anything
    before, state, beside = _read_states(sync, _Folder(path))

    def read() -> dict[str, Any]:
        content = {**read_file(path / SHARED), **beside.get("own", {})}
        for name, its in beside.get("buffers", {}).items():
            content[name].update(its)  # in place, to keep the attributes of a module's state
        missing = [name for name in shared if name not in content]
        if missing:
            raise ConfigurationError(
                f"the checkpoint {path} has no {missing[0]!r}, only {sorted(content)}; give load() the "
                "names that save() was given"
            )
        return content

    content = _together(sync, read, f"read the shared file in {path}")
    former: dict[str, Any] = {}

    def take() -> None:
        for name, value in shared.items():
            # the shards of this object are in this rank's own state, and ``shared.pt`` contains none
            # of them
            if _holds_shards(sync, value, before):
                continue
            _check_whole(name, present := value.state_dict())
            former[name] = copy.deepcopy(present)
            try:
                value.load_state_dict(content[name])
            except Exception as error:  # models raise RuntimeError, optimizers ValueError, ...
                raise ConfigurationError(
                    f"the saved {name!r} does not fit: {first_line(error)}; give load() the same kind of "
                    "object as save(), set up in the same way"
                ) from error

    try:
        # load the handle's state last, because it contains this rank's own weights, which must replace
        # the shared ones
        _together(sync, take, f"take over the shared states in {path}")
        _take_state(sync, state, before, str(path))
    except BaseException:
        for name, state_before in former.items():
            shared[name].load_state_dict(state_before)
        raise
    return {name: value for name, value in content.items() if name not in shared}


def _holds(sync: Saveable, value: object) -> bool:
    """Return whether a handle's own state includes the state of a model or optimizer."""
    holds: Callable[[object], bool] = getattr(sync, "holds", lambda _value: False)
    return holds(value)


def _holds_shards(sync: Saveable, value: object, state: Mapping[str, Any]) -> bool:
    """Return whether a handle's state includes the pieces of ``value`` that this rank holds."""
    return _holds(sync, value) and bool(state["content"]["pieces"])


def _buffers(value: object, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the buffers in a module's state, and no buffers for any other object."""
    named = value.named_buffers(remove_duplicate=False) if isinstance(value, nn.Module) else ()
    return {name: state[name] for name, _ in named if name in state}


def _check_whole(name: str, value: Any) -> None:
    """Refuse a state with DTensors: ``shared.pt`` would give rank 0's shards to all ranks."""
    require(
        not any(hasattr(leaf, "to_local") for leaf in tree_leaves(value)),
        f"the state of {name!r} is divided over ranks (DTensor), and a checkpoint has only rank 0's part "
        "of such objects; save and load it with torch.distributed.checkpoint (docs/checkpoints.md), and "
        "give save() and load() the rest",
    )


def _check_alike(sync: Saveable, shared: Mapping[str, Any]) -> None:
    """Refuse modules that differ between the parts of this replica, as the stages of a pipeline do."""
    told = [
        (name, [(one, list(p.shape)) for one, p in value.named_parameters()])
        for name, value in shared.items()
        if isinstance(value, nn.Module)
    ]
    for comm in _communicators(sync)[1:]:
        with _exchange(sync):
            first, *others = run(agree(comm, {}, [zlib.crc32(str(told).encode())]))
        require(
            all(other == first for other in others),
            "the parts of this replica, like stages of a pipeline, have different modules, and a "
            "checkpoint holds only rank 0's; save and load them with torch.distributed.checkpoint "
            "(docs/checkpoints.md), and give save() and load() the rest",
        )


def save_state(sync: Saveable, folder: Path, weights: str, *, alone: bool = False) -> None:
    """Write this rank's file, which includes a digest of its weights; this is collective.

    With ``alone``, nothing is compared with other ranks, because the handle is already closed, e.g. after
    training.

    Raises:
        CheckpointError: raised on all ranks if their numbers of local steps or of exchanges differ (then
            nothing is written), or if any rank could not write.
    """
    folder = _named(folder)
    if not alone:
        _check_open(sync, "save_state()")

    def write() -> None:
        state = {**sync.state_dict(), "beside": {"weights": weights}}
        write_file(folder / seat_of(sync).name, state)

    if alone:
        write()
        return
    _meet(sync)
    _same_steps(sync)
    _together(sync, write, f"write its part of {folder}")


@outside_inference
def load_states(sync: Saveable, folder: Path, weights: str) -> None:
    """Load this rank's own file from ``save_state``, or its part of all ranks' files.

    Raises:
        CheckpointError: a file is missing or damaged.
        ConfigurationError: the state does not fit this run, or was saved with different weights.
    """
    _check_open(sync, "load_states()")
    folder = _named(folder)
    _meet(sync)
    before, state, beside = _read_states(sync, _Folder(folder))

    def compare() -> None:
        if weights and beside.get("weights") not in (None, "", weights):
            raise ConfigurationError(
                f"the state in {folder} was saved with other weights: the two come from different "
                "steps or runs, as when a job ends after writing only one of them; resume from "
                "another checkpoint, or "
                "without that folder (residuals then start at zero)"
            )

    _together(sync, compare, f"load {folder}")
    _take_state(sync, state, before, str(folder))


@outside_inference
def load_from(sync: Saveable, source: Source) -> None:
    """Load this rank's part of the states that all ranks saved."""
    _check_open(sync, "read()")
    _meet(sync)
    before, state, _ = _read_states(sync, source)
    _take_state(sync, state, before, str(source))


def restore(sync: Saveable, state: Callable[[], dict[str, Any]], where: str) -> None:
    """Load a state that was saved by the rank in the same seat."""
    before, found = sync.state_dict(), _together(sync, state, f"read its state in {where}")
    _together(sync, lambda: sync.validate(found), f"load its state in {where}")
    _take_state(sync, found, before, where)


def _read_states(
    sync: Saveable, source: Source
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return this rank's state now, its saved state (checked on all ranks), and ``_BESIDE``'s fields."""
    seat, before = seat_of(sync), sync.state_dict()
    seats = _together(sync, source.seats, f"list {source}")

    def mine() -> dict[str, Any] | None:
        state = source.read(seat, "own") if seat in seats else None
        if state is None:
            return None
        pieces = opened(state, before["kind"]).get("pieces")
        return state if pieces == before["content"].get("pieces") else None

    def part_of_all() -> dict[str, Any]:
        if not is_whole(seats):
            raise CheckpointError(
                f"{source} has the states of {len(seats)} ranks, which are not all ranks of a job; give "
                "the states of all"
            )
        # ranks share the files among them, because every rank reads only parts of each file
        for one in sorted(seats)[seat.place :: seat.ranks * seat.parts]:
            source.check(one)
        return state_like(before, [source.read(one, _use(one, seat)) for one in seats])

    # Training continues bit for bit only if every rank finds its own state.  Otherwise all ranks take
    # shares of all states: if some ranks kept their whole states, the mass in them would count twice.
    state = _together(sync, mine, f"read its state in {source}")
    if _greatest(sync, int(state is None)):
        state = _together(sync, part_of_all, f"read the states in {source}")
    found = cast(dict[str, Any], state)

    def check() -> dict[str, Any]:
        sync.validate(found)
        beside: dict[str, Any] = found.get("beside", {})
        check_saved(beside, _BESIDE, "state['beside']", "load another checkpoint")
        return beside

    return before, found, _together(sync, check, f"load its state in {source}")


def _use(old: Seat, new: Seat) -> Use:
    """Return how a new rank uses an old rank's state; all ranks need rank 0's common fields."""
    shared = old.rank == 0
    heir = old.rank % new.ranks == new.rank or new.rank % old.ranks == old.rank
    return "part" if shared or heir else "check"


def _take_state(
    sync: Saveable, state: Mapping[str, Any], before: Mapping[str, Any], where: str
) -> None:
    """Load this rank's state; if that fails on any rank, for any reason, all ranks roll back."""
    scale = sync.reducer.scale
    try:
        _together(sync, lambda: sync.load_state_dict(state), f"load its state in {where}")
    except Exception:
        # restore the scale first, because loading a state rescales it to the current scale
        sync.reducer.set_scale(scale)
        # if peers have died, or an exchange with them was interrupted, the first error already says so
        with suppress(CommunicationError, ConfigurationError):
            sync.load_state_dict(before)
        raise


# ---- all ranks together ---------------------------------------------------------------------------


def _communicators(sync: Saveable) -> Sequence[Communicator]:
    """Return the communicators to replicas and, if parameters are sharded, to this replica's shards."""
    check_saveable(sync)
    found: Sequence[Communicator] | None = getattr(sync, "communicators", None)
    return (sync.reducer.comm,) if found is None else found


def check_saveable(sync: object) -> None:
    """Refuse averagers without a reducer, whose ranks save their own states, and other objects."""
    require(
        not isinstance(sync, Averager) or isinstance(sync, OuterAverager),
        f"{type(sync).__name__} is an averager, not a handle of attach(); on every rank, save the "
        "state_dict() of the model, the optimizer and the averager with torch.save (docs/averaging.md, "
        "Save and resume)",
    )
    require(
        isinstance(getattr(sync, "reducer", None), Reducer),
        f"{type(sync).__name__} is not a handle; give the object that attach() returned first, as in "
        "save(sync, folder, model=model)",
    )


def seat_of(sync: Saveable) -> Seat:
    """Return the seat of this rank."""
    outer, *inner = _communicators(sync)
    part, parts = (inner[0].rank, inner[0].world_size) if inner else (0, 1)
    return Seat(outer.rank, outer.world_size, part, parts)


def _exchange(sync: Saveable) -> AbstractContextManager[None]:
    """Refuse to communicate after an interrupted exchange; record it if this one is interrupted."""
    return _communicators(sync)[0].exchange()


def _meet(sync: Saveable) -> None:
    """Meet the other replicas on every channel on which they may be in an exchange instead.

    If only one rank saves, e.g. within ``if rank == 0:``, the others begin their next exchange.  Messages
    of two calls on one channel are an error on both ranks, immediately; on channels of their own, all
    ranks would wait until the timeout.
    """
    comm, reducer = _communicators(sync)[0], sync.reducer
    channels = [reducer.channel(unit) for unit in range(len(reducer.units))]
    here = torch.zeros(1, dtype=torch.int8, device="cpu")
    with _exchange(sync):
        every = (*channels, reducer.channel("contributions"), comm)
        run(together([one.allgather(here, "checkpoint") for one in every]))


def _greatest(sync: Saveable, number: int) -> int:
    """Return the greatest of all ranks' numbers."""
    return _all_greatest(sync, [number])[0]


def _all_greatest(sync: Saveable, numbers: Sequence[int]) -> list[int]:
    """Return, for each position, the greatest of all ranks' numbers."""
    most = torch.tensor(numbers, device="cpu")
    with _exchange(sync):
        for comm in _communicators(sync):
            most = run(comm.allreduce(most, "checkpoint", op="max"))
    return most.tolist()


def _same_steps(sync: Saveable) -> int:
    """Return the number of local steps; refuse ranks with different numbers of steps or exchanges.

    Raises:
        CheckpointError: ranks have taken different numbers of steps, or committed different numbers
            of exchanges.
    """
    _communicators(sync)  # waits for exchanges in flight, which also count
    here, done = getattr(sync, "steps", sync.reducer.step), sync.reducer.step
    # the minimum is minus the maximum of the negatives, so one primitive serves both
    a, most, b, last = _all_greatest(sync, [-here, here, -done, done])
    if -a != most:
        raise CheckpointError(f"nothing was saved: {unequal_steps(-a, most, here)}")
    if -b != last:
        raise CheckpointError(
            f"nothing was saved: ranks have committed {-b} to {last} exchanges, this one {done}, because "
            "one broke off on some ranks only; on all ranks close(), attach again, and load"
        )
    return int(here)


def _together(sync: Saveable, action: Callable[[], T], what: str) -> T:
    """Return the result of an action once all ranks have done it; if one fails, raise on all ranks."""
    return run(on_all_or_none(_communicators(sync), action, what))
