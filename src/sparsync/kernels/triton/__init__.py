"""The hot loops on a CUDA device: the functions of ``kernels/reference.py`` for float32, in Triton.

Bit-equal to the specification.  Where the data decide how long a result is, the host waits once, to read
that length; nothing else waits for the device.  Arguments are contiguous and on one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from sparsync.kernels.triton import device
from sparsync.kernels.triton.language import BLOCK, blocks_of, cover, installed, launch

__all__ = [
    "BLOCK",
    "accumulate_",
    "count_from",
    "find",
    "installed",
    "merge",
    "restrict",
    "scatter_",
    "subtract_",
    "top",
]

# the 31 bits of a key are four digits; a histogram of 256 counts fits the registers of a program
_RADIX: Final = 256
_SHIFTS: Final = (24, 16, 8, 0)
# this many programs fill a large GPU (132 multiprocessors of an H100) and few add to one histogram
_COUNTING_PROGRAMS: Final = 512


def accumulate_(
    residual: Tensor, gradient: Tensor, key: int | None = None, limit: int = 0
) -> tuple[Tensor, Tensor] | None:
    """``residual, gradient = residual + gradient, residual``, in place; find what reaches ``key``.

    Returns:
        The new residual's entries of ``magnitude_keys >= max(key, 1)``; None without a key, or if more
        than ``limit`` reach it.

    Cost: one pass that reads and writes both; with a key, another that reads the residual, and one
    host synchronisation.
    """
    n, floor = residual.numel(), max(key or 1, 1)
    counts = residual.new_empty(blocks_of(n), dtype=torch.int32)
    cover(device.swap_accumulate, n, residual, gradient, counts, n, floor, COUNT=key is not None)
    return None if key is None else _compact(residual, counts, floor, limit)


def find(x: Tensor, key: int, limit: int | None) -> tuple[Tensor, Tensor] | None:
    """Find the entries of ``magnitude_keys >= max(key, 1)``; None if there are more than ``limit``.

    Cost: two readings of x, one host synchronisation.
    """
    n, floor = x.numel(), max(key, 1)
    counts = x.new_empty(blocks_of(n), dtype=torch.int32)
    cover(device.count_above, n, _bits(x), counts, n, floor)
    return _compact(x, counts, floor, limit)


def _compact(
    x: Tensor, counts: Tensor, key: int, limit: int | None
) -> tuple[Tensor, Tensor] | None:
    """Collect in order what reaches the key, given how many elements of each block do."""
    n, ends = x.numel(), counts.cumsum(0)
    total = int(ends[-1]) if n else 0  # the host waits here
    if limit is not None and total > limit:
        return None
    indices, values = x.new_empty(total, dtype=torch.int64), x.new_empty(total)
    if total:
        cover(device.compact, n, _bits(x), ends, indices, _bits(values), n, key)
    return indices, values


def top(x: Tensor, k: int, *, nonzero: bool = False) -> Tensor:
    """Return the ascending positions of the ``min(k, nnz)`` non-zero elements of largest magnitude.

    Ties go to the lower position.  A radix select finds the k-th largest key, digit by digit.

    Args:
        x: `[n]` float32.
        k: number of positions asked for.
        nonzero: promise that no element is zero, as in what ``find`` returns: then the length of the
            result is known, and the host does not wait.

    Cost: six readings of x, no sort; one host synchronisation without ``nonzero``.
    """
    n, k = x.numel(), max(min(k, x.numel()), 0)
    positions = x.new_empty(k, dtype=torch.int64)
    if k == 0:
        return positions
    bits, blocks = _bits(x), blocks_of(n)
    state = _kth(bits, k)
    counts = x.new_empty(2, blocks, dtype=torch.int32)  # of larger keys; of ties
    cover(device.count_top, n, bits, state, counts, n)
    length = x.new_empty(1, dtype=torch.int64)
    cover(device.compact_top, n, bits, state, counts.cumsum(1), positions, length, n)
    return positions if nonzero else positions[: int(length)]


def _kth(bits: Tensor, k: int) -> Tensor:
    """Return on the device: the k-th largest key, and how many of those that tie with it to take."""
    n, blocks = bits.numel(), blocks_of(bits.numel())
    programs = min(blocks, _COUNTING_PROGRAMS)
    rounds = -(-blocks // programs)
    histograms = bits.new_zeros(len(_SHIFTS), _RADIX, dtype=torch.int64)
    state = bits.new_zeros(
        2, dtype=torch.int64
    )  # the key's digits so far; how many are wanted of it
    state[1:].fill_(k)
    for shift, histogram in zip(_SHIFTS, histograms, strict=True):
        arguments = (bits, state, histogram, n, rounds)
        launch(device.count_digits, programs, *arguments, SHIFT=shift, BLOCK=BLOCK, RADIX=_RADIX)
        launch(device.choose_digit, 1, state, histogram, RADIX=_RADIX)
    return state


def merge(
    streams: Sequence[tuple[Tensor, Tensor]], size: int, within: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Sum sorted ``(indices, values)`` streams as a left fold in the order given; drop zero sums.

    One launch per stream adds it to a dense vector: within a stream no index occurs twice, and
    launches run in order, so nothing is added atomically.

    Cost: three passes over the ``size`` elements of the region, which is 4 bytes of memory for each;
    one host synchronisation.
    """
    if within is not None:
        kept = [restrict(indices, within) for indices, _ in streams]
        streams = [(i[which], v[which]) for which, (i, v) in zip(kept, streams, strict=True)]
    dense = streams[0][1].new_zeros(size)
    for indices, values in streams:
        _scatter(dense, indices, values, sign=1)
    found = find(dense, key=1, limit=None)
    assert found is not None  # without a limit, always
    return found


def restrict(indices: Tensor, among: Tensor) -> Tensor:
    """Return the positions within ``indices`` of those that occur in ``among``; both ascend.

    Cost: a binary search per index, one host synchronisation.
    """
    n, others = indices.numel(), among.numel()
    members = indices.new_empty(n, dtype=torch.int32)
    counts = indices.new_empty(blocks_of(n), dtype=torch.int32)
    steps = others.bit_length()
    cover(device.count_members, n, indices, among, members, counts, n, others, steps)
    # a mark of 1 is, as bits of a float32, the smallest key that is not zero
    found = _compact(members.view(torch.float32), counts, key=1, limit=None)
    assert found is not None  # without a limit, always
    return found[0]


def subtract_(dense: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """``dense[indices] -= values``, in place; indices are unique.  Returns ``dense``."""
    return _scatter(dense, indices, values, sign=-1)


def scatter_(dense: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """``dense = 0; dense[indices] = values``, in place: a memset and a launch.  Returns ``dense``."""
    return _scatter(dense.zero_(), indices, values, sign=0)


def _scatter(dense: Tensor, indices: Tensor, values: Tensor, sign: int) -> Tensor:
    n = indices.numel()
    cover(device.scatter, n, dense, indices, values, n, SIGN=sign)
    return dense


def count_from(values: Tensor, keys: Tensor) -> Tensor:
    """Return, for each ascending magnitude key, how many values reach it; `[len(keys)]`, int64.

    Cost: a binary search and at most one integer atomic per value; nothing waits.
    """
    n, bins = values.numel(), keys.numel()
    largest_reached = values.new_zeros(bins, dtype=torch.int64)  # how often each key is that
    arguments = (_bits(values), keys.to(torch.int64), largest_reached, n, bins, bins.bit_length())
    cover(device.count_keys, n, *arguments)
    return largest_reached.flip(0).cumsum(0).flip(0)


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)
