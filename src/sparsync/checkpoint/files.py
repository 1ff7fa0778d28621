"""Writes checkpoint files completely or not at all, and reads them without running code."""

from __future__ import annotations

import errno
import io
import os
import re
import time
import zipfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

from sparsync.errors import CheckpointError, first_line
from sparsync.state import load_plainly

__all__ = [
    "SHARED",
    "Seat",
    "await_whole",
    "check_file",
    "is_whole",
    "numbered",
    "read_file",
    "remove_file",
    "remove_folder",
    "remove_old",
    "states_in",
    "step_of",
    "whole_checkpoints",
    "write_file",
]

SHARED: Final = "shared.pt"
_FOLDER: Final = re.compile(r"(\d{6,})-step-\d{8,}")
_STATE: Final = re.compile(r"sparsync-rank-(\d+)-of-(\d+)(?:-part-(\d+)-of-(\d+))?\.pt")
# errors raised by network file systems that cannot flush a folder
_NO_FOLDER_SYNC: Final = (errno.EINVAL, errno.ENOTSUP, errno.EACCES)


class Seat(NamedTuple):
    """The owner of a file: a rank among the replicas and, if parameters are split, a part of a replica.

    Example:
        >>> Seat(1, 4, 0, 1).name, Seat(1, 2, 0, 2).name
        ('sparsync-rank-1-of-4.pt', 'sparsync-rank-1-of-2-part-0-of-2.pt')
    """

    rank: int
    ranks: int
    part: int
    parts: int

    @classmethod
    def of(cls, found: re.Match[str]) -> Seat:
        """Return the seat for the four numbers matched by a pattern; the last two may be missing."""
        return cls(int(found[1]), int(found[2]), int(found[3] or 0), int(found[4] or 1))

    @property
    def text(self) -> str:
        """The numbers of the seat, as part of the file name."""
        part = f"-part-{self.part}-of-{self.parts}" if self.parts > 1 else ""
        return f"rank-{self.rank}-of-{self.ranks}{part}"

    @property
    def name(self) -> str:
        """The name of the file."""
        return f"sparsync-{self.text}.pt"

    @property
    def place(self) -> int:
        """The number of the seat among all processes; number 0 leads."""
        return self.rank * self.parts + self.part


def write_file(path: Path, content: Any) -> None:
    """Write a file with ``torch.save``, atomically: it becomes complete, or stays unchanged.

    The file is read back before it gets its name, so content that ``read_file`` would refuse is not
    kept.

    Raises:
        CheckpointError: writing failed; the message names the file and the reason, or the value
            that could not be read back.  No partial file remains.
    """
    # Write, flush, rename, flush the folder, in this order: a rename within a file system is atomic, and
    # only flushed data and names survive a power failure.
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file, _with_checksums():
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        load_plainly(temporary, map_location="cpu", mmap=True)
        temporary.replace(path)
        _sync_folder(path.parent)
    except Exception as error:  # an object may raise anything when it is pickled
        remove_file(temporary)
        refused = _by_the_system(error)
        # the search for the culprit pickles all values again, so it runs only if the disk is fine
        on_disk = refused is not None or isinstance(error, RuntimeError)
        raise CheckpointError(
            f"cannot write {path}: {'' if on_disk else _culprit(content)}{first_line(refused or error)}"
        ) from error


@contextmanager
def _with_checksums() -> Iterator[None]:
    """Let ``torch.save`` write checksums, even if the program has turned them off."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def check_file(path: Path) -> None:
    """Compare a file with its checksums, which torch writes but never reads.

    Raises:
        CheckpointError: a part of the file differs from its checksum.

    Cost: one pass over the file, half as long as reading it takes.
    """
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise CheckpointError(
            f"{damaged} in the file differs from its checksum; load another checkpoint"
        )


def read_file(path: Path, *, mapped: bool = False) -> dict[str, Any]:
    """Read a dictionary written by ``write_file``, onto the CPU.

    Args:
        path: the file.
        mapped: tensors stay in the file until they are accessed; they must not be written to.  The file
            is not compared with its checksums; ``check_file`` does this.

    Raises:
        CheckpointError: the file is missing or damaged, or contains more than tensors and plain values.
    """
    try:
        if not mapped:
            check_file(path)
        content = load_plainly(path, map_location="cpu", mmap=mapped)
    except Exception as error:  # damaged bytes raise IndexError, struct.error, ...
        raise CheckpointError(
            f"cannot read {path}: {first_line(error)}; files of sparsync.save hold tensors and plain "
            "values, and nothing else is loaded"
        ) from error
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, expected a saved state")
    return dict(content)


def _by_the_system(error: BaseException | None) -> OSError | None:
    """Return the operating system's error that caused an error, or None.

    When a disk is full, torch's writer raises a second error while closing, because its position in the
    file is wrong.  Only the context of the second error contains the reason.
    """
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def numbered(folder: Path) -> dict[int, Path]:
    """Return all checkpoints in a folder, complete or not, by number.

    Raises:
        CheckpointError: the folder is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; give a folder for this run's checkpoints")
    found = [(_FOLDER.fullmatch(path.name), path) for path in folder.glob("*-step-*")]
    return {int(match[1]): path for match, path in found if match}


