"""Load one rank's rows of an svmlight / libsvm file: ``label [qid:q] index:value ... [# comment]``.

scikit-learn parses the text, block by block, into a cache of NumPy archives, whose members have
checksums.  A block is written under another name and renamed when whole.  Its content is a function of
the file, so ranks that race write the same: no lock, no wait.
"""

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
from typing import Any, Literal, final

import numpy as np
from scipy import sparse  # type: ignore[import-untyped, unused-ignore]

from sparsync.errors import ConfigurationError

__all__ = ["Shard", "load_shard", "row_range"]

_FORMAT = 2  # of the cache; raised whenever older blocks would be read wrongly
_LISTED = 10  # labels that a message lists


@dataclass(frozen=True)
class Shard:
    """The rows of one rank: `[first_row, first_row + rows)` of the whole data set.

    Attributes:
        features: `[rows, dimensions]`, a ``scipy.sparse.csr_matrix`` with ``float32`` values.
        labels: `[rows]` with ``float32``, each -1 or +1.
        rows_total: rows of the whole data set, over all ranks.
        first_row: number of this rank's first row in the whole, 0-based.
    """

    features: sparse.csr_matrix
    labels: np.ndarray
    rows_total: int
    first_row: int


def row_range(rows: int, *, rank: int, world_size: int) -> tuple[int, int]:
    """Return the rows `[first, stop)` of a rank: contiguous, sizes differ by at most one.

    With fewer rows than ranks the last ranks have none.

    Raises:
        ConfigurationError: there is no such rank.

    Example:
        >>> [row_range(10, rank=rank, world_size=4) for rank in range(4)]
        [(0, 3), (3, 6), (6, 8), (8, 10)]
    """
    if not 0 <= rank < world_size:
        raise ConfigurationError(
            f"rank {rank} of world_size {world_size}; expected 0 <= rank < world_size"
        )
    each, extra = divmod(rows, world_size)
    first = rank * each + min(rank, extra)
    return first, first + each + (rank < extra)


def load_shard(
    source: str | Path,
    *,
    rank: int = 0,
    world_size: int = 1,
    dimensions: int | None = None,
    cache: Path | None = None,
    positive: float | Collection[float] | None = None,
    zero_based: bool | Literal["auto"] = "auto",
    block_bytes: int = 1 << 26,
) -> Shard:
    r"""Load this rank's rows of an svmlight file; plain, ``.gz`` or ``.bz2``.

    Ranks that start together and share the cache parse different blocks (one that finds a block still
    missing parses it).  From then on a rank reads the blocks of its rows, and the labels.

    Args:
        source: the file.
        rank: this rank.
        world_size: number of ranks; may exceed the number of rows.
        dimensions: number of columns; default: as many as the file's largest index needs.
        cache: folder for the cache; default: ``<source>.cache`` next to the file.
        positive: the label, or labels, of +1; all others are -1.  Default: the larger of two.
        zero_based: whether the first column is 0 in the file; "auto": if there is an index 0
            anywhere in the file (scikit-learn's rule).
        block_bytes: text that is parsed at once; takes two (measured) to six times that in memory.

    Raises:
        ConfigurationError: the text is malformed, the labels are not two and ``positive`` does not say
            more, or the cache cannot be written.

    Cost: about 40 MB of text per second, core and rank once; then reading the rank's blocks.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "tiny.svm")
        ...     path.write_text("2 1:0.5 4:1\n1 2:1\n1 1:3\n") and None
        ...     shard = load_shard(path, rank=1, world_size=2)
        >>> shard.features.toarray(), shard.labels, shard.rows_total, shard.first_row
        (array([[3., 0., 0., 0.]], dtype=float32), array([-1.], dtype=float32), 3, 2)
    """
    if zero_based not in (True, False, "auto"):
        raise ConfigurationError(f"zero_based={zero_based!r}; expected True, False or 'auto'")
    row_range(0, rank=rank, world_size=world_size)  # refuses a wrong rank before any work
    blocks = _Blocks(Path(source), cache, block_bytes)
    spans, labels = blocks.complete(rank, world_size)

    lowest, highest = min(low for low, _ in spans), max(high for _, high in spans)
    if zero_based == "auto":
        zero_based = lowest == 0
    base = 0 if zero_based else 1
    width = max(highest - base + 1, 1) if dimensions is None else dimensions
    if width < 1:
        raise ConfigurationError(f"dimensions {width}; expected at least 1")
    if highest >= 0 and not base <= lowest <= highest < base + width:
        raise ConfigurationError(
            f"{source} has indices from {lowest} to {highest}; expected {base} to {base + width - 1}"
        )
    starts = np.cumsum([0, *map(len, labels)]).tolist()
    signs = _signs(np.concatenate(labels), positive, blocks.path)
    first, stop = row_range(starts[-1], rank=rank, world_size=world_size)
    parts = [sparse.csr_matrix((0, width), dtype=np.float32)]
    for block, (start, end) in enumerate(pairwise(starts)):
        low, high = max(first, start), min(stop, end)
        if low < high:
            values, indices, indptr = blocks.features(block)
            rows = sparse.csr_matrix((values, indices - base, indptr), (end - start, width))
            parts.append(rows[low - start : high - start])
    return Shard(sparse.vstack(parts, format="csr"), signs[first:stop], starts[-1], first)


