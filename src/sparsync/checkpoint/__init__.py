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

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from sparsync.checkpoint.files import (
    SHARED,
    await_whole,
    first_line,
    numbered,
    read_file,
    remove_folder,
    remove_old,
    step_of,
    whole_checkpoints,
    write_file,
)
from sparsync.checkpoint.states import (
    Saveable,
    greatest,
    is_local,
    load_states,
    read_states,
    save_state,
    seat_of,
    take_state,
    together,
)
from sparsync.errors import CheckpointError, ConfigurationError, NoCheckpointError, SparsyncError
from sparsync.resharding import Conserve

__all__ = ["Saveable", "load", "load_states", "save", "save_state"]

_LATE: Final = 10.0  # seconds until a shared folder shows a rank what others have written


def save(sync: Saveable, folder: Path | str, *, keep: int | None = 2, **shared: Any) -> Path:
    """Write a checkpoint; all ranks call it together, between two steps.

    Args:
        sync: what ``attach`` returned.
        folder: for this run's checkpoints, which all ranks see; made if it is not there.
        keep: older checkpoints than the newest so many are removed; None: none is.
        shared: by name, what is equal on all ranks and saved once, by rank 0: anything with a
            ``state_dict()`` (a model, an optimizer, a scaler, a scheduler), tensors, numbers.  With
            ``LocalUpdates`` models and optimizers are each rank's own, and saved by every rank.

    Returns:
        The folder of this checkpoint.

    Raises:
        CheckpointError: on all ranks, if any of them could not write, or does not see the others'
            files: it names the file and why, or the value that could not be loaded again.  The
            checkpoints of before are untouched.

    Cost: writes n elements per rank, and waits until they are on the disk; four messages of 8 bytes.

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
    folder, seat = Path(folder), seat_of(sync)
    last = together(sync, lambda: max(numbered(folder), default=0), f"list {folder}")
    target = folder / f"{1 + greatest(sync, last):06d}-step-{sync.reducer.step:08d}"

    def write() -> None:
        state = sync.state_dict()
        states = {n: v.state_dict() for n, v in shared.items() if hasattr(v, "state_dict")}
        plain = {n: v for n, v in shared.items() if n not in states}
        own = {"own": states} if is_local(state) else {}
        write_file(target / seat.name, {**state, **own})
        if seat.place == 0:
            write_file(target / SHARED, plain if own else {**states, **plain})

    try:
        together(sync, write, f"write its part of {target}")
        together(sync, lambda: await_whole(target, _LATE), f"see all files of {target}")
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
        NoCheckpointError: there is no whole checkpoint: a ``CheckpointError``, after which to begin.
        CheckpointError: ranks do not see the same one, a file is damaged, or holds more than tensors and
            plain values: files are read with ``weights_only=True`` and run no code.  It says of which
            step an older one is.
        ConfigurationError: it does not fit this run; other ranks may raise ``CheckpointError`` instead.

    If it raises, nothing was changed on any rank: what has taken its state gets the former one back.

    Cost: reads n elements per rank; with another number of ranks, those that it adds up.  Copies what is
    ``shared``, to be able to go back.
    """
    path, older = _chosen(sync, Path(folder), step)
    try:
        return _loaded(sync, path, conserve, shared)
    except CheckpointError as error:
        if not older:
            raise
        raise CheckpointError(
            f"{error}; an older checkpoint is there: load it with step={older[-1]}"
        ) from error


def _chosen(sync: Saveable, folder: Path, step: int | None) -> tuple[Path, list[int]]:
    """Return the last checkpoint that all ranks see whole, and the steps of older ones."""
    whole = together(sync, lambda: whole_checkpoints(folder), f"list {folder}")
    wanted = [number for number, path in whole.items() if step in (None, step_of(path))]
    number = -greatest(sync, -max(wanted, default=0))
    if not greatest(sync, int(number not in whole)):
        return whole[number], [step_of(whole[n]) for n in sorted(whole) if n < number]
    at = "" if step is None else f" of step {step}"
    steps = [step_of(whole[n]) for n in sorted(whole)]
    error = CheckpointError if greatest(sync, len(whole)) else NoCheckpointError
    raise error(
        f"there is no whole checkpoint{at} in {folder} (this rank sees {steps or 'none'}): every rank "
        "must see the folder, and in it the files of all ranks"
    )


def _loaded(
    sync: Saveable, path: Path, conserve: Conserve, shared: Mapping[str, Any]
) -> dict[str, Any]:
    """Let everything take its state back, and return the rest; or change nothing."""
    before, state = read_states(sync, path, conserve)

    def read() -> dict[str, Any]:
        content = {**read_file(path / SHARED), **state.get("own", {})}
        missing = [name for name in shared if name not in content]
        if missing:
            raise ConfigurationError(
                f"the checkpoint {path} has no {missing[0]!r}, only {sorted(content)}; give load() the "
                "names that save() was given"
            )
        return content

    content = together(sync, read, f"read what is shared in {path}")
    former: dict[str, Any] = {}

    def take() -> None:
        for name, value in shared.items():
            former[name] = copy.deepcopy(value.state_dict())
            try:
                value.load_state_dict(content[name])
            except Exception as error:  # of a model RuntimeError, of an optimizer ValueError, ...
                raise ConfigurationError(
                    f"the saved {name!r} does not fit: {first_line(error)}; give load() what save() was "
                    "given, set up alike"
                ) from error

    try:
        together(sync, take, f"take over what is shared in {path}")
        take_state(sync, state, before, path)
    except SparsyncError:
        for name, state_before in former.items():
            shared[name].load_state_dict(state_before)
        raise
    return {name: value for name, value in content.items() if name not in shared}
