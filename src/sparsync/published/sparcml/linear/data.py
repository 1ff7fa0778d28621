"""Load a rank's rows of an svmlight / libsvm file: ``label [qid:q] index:value ... [# comment]``."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import os
import uuid
import zipfile
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, final

import numpy as np
from scipy import sparse  # type: ignore[import-untyped, unused-ignore]

from sparsync.errors import ConfigurationError, require

__all__ = ["Shard", "label_text", "load_rows", "load_shard", "row_range"]

_FORMAT = 2  # version of the cache; increase it whenever older blocks would be misread


@dataclass(frozen=True)
class Shard:
    """One rank's rows: `[first_row, first_row + rows)` of the whole data set, 0-based."""

    features: sparse.csr_matrix  # `[rows, dimensions]` with ``float32`` values
    labels: np.ndarray  # `[rows]` with ``float32``, each -1 or +1
    rows_total: int  # number of rows in the whole data set
    first_row: int
    known: tuple[float, ...] = (-1.0, 1.0)  # labels in the file, ascending
    positive: tuple[float, ...] = (1.0,)  # the file's labels that became +1
    base: int = 0  # number of the first column in the file


def row_range(rows: int, *, rank: int, world_size: int) -> tuple[int, int]:
    """Return a rank's contiguous rows `[first, stop)`; the ranks' row counts differ by at most 1.

    If there are fewer rows than ranks, the last ranks have no rows.

    Raises:
        ConfigurationError: the rank does not exist.

    Example:
        >>> [row_range(10, rank=rank, world_size=4) for rank in range(4)]
        [(0, 3), (3, 6), (6, 8), (8, 10)]
    """
    require(
        0 <= rank < world_size,
        f"rank {rank} of world_size {world_size}; expected 0 <= rank < world_size",
    )
    each, extra = divmod(rows, world_size)
    first = rank * each + min(rank, extra)
    return first, first + each + (rank < extra)


def label_text(label: float) -> str:
    """Return a label as text, with all of its digits; whole numbers have no decimal point.

    Example:
        >>> label_text(3.0), label_text(1234567.0), label_text(0.1)
        ('3', '1234567', '0.1')
    """
    return repr(float(label)).removesuffix(".0")


def load_shard(
    source: str | Path,
    *,
    rank: int = 0,
    world_size: int = 1,
    dimensions: int | None = None,
    cache: Path | None = None,
    positive: float | Collection[float] | None = None,
) -> Shard:
    r"""Load this rank's rows of an svmlight file, which may be plain, ``.gz`` or ``.bz2``.

    Ranks that start together and share the cache parse different blocks; if a block is missing, the rank
    that needs it parses it.  Later runs read only the labels and the blocks with the rank's rows.

    Args:
        source: the file.
        rank: this rank.
        world_size: number of ranks; may exceed the number of rows.
        dimensions: number of columns; by default, the largest index in the file determines it.
        cache: folder for the cache; default: ``<source>.cache`` next to the file.
        positive: the label or labels that become +1; all others become -1.  Default: the larger of two
            labels.

    Raises:
        ConfigurationError: the text is malformed, there are more than two labels and no ``positive``, or
            the cache cannot be written.

    Cost: the first run parses about 40 MB of text per second and core; later runs read the rank's blocks.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "tiny.svm")
        ...     path.write_text("2 1:0.5 4:1\n1 2:1\n1 1:3\n") and None
        ...     shard = load_shard(path, rank=1, world_size=2)
        >>> shard.features.toarray(), shard.labels, shard.rows_total, shard.first_row
        (array([[3., 0., 0., 0.]], dtype=float32), array([-1.], dtype=float32), 3, 2)
    """
    row_range(0, rank=rank, world_size=world_size)  # refuses a wrong rank before any work
    features, labels, first, base = _load(Path(source), rank, world_size, dimensions, cache, None)
    known, chosen = _positive(labels, positive, Path(source))
    signs = np.where(np.isin(labels, chosen), 1, -1).astype(np.float32)
    mine = signs[first : first + features.shape[0]]
    return Shard(features, mine, len(signs), first, tuple(known), tuple(chosen), base)


