"""Byte trigrams as columns, and an order of rows: integers only, the same on every machine."""

from __future__ import annotations

import numpy as np

__all__ = ["SHORTEST", "drawn_order", "hash_trigrams"]

SHORTEST = 3  # bytes that make a trigram


def hash_trigrams(
    content: np.ndarray, starts: np.ndarray, stops: np.ndarray, dimensions: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Hash the byte trigrams of samples to columns; an entry is sqrt(times / trigrams of the sample).

    Square roots of counts, so that the runs of blanks in a source do not drown the rest; a row has
    length 1, and every operation is exact or correctly rounded, whatever the machine.

    Args:
        content: bytes, ``uint8``.
        starts: `[rows]` with ``int64``: first byte of each sample.
        stops: `[rows]` with ``int64``: the byte behind its last; at least ``SHORTEST`` farther.
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