def _signs(
    labels: np.ndarray, positive: float | Collection[float] | None, path: Path
) -> np.ndarray:
    """Decide which labels are +1."""
    known = np.unique(labels).tolist()
    listed = ", ".join(f"{label:g}" for label in known[:_LISTED])
    listed += f", ... ({len(known):,} in all)" if len(known) > _LISTED else ""
    if positive is None:
        if len(known) > 2:
            raise ConfigurationError(
                f"{path} has more than two labels: {listed}; say with positive=... which are +1"
            )
        chosen = known[-1:] if len(known) == 2 or known[0] > 0 else []
    else:
        given = positive if isinstance(positive, Collection) else [positive]
        chosen = [float(label) for label in given]
        if not chosen or not {*chosen} <= {*known}:
            raise ConfigurationError(
                f"positive={positive} is not among the labels of {path}; choose from {listed}"
            )
    return np.where(np.isin(labels, chosen), 1, -1).astype(np.float32)


@final
class _Blocks:
    """The parsed blocks of a file, in its cache: block b has the lines that start in its bytes.

    Args:
        path: of the file.
        cache: as for ``load_shard``.
        block_bytes: of a block, in bytes of uncompressed text.
    """

    def __init__(self, path: Path, cache: Path | None, block_bytes: int) -> None:
        if block_bytes < 1:
            raise ConfigurationError(f"block_bytes {block_bytes}; expected at least 1")
        if not path.is_file():
            raise ConfigurationError(f"{path} is not a file; give the path of a data file")
        self.path, self.block_bytes = path, block_bytes
        self.folder = path.with_name(f"{path.name}.cache")
        if cache is not None:  # which may hold the caches of many files
            whole = str(path.resolve()).encode(errors="surrogateescape")
            self.folder = Path(cache) / f"{path.name}-{zlib.crc32(whole):08x}"
        self.state = self._state()
        self._parsed = False
        self._next = -1  # block whose lines are next in the open text

    def complete(self, rank: int, world_size: int) -> tuple[list[list[int]], list[np.ndarray]]:
        """Parse what the cache does not have; return the blocks' least and largest index, and labels.

        A rank parses its share first, then what the next ranks have not parsed by then.
        """
        with self._text() as text:
            known = self._read(0, "size")
            size = int(known[0]) if known else text.seek(0, os.SEEK_END)
            numbers = range(max(-(-size // self.block_bytes), 1))
            order = sorted(numbers, key=lambda block: ((block - rank) % world_size, block))
            found = {block: self._obtain(block, text, size, "span", "labels") for block in order}
        if self._state() != self.state:
            raise ConfigurationError(f"{self.path} changed while it was read; start again")
        if self._parsed:
            self._drop_older()
        spans, labels = zip(*(found[block] for block in numbers), strict=True)
        if not any(map(len, labels)):
            raise ConfigurationError(f"{self.path} holds no samples; give an svmlight file")
        # a block without entries has no least and no largest index
        return [span.tolist() for span in spans if span[1] >= 0] or [[1, -1]], list(labels)

    def features(self, block: int) -> list[np.ndarray]:
        """Return values, indices (as written) and row pointers of a block."""
        names = "values", "indices", "indptr"
        found = self._read(block, *names)
        if found is None:  # damaged since ``complete``
            with self._text() as text:
                made = self._parse(block, text)
            found = [made[name] for name in names]
        return found

    def _state(self) -> str:
        stat = self.path.stat()
        return f"{stat.st_size}-{stat.st_mtime_ns}"

    def _file(self, block: int) -> Path:
        return self.folder / f"{self.state}-{self.block_bytes}-v{_FORMAT}-{block:05}.npz"

    def _obtain(self, block: int, text: Any, size: int, *names: str) -> list[np.ndarray]:
        found = self._read(block, *names)
        if found is None:
            made = {**self._parse(block, text), "size": np.array(size)}
            self._write(block, made)
            found = [made[name] for name in names]
        return found

    def _parse(self, block: int, text: Any) -> dict[str, np.ndarray]:
        from sklearn.datasets import load_svmlight_file  # type: ignore[import-untyped, unused-ignore]

        start, stop = block * self.block_bytes, (block + 1) * self.block_bytes
        with self._reading(f" in bytes {start:,} to {stop:,} of its text"):
            lines = io.BytesIO(self._lines(block, text))
            matrix, labels = load_svmlight_file(lines, dtype=np.float32, zero_based=True)
            if not (np.isfinite(matrix.data).all() and np.isfinite(labels).all()):
                raise ValueError("a label or a value is not finite in float32")
        span = [matrix.indices.min(), matrix.indices.max()] if matrix.nnz else [0, -1]
        return {
            "labels": labels,
            "span": np.array(span, dtype=np.int64),
            "values": matrix.data,
            "indices": matrix.indices.astype(np.int32, copy=False),
            "indptr": matrix.indptr,
        }

    def _lines(self, block: int, text: Any) -> bytes:
        """Read the lines that start in a block's bytes."""
        start = block * self.block_bytes
        if block != self._next:  # else this is the place, and going back would decompress all again
            text.seek(max(start - 1, 0))
            if start:
                text.readline()  # a line that starts before belongs to the block before
        self._next = block + 1
        lines: bytes = text.read(max(start + self.block_bytes - text.tell(), 0))
        return lines if not lines or lines.endswith(b"\n") else lines + text.readline()

    @contextlib.contextmanager
    def _text(self) -> Iterator[Any]:
        """Open the text; forward seeks in a compressed one decompress what they pass once."""
        opener: Any = {".gz": gzip.open, ".bz2": bz2.open}.get(self.path.suffix, open)
        self._next = -1
        with self._reading(""), opener(self.path, "rb") as text:
            yield text

    @contextlib.contextmanager
    def _reading(self, where: str) -> Iterator[None]:
        try:
            yield
        except ConfigurationError:
            raise
        except (ValueError, OverflowError, EOFError, OSError, zlib.error) as error:
            raise ConfigurationError(
                f"{self.path} cannot be read{where} ({error}); expected lines like "
                "'1 3:0.5 7:1', with ascending indices below 2^31"
            ) from error

    # ---- the cache --------------------------------------------------------------------------------

    def _read(self, block: int, *names: str) -> list[np.ndarray] | None:
        """Return members of a block's archive; None if it is missing or damaged."""
        try:
            with zipfile.ZipFile(self._file(block)) as archive:  # ``read`` compares the checksum
                raw = [archive.read(f"{name}.npy") for name in names]
            return [np.load(io.BytesIO(member), allow_pickle=False) for member in raw]
        except Exception:  # untrusted bytes: whatever is wrong with them, the block is parsed again
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
                "name a folder that can be with cache=..."
            ) from error
        finally:
            with contextlib.suppress(OSError):
                fresh.unlink()

    def _drop_older(self) -> None:
        """Remove what was made of other states of the file."""
        for other in self.folder.glob("[0-9]*.npz"):
            if not other.name.startswith(f"{self.state}-"):
                other.unlink(missing_ok=True)