def whole_checkpoints(folder: Path) -> dict[int, Path]:
    """Return the complete checkpoints in a folder, by number."""
    return {number: path for number, path in numbered(folder).items() if _has_all(path)}


def await_whole(path: Path, seconds: float) -> None:
    """Wait until this rank sees every file of a checkpoint; in a shared folder, files may appear late.

    Raises:
        CheckpointError: some files have not appeared in time, probably because the ranks use different
            folders.
    """
    deadline = time.monotonic() + seconds
    while not _has_all(path):
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"this rank sees only {sorted(file.name for file in path.glob('*'))} in {path}; give a "
                "folder that all ranks share"
            )
        time.sleep(0.05)


def _has_all(path: Path) -> bool:
    return (path / SHARED).exists() and is_whole(states_in(path).keys())


def step_of(path: Path) -> int:
    """Return the step of a checkpoint, from its name."""
    return int(path.name.rpartition("-")[2])


def states_in(folder: Path) -> dict[Seat, Path]:
    """Return the paths of the ranks' state files in a checkpoint, by seat."""
    found = [(_STATE.fullmatch(path.name), path) for path in sorted(folder.glob("sparsync-rank-*"))]
    return {Seat.of(match): path for match, path in found if match}


def is_whole(seats: Collection[Seat]) -> bool:
    """Return whether these seats are all seats of one job."""
    # seats are distinct keys, so counting them suffices if all belong to one job
    sizes = {seat.ranks * seat.parts for seat in seats}
    return sizes == {len(seats)} and len({(seat.ranks, seat.parts) for seat in seats}) == 1


def remove_old(folder: Path, keep: int) -> None:
    """Keep the ``keep`` newest complete checkpoints; remove all older ones, complete or not.

    A symbolic link means that a user keeps the checkpoint elsewhere; links are not followed or counted.
    """
    # newer incomplete checkpoints stay, because another job may be writing them
    whole = [number for number, path in whole_checkpoints(folder).items() if not path.is_symlink()]
    newest = sorted(whole)[-keep:]
    for number, path in numbered(folder).items():
        if newest and number < newest[0] and not path.is_symlink():
            for file in (*path.glob("sparsync-rank-*"), *path.glob(f"{SHARED}*")):
                remove_file(file)  # all ranks do this; the first one removes the file
            remove_folder(path)


def remove_file(path: Path) -> None:
    """Remove a file if possible; a failure must not end the training run."""
    with suppress(OSError):
        path.unlink(missing_ok=True)


def remove_folder(path: Path) -> None:
    """Remove a folder if it is empty; it stays if it contains files of other ranks or users."""
    try:
        path.rmdir()
    except OSError:
        return


def _sync_folder(folder: Path) -> None:
    """Flush a folder, where possible, so that a renamed file survives a power failure."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows
        return
    descriptor = os.open(folder, os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)


def _culprit(content: Any) -> str:
    """Return the name of the first value that could not be read back, or ""."""
    for path, value in tree_flatten_with_path(content)[0]:
        file = io.BytesIO()
        try:
            torch.save(value, file)
            file.seek(0)
            load_plainly(file)
        except Exception:
            return (
                f"{keystr(path)} is a {type(value).__name__}, which could not be loaded again; give "
                "tensors, numbers, strings, and lists or dictionaries of them: "
            )
    return ""
