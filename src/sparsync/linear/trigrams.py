"""Build a data set that every Python has: hashed byte trigrams of its standard library's sources.

It has the shape of the URL and Webspam sets (millions of columns, few hundred entries a row) without a
download.  A sample is a run of lines of one file; its label says which package they are from.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_matrix, vstack  # type: ignore[import-untyped, unused-ignore]

from sparsync.errors import ConfigurationError
from sparsync.linear.data import Shard, row_range

__all__ = ["SHORTEST", "URL_DIMENSIONS", "drawn_order", "hash_trigrams", "trigram_shard"]

URL_DIMENSIONS = 3_231_961  # columns of the URL data set (SparCML, Table 1)
SHORTEST = 3  # bytes that make a trigram

_INSTALLED = frozenset({"site-packages", "dist-packages"})
_NEWLINE = 10
_PART_ROWS = 4_096  # rows that are hashed together: some 60 MB of working memory
_MAX_DIMENSIONS = (1 << 31) - 1  # columns are int32
_FAIR_SHARE = 0.2  # of all bytes: with less (some systems ship stubs of it) ``test`` is no class


def trigram_shard(
    *,
    dimensions: int = URL_DIMENSIONS,
    rank: int = 0,
    world_size: int = 1,
    rows: int | None = None,
    positive: str | None = None,
    lines: int = 16,
    seed: int = 0,
    root: Path | None = None,
) -> Shard:
    """Make this rank's rows of the trigram data set; a rank hashes no others.

    A row's entry for a trigram that occurs c times among the n of its sample is sqrt(c / n): of
    length 1 (up to hash collisions, whose counts add before the root), and exact arithmetic, so
    that every machine with the same sources has the same bits.  Rows are in an order drawn by
    ``seed``, so that shards are alike.

    Args:
        dimensions: number of columns that trigrams are hashed to.
        rank: this rank.
        world_size: number of ranks; may exceed the number of rows.
        rows: use this many rows, the first in order; default: all.
        positive: name of the top-level package or module whose lines are +1.  Default: ``test``,
            about half of all lines; where it is not shipped, all packages against single modules.
        lines: of a sample.
        seed: of the order.
        root: folder of the sources; default: this Python's standard library.

    Raises:
        ConfigurationError: there are fewer rows, or nothing from ``positive``.

    Cost: reading the sources (30 MB), then about 5 million trigrams per second and core.

    Example:
        >>> shard = trigram_shard(rows=1_000, rank=1, world_size=4, lines=40)
        >>> shard.features.shape, shard.first_row, sorted(set(shard.labels.tolist()))
        ((250, 3231961), 250, [-1.0, 1.0])
    """
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise ConfigurationError(f"dimensions {dimensions}; expected 1 to {_MAX_DIMENSIONS:,}")
    if lines < 1:
        raise ConfigurationError(f"lines {lines}; expected at least 1")
    root = root or Path(sysconfig.get_path("stdlib"))
    samples = _samples(root, lines, positive, seed)
    known = len(samples.labels)
    total = known if rows is None else rows
    if not 0 < total <= known:
        raise ConfigurationError(
            f"rows {total}; the sources in {root} give {known:,} samples of "
            f"{lines} lines: ask for no more, or take fewer lines"
        )
    first, stop = row_range(total, rank=rank, world_size=world_size)
    parts = [csr_matrix((0, dimensions), dtype=np.float32)]
    for start in range(first, stop, _PART_ROWS):
        part = slice(start, min(start + _PART_ROWS, stop))
        starts, stops = samples.starts[part], samples.stops[part]
        indptr, indices, values = hash_trigrams(samples.content, starts, stops, dimensions)
        parts.append(csr_matrix((values, indices, indptr), (len(starts), dimensions)))
    labels = samples.labels[first:stop].astype(np.float32)
    return Shard(vstack(parts, format="csr"), labels, total, first)


class _Samples(NamedTuple):
    """Where every sample is, in the drawn order: bytes `[start, stop)` of all files' content."""

    content: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    labels: np.ndarray  # -1 or +1


def _samples(root: Path, lines: int, positive: str | None, seed: int) -> _Samples:
    """Read all sources, in the order of their paths, and find the samples."""
    found = ((path.relative_to(root).parts, path) for path in root.rglob("*.py"))
    files = [(parts, _content(path)) for parts, path in sorted(found) if not _INSTALLED & {*parts}]
    spans, offset = [np.zeros((0, 2), dtype=np.int64)], 0
    for _, content in files:
        spans.append(_spans(content, lines) + offset)
        offset += len(content)
    starts, stops = np.concatenate(spans).T
    signs = np.repeat(_signs(root, files, positive), [len(span) for span in spans[1:]])
    order = drawn_order(len(starts), seed)
    whole = np.frombuffer(b"".join(content for _, content in files), dtype=np.uint8)
    return _Samples(whole, starts[order], stops[order], signs[order])