def load_rows(
    source: str | Path, *, base: int, cache: Path | None = None
) -> tuple[sparse.csr_matrix, np.ndarray]:
    """Load all rows of a file, and their original labels, for prediction with a model.

    Args:
        source: as in ``load_shard``.
        base: number of the first column in the training file: 0 or 1.
        cache: as in ``load_shard``.

    Raises:
        ConfigurationError: the text is malformed, or a column comes before ``base``.
    """
    features, labels, _, _ = _load(Path(source), 0, 1, None, cache, base)
    return features, labels


def _load(
    path: Path,
    rank: int,
    world_size: int,
    dimensions: int | None,
    cache: Path | None,
    base: int | None,
) -> tuple[sparse.csr_matrix, np.ndarray, int, int]:
    """Return a rank's rows, all labels, and the numbers of its first row and of the first column."""
    with _Blocks(path, cache) as blocks:
        spans, found = blocks.complete(rank, world_size)
        lowest, highest = min(low for low, _ in spans), max(high for _, high in spans)
        if base is None:
            # the first column is 0 if it occurs anywhere (scikit-learn's rule)
            base = min(lowest, 1)
        width = max(highest - base + 1, 1) if dimensions is None else dimensions
        require(width >= 1, f"dimensions {width}; expected at least 1")
        last = base + width - 1
        fault = f"{path} has indices from {lowest} to {highest}; expected {base} to {last}"
        require(base <= lowest and highest <= last, fault)
        labels = np.concatenate(found)
        first, stop = row_range(len(labels), rank=rank, world_size=world_size)
        parts = [sparse.csr_matrix((0, width), dtype=np.float32)]
        starts = np.cumsum([0, *map(len, found)]).tolist()
        for block, (start, end) in enumerate(pairwise(starts)):
            low, high = max(first, start), min(stop, end)
            if low < high:
                values, indices, indptr = blocks.read(block, "values", "indices", "indptr")
                rows = sparse.csr_matrix((values, indices - base, indptr), (end - start, width))
                parts.append(rows[low - start : high - start])
    return sparse.vstack(parts, format="csr"), labels, first, base


def _positive(
    labels: np.ndarray, positive: float | Collection[float] | None, path: Path
) -> tuple[list[float], list[float]]:
    """Return the labels in the file, and the ones that become +1."""
    known = np.unique(labels).tolist()
    listed = ", ".join(map(label_text, known[:10]))
    listed += f", ... ({len(known):,} in all)" if len(known) > 10 else ""
    if positive is None:
        fault = f"{path} has more than two labels: {listed}; say with positive=... which are +1"
        require(len(known) <= 2, fault)
        return known, known[-1:] if len(known) == 2 or known[0] > 0 else []
    given = positive if isinstance(positive, Collection) else [positive]
    chosen = [float(label) for label in given]
    fault = f"positive={positive} is not among the labels of {path}; choose from {listed}"
    require(bool(chosen) and {*chosen} <= {*known}, fault)
    return known, chosen


