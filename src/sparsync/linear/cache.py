"""Cache parsed rows on disk: numbered parts of NumPy files, written once and then mapped.

A part is a folder ``part-00007`` with four ``.npy`` files and a description with their checksums.
It is written under another name and renamed when whole.  Its content is a function of the source, so
ranks that race write the same, and the first rename wins: no lock, no wait.  A rank that finds a part
missing or damaged makes it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
import uuid
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import numpy as np

from sparsync.errors import ConfigurationError
from sparsync.linear.rows import Rows

__all__ = ["FORMAT_VERSION", "PartInfo", "PartStore"]

FORMAT_VERSION = 1  # raised whenever older parts would be read wrongly
_ARRAYS = ("labels", "indptr", "indices", "values")
_HEADER_BYTES = 128  # of the ``.npy`` files here; an empty array is no more


@dataclass(frozen=True)
class PartInfo:
    """The description of a part, readable without touching its rows.

    Attributes:
        rows: number of rows.
        nonzeros: entries of all rows.
        lowest: smallest index; 0 where there is none.
        highest: largest index; -1 where there is none.
        labels: the distinct labels, ascending.
        checksums: CRC-32 of the bytes of labels, indptr, indices and values.
    """

    rows: int
    nonzeros: int
    lowest: int
    highest: int
    labels: tuple[float, ...]
    checksums: tuple[int, ...]

    @classmethod
    def of(cls, rows: Rows) -> PartInfo:
        """Describe rows."""
        return cls(
            rows=rows.count,
            nonzeros=len(rows.values),
            lowest=int(rows.indices.min()) if rows.indices.size else 0,
            highest=int(rows.indices.max()) if rows.indices.size else -1,
            labels=tuple(np.unique(rows.labels).tolist()),
            checksums=_checksums(rows),
        )


@final
class PartStore:
    """The parts made of one state of a source, cut in one way.

    Args:
        base: folder of all that is cached of this source.
        state: names the state of the source, such as its size and time.
        cut: names how parts are made of it; parts of another state or cut are not seen.

    Raises:
        ConfigurationError: the folder cannot be written; so do ``write`` and ``note``.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     store = PartStore(Path(folder), state="12-34", cut="56")
        ...     rows = store.obtain(0, lambda: Rows.of_lists([1.0], [[3]], [[0.5]]))
        ...     store.describe(0).highest, store.describe(1), rows.values.tolist()
        (3, None, [0.5])
    """

    def __init__(self, base: Path, *, state: str, cut: str) -> None:
        self._base, self._state = base, state
        self.directory = base / f"{state}-{cut}-v{FORMAT_VERSION}"
        with self._writing():
            self.directory.mkdir(parents=True, exist_ok=True)

    def describe(self, number: int) -> PartInfo | None:
        """Return a part's description, or None where that is missing or damaged."""
        fields = _load_json(self.path(number) / "part.json")
        if fields is None:
            return None
        labels, checksums = tuple(fields.pop("labels")), tuple(fields.pop("checksums"))
        return PartInfo(**fields, labels=labels, checksums=checksums)

    def obtain(self, number: int, make: Callable[[], Rows]) -> Rows:
        """Return a part, mapped and compared with its checksums; made where it is not sound."""
        rows = self._map(number)
        if rows is not None:
            return rows
        _remove(self.path(number))
        made = make()
        self.write(number, made)
        rows = self._map(number)
        return made if rows is None else rows  # another rank may be replacing it just now

    def write(self, number: int, rows: Rows) -> None:
        """Write a part; a sound one that is there already stays."""
        if self.describe(number) is None:
            _remove(self.path(number))
        with self._writing() as fresh:
            fresh.mkdir()
            for name in _ARRAYS:
                np.save(fresh / f"{name}.npy", getattr(rows, name))
            _save_json(fresh / "part.json", asdict(PartInfo.of(rows)))
            try:
                fresh.rename(self.path(number))
            except OSError as error:
                # another rank was faster, and a third may be removing that just now: it is made again
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise

    def note(self, facts: dict[str, int]) -> None:
        """Keep facts about the whole source."""
        with self._writing() as fresh:
            _save_json(fresh, facts)
            fresh.replace(self.directory / "source.json")

    def noted(self) -> dict[str, int] | None:
        """Return the facts, or None where there are none or they are damaged."""
        return _load_json(self.directory / "source.json")

    def drop_older(self) -> None:
        """Remove what was made of other states of the source; a rank that maps it keeps it."""
        for other in self._base.iterdir():
            if other.is_dir() and not other.name.startswith(f"{self._state}-"):
                _remove(other)

    def path(self, number: int) -> Path:
        """Return the folder of a part."""
        return self.directory / f"part-{number:05}"

    def _map(self, number: int) -> Rows | None:
        info = self.describe(number)
        if info is None:
            return None
        try:
            rows = Rows(*(_map_array(self.path(number) / f"{name}.npy") for name in _ARRAYS))
        except (OSError, ValueError, EOFError):  # missing, cut short, or no .npy file
            return None
        return rows if _checksums(rows) == info.checksums else None

    @contextlib.contextmanager
    def _writing(self) -> Iterator[Path]:
        """Give a path that nobody else uses; remove what is still there at the end."""
        fresh = self.directory / f".{uuid.uuid4().hex}"
        try:
            yield fresh
        except OSError as error:
            raise ConfigurationError(
                f"the cache {self.directory} cannot be written ({error.strerror or error}); "
                "name a folder that can be with cache=..."
            ) from error
        finally:
            with contextlib.suppress(OSError):
                shutil.rmtree(fresh) if fresh.is_dir() else fresh.unlink()


def _map_array(path: Path) -> np.ndarray:
    """Map an array, as a plain ``ndarray``; an empty one has nothing to map."""
    mode: Any = "r" if path.stat().st_size > _HEADER_BYTES else None
    return np.asarray(np.load(path, mmap_mode=mode))


def _checksums(rows: Rows) -> tuple[int, ...]:
    arrays = (np.ascontiguousarray(getattr(rows, name)) for name in _ARRAYS)
    return tuple(zlib.crc32(array.data) for array in arrays)


def _save_json(path: Path, fields: dict[str, Any]) -> None:
    """Write fields, preceded by a checksum of their text."""
    text = json.dumps(fields)
    path.write_text(f"{zlib.crc32(text.encode())} {text}")


def _load_json(path: Path) -> dict[str, Any] | None:
    try:
        checksum, _, text = path.read_text().partition(" ")
        sound = int(checksum) == zlib.crc32(text.encode())
    except (OSError, ValueError):
        return None
    return dict(json.loads(text)) if sound else None


def _remove(folder: Path) -> None:
    """Rename a folder, so that it is gone at once, then delete it; it may be gone already."""
    doomed = folder.with_name(f".{uuid.uuid4().hex}")
    with contextlib.suppress(OSError):
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