def _signs(
    root: Path, files: list[tuple[tuple[str, ...], bytes]], positive: str | None
) -> np.ndarray:
    """Give every file its label."""
    sizes: dict[str, int] = {}
    for parts, content in files:
        sizes[_name(parts)] = sizes.get(_name(parts), 0) + len(content)
    name = positive
    if name is None and sizes.get("test", 0) >= _FAIR_SHARE * sum(sizes.values()):
        name = "test"
    chosen = [len(parts) > 1 if name is None else _name(parts) == name for parts, _ in files]
    if all(chosen) or not any(chosen):
        largest = sorted(sizes, key=lambda name: (-sizes[name], name))[:5]
        raise ConfigurationError(
            f"positive={positive!r} does not divide the sources in {root}; choose a "
            f"package or module there, such as {', '.join(largest) or '(there is none)'}"
        )
    return np.where(chosen, 1.0, -1.0)


def _name(parts: tuple[str, ...]) -> str:
    """Name the top-level package or module of a file."""
    return parts[0].removesuffix(".py")


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # such as a dangling link: what cannot be read is no source
        return b""


def _spans(content: bytes, lines: int) -> np.ndarray:
    """Cut a file every ``lines`` lines: `[samples, 2]`, start and stop of each in bytes."""
    ends = (
        np.flatnonzero(np.frombuffer(content, dtype=np.uint8) == _NEWLINE)[lines - 1 :: lines] + 1
    )
    bounds = np.concatenate([[0], ends, [len(content)]])
    spans = np.stack([bounds[:-1], bounds[1:]], axis=1)
    return np.asarray(spans[spans[:, 1] - spans[:, 0] >= SHORTEST])


# ---- hashing: integers only, the same on every machine --------------------------------------------


def hash_trigrams(
    content: np.ndarray, starts: np.ndarray, stops: np.ndarray, dimensions: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Hash the byte trigrams of samples to columns; an entry is sqrt(times / trigrams of the sample).

    Square roots of counts, so that the runs of blanks in a source do not drown the rest; a row has
    length 1, and every operation is exact or correctly rounded, whatever the machine.

    Args:
        content: bytes, ``uint8``.
        starts: `[rows]` with ``int64``: first byte of each sample.
        stops: `[rows]` with ``int64``: the byte after its last; at least ``SHORTEST`` farther.
        dimensions: number of columns, below 2^31.

    Returns:
        indptr, indices and values of the rows in compressed sparse row form.

    Example:
        >>> text = np.frombuffer(b"abcabc", dtype=np.uint8)
        >>> indptr, indices, values = hash_trigrams(text, np.array([0]), np.array([6]), 1_000)
        >>> indptr, indices  # abc twice, bca, cab
        (array([0, 3]), array([260, 613, 865], dtype=int32))
        >>> values
        array([0.70710677, 0.5       , 0.5       ], dtype=float32)
    """
    counts = stops - starts - (SHORTEST - 1)
    before = np.cumsum(counts) - counts
    at = np.repeat(starts - before, counts) + np.arange(counts.sum())
    trigrams = content[at].astype(np.uint32)
    trigrams |= content[at + 1].astype(np.uint32) << np.uint32(8)
    trigrams |= content[at + 2].astype(np.uint32) << np.uint32(16)
    columns = (_mixed32(trigrams).astype(np.uint64) * np.uint64(dimensions)) >> np.uint64(32)

    # sorted by row, then column: equal neighbours are one entry
    keys = np.repeat(np.arange(len(starts), dtype=np.uint64) << np.uint64(32), counts) | columns
    keys.sort()
    firsts = np.flatnonzero(np.diff(keys, prepend=~keys[:1]))
    times = np.diff(firsts, append=len(keys))
    rows = (keys[firsts] >> np.uint64(32)).astype(np.int64)
    indptr = np.zeros(len(starts) + 1, dtype=np.int64)
    np.cumsum(np.bincount(rows, minlength=len(starts)), out=indptr[1:])
    indices = (keys[firsts] & np.uint64(0xFFFFFFFF)).astype(np.int32)
    return indptr, indices, np.sqrt(times / counts[rows]).astype(np.float32)


def drawn_order(rows: int, seed: int) -> np.ndarray:
    """Return the numbers of rows in an order drawn by ``seed``; no generator's version matters.

    Example:
        >>> drawn_order(6, seed=0)
        array([2, 4, 5, 1, 0, 3])
    """
    keys = _mixed64(np.arange(rows, dtype=np.uint64), seed)
    return np.argsort(keys, kind="stable")


def _mixed32(x: np.ndarray) -> np.ndarray:
    """Scatter 32-bit numbers over their range, in place: the finaliser of MurmurHash3 (Appleby)."""
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x85EBCA6B)
    x ^= x >> np.uint32(13)
    x *= np.uint32(0xC2B2AE35)
    x ^= x >> np.uint32(16)
    return x


def _mixed64(numbers: np.ndarray, seed: int) -> np.ndarray:
    """Scatter 64-bit numbers over their range, by seed: SplitMix64 (Steele et al., 2014)."""
    golden = 0x9E3779B97F4A7C15
    start = int(_finalised64(np.array([seed % 2**64], dtype=np.uint64))[0])
    return _finalised64(numbers * np.uint64(golden) + np.uint64((start + golden) % 2**64))


def _finalised64(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)))