@final
class _Blocks:
    """The parsed blocks of a file; block b contains the lines that start in its part of the text.

    Parsed blocks are cached as NumPy archives, whose members have checksums.  A block is written under a
    temporary name and renamed when complete.  Its content depends only on the file, so if ranks write it
    at the same time, they write the same bytes and need no lock.
    """

    # bytes of text; parsing takes up to six times as much memory
    block_bytes: ClassVar[int] = 1 << 26

    def __init__(self, path: Path, cache: Path | None) -> None:
        require(path.is_file(), f"{path} is not a file; give the path of a data file")
        self.path = path
        self.folder = path.with_name(f"{path.name}.cache")
        if cache is not None:  # the folder may hold the caches of many files
            whole = str(path.resolve()).encode(errors="surrogateescape")
            self.folder = Path(cache) / f"{path.name}-{zlib.crc32(whole):08x}"
        self.state = self._state()
        opener: Any = {".gz": gzip.open, ".bz2": bz2.open}.get(path.suffix, open)
        # seeking forward in a compressed file decompresses only once
        self.text = opener(path, "rb")
        self._next = -1  # the block that starts at the current position in the text
        self._parsed = False

    def __enter__(self) -> _Blocks:
        return self

    def __exit__(self, *error: object) -> None:
        self.text.close()

    def complete(self, rank: int, world_size: int) -> tuple[list[list[int]], list[np.ndarray]]:
        """Parse the blocks missing from the cache; return each block's index range, and the labels.

        A rank parses its own share first, then all blocks that no rank has parsed in the meantime.
        """
        with self._reading(""):
            known = self._cached(0, "size")
            self.size = int(known[0]) if known else self.text.seek(0, os.SEEK_END)
        numbers = range(max(-(-self.size // self.block_bytes), 1))
        order = sorted(numbers, key=lambda block: ((block - rank) % world_size, block))
        found = {block: self.read(block, "span", "labels") for block in order}
        unchanged = self._state() == self.state
        require(unchanged, f"{self.path} changed while it was read; start again")
        if self._parsed:  # remove blocks of earlier versions of the file
            for other in self.folder.glob("[0-9]*.npz"):
                if not other.name.startswith(f"{self.state}-"):
                    other.unlink(missing_ok=True)
        spans, labels = zip(*(found[block] for block in numbers), strict=True)
        samples = sum(map(len, labels))
        require(samples > 0, f"{self.path} holds no samples; give an svmlight file")
        # a block without entries has no index range
        return [span.tolist() for span in spans if span[1] >= 0] or [[1, -1]], list(labels)

    def read(self, block: int, *names: str) -> list[np.ndarray]:
        """Return a block's arrays; parse the block unless it is intact in the cache."""
        found = self._cached(block, *names)
        if found is None:
            arrays = self._parse(block)
            self._write(block, arrays)
            found = [arrays[name] for name in names]
        return found

    def _state(self) -> str:
        stat = self.path.stat()
        return f"{stat.st_size}-{stat.st_mtime_ns}"

    def _file(self, block: int) -> Path:
        return self.folder / f"{self.state}-{self.block_bytes}-v{_FORMAT}-{block:05}.npz"

    def _cached(self, block: int, *names: str) -> list[np.ndarray] | None:
        """Return members of a block's archive; None if the archive is missing or damaged."""
        try:
            with zipfile.ZipFile(self._file(block)) as archive:  # ``read`` compares the checksum
                raw = [archive.read(f"{name}.npy") for name in names]
            return [np.load(io.BytesIO(member), allow_pickle=False) for member in raw]
        except Exception:  # the file may hold anything; if reading fails, parse the block again
            return None

    def _write(self, block: int, arrays: dict[str, np.ndarray]) -> None:
        fresh = self.folder / f".{uuid.uuid4().hex}.npz"
        self._parsed = True
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            np.savez(fresh, **arrays)  # type: ignore[arg-type]
            fresh.replace(self._file(block))
        except OSError as error:
            raise ConfigurationError(
                f"the cache {self.folder} cannot be written ({error.strerror or error}); "
                "give a writable folder with cache=..."
            ) from error
        finally:
            with contextlib.suppress(OSError):
                fresh.unlink()

    def _parse(self, block: int) -> dict[str, np.ndarray]:
        from sklearn.datasets import load_svmlight_file  # type: ignore[import-untyped, unused-ignore]

        start, stop = block * self.block_bytes, (block + 1) * self.block_bytes
        with self._reading(f" in bytes {start:,} to {stop:,} of its text"):
            # avoid a seek backwards, which would decompress everything again
            if block != self._next:
                self.text.seek(max(start - 1, 0))
                if start:
                    self.text.readline()  # a line that starts earlier belongs to the previous block
            self._next = block + 1
            lines = self.text.read(max(stop - self.text.tell(), 0))
            if lines and not lines.endswith(b"\n"):
                lines += self.text.readline()
            matrix, labels = load_svmlight_file(
                io.BytesIO(lines), dtype=np.float32, zero_based=True
            )
            if not (np.isfinite(matrix.data).all() and np.isfinite(labels).all()):
                raise ValueError("a label or a value is not finite in float32")
        span = [matrix.indices.min(), matrix.indices.max()] if matrix.nnz else [0, -1]
        return {
            "size": np.array(self.size),
            "labels": labels,
            "span": np.array(span, dtype=np.int64),
            "values": matrix.data,
            "indices": matrix.indices.astype(np.int32, copy=False),
            "indptr": matrix.indptr,
        }

    @contextlib.contextmanager
    def _reading(self, where: str) -> Iterator[None]:
        try:
            yield
        except (ValueError, OverflowError, EOFError, OSError, zlib.error) as error:
            raise ConfigurationError(
                f"{self.path} cannot be read{where} ({error}); expected lines like "
                "'1 3:0.5 7:1', with ascending indices below 2^31"
            ) from error
