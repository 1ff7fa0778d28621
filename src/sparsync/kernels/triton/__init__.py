"""The hot loops and packing on a CUDA device, for float32, in Triton where torch's operations cost more.

``kernels/__init__.py`` and ``kernels/packing.py`` describe the functions; these are bit-equal to the
specification.  Where the data decide how long a result is, the host waits once, to read that length, and
once per message for the check of unpacked indices; nothing else waits for the device.  Arguments are
contiguous and on one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from sparsync.kernels import packing
from sparsync.kernels.packing import _LARGEST_SCALE, _LEVELS, _NOT_FINITE
from sparsync.kernels.reference import count_from, deal, restrict, undeal
from sparsync.kernels.triton import device
from sparsync.kernels.triton.device import BLOCK, blocks_of, cover, installed, launch

__all__ = [
    "BLOCK",
    "accumulate_",
    "count_from",
    "deal",
    "find",
    "installed",
    "merge",
    "pack_indices",
    "pack_values",
    "restrict",
    "scatter_",
    "subtract_",
    "top",
    "undeal",
    "unpack_indices",
    "unpack_values",
]

# the 31 bits of a key are four digits; a histogram of 256 counts fits the registers of a program
_RADIX: Final = 256
_SHIFTS: Final = (24, 16, 8, 0)
# this many programs fill a large GPU (132 multiprocessors of an H100) and few add to one histogram
_COUNTING_PROGRAMS: Final = 512


def accumulate_(
    residual: Tensor, gradient: Tensor, key: int | None = None, limit: int = 0
) -> tuple[Tensor, Tensor] | None:
    """See ``kernels.accumulate_``.

    Cost: one pass that reads and writes both; with a key, another that reads the residual, and one
    host synchronisation.
    """
    n, floor = residual.numel(), max(key or 1, 1)
    counts = residual.new_empty(blocks_of(n), dtype=torch.int32)
    cover(device.swap_accumulate, n, residual, gradient, counts, n, floor, COUNT=key is not None)
    return None if key is None else _compact(residual, counts, floor, limit)


def find(x: Tensor, key: int, limit: int | None) -> tuple[Tensor, Tensor] | None:
    """See ``kernels.find``.  Cost: two readings of x, one host synchronisation."""
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


def top(x: Tensor, k: int) -> Tensor:
    """See ``kernels.top``.  A radix select finds the k-th largest key, digit by digit.

    Cost: six readings of x, no sort; one host synchronisation.
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
    return positions[: int(length)]  # the host waits here


def _kth(bits: Tensor, k: int) -> Tensor:
    """Return on the device: the k-th largest key, and how many of those that tie with it to take."""
    n, blocks = bits.numel(), blocks_of(bits.numel())
    programs = min(blocks, _COUNTING_PROGRAMS)
    rounds = -(-blocks // programs)
    histograms = bits.new_zeros(len(_SHIFTS), _RADIX, dtype=torch.int64)
    # the key's digits so far; how many are wanted of it
    state = bits.new_zeros(2, dtype=torch.int64)
    state[1:].fill_(k)
    for shift, histogram in zip(_SHIFTS, histograms, strict=True):
        arguments = (bits, state, histogram, n, rounds)
        launch(device.count_digits, programs, *arguments, SHIFT=shift, BLOCK=BLOCK, RADIX=_RADIX)
        launch(device.choose_digit, 1, state, histogram, RADIX=_RADIX)
    return state


def merge(
    streams: Sequence[tuple[Tensor, Tensor]], size: int, within: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See ``kernels.merge``.

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


def subtract_(dense: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """See ``kernels.subtract_``."""
    return _scatter(dense, indices, values, sign=-1)


def scatter_(dense: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """See ``kernels.scatter_``.  Cost: a memset and a launch."""
    return _scatter(dense.zero_(), indices, values, sign=0)


def _scatter(dense: Tensor, indices: Tensor, values: Tensor, sign: int) -> Tensor:
    n = indices.numel()
    cover(device.scatter, n, dense, indices, values, n, SIGN=sign)
    return dense


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


# ---- packing --------------------------------------------------------------------------------------


def pack_indices(indices: Tensor, size: int) -> Tensor:
    """See ``kernels.packing.pack_indices``."""
    nnz = indices.numel()
    low, bits = packing.low_bits(nnz, size), packing.index_bits(nnz, size)
    words = indices.new_zeros(bits // 32 + 2, dtype=torch.int32)
    cover(device.encode_indices, nnz, indices, words, nnz, low, nnz * low)
    return words.view(torch.uint8)[: (bits + 7) // 8]


def unpack_indices(packed: Tensor, nnz: int, size: int) -> Tensor:
    """See ``kernels.packing.unpack_indices``."""
    low = packing.low_bits(nnz, size)
    first, end = nnz * low, 8 * packed.numel()  # padding counts as unary, as in the specification
    counts = packed.new_empty(blocks_of(end - first), dtype=torch.int32)
    cover(device.count_ones, end - first, packed, counts, first, end)
    ends, indices = counts.cumsum(0), packed.new_zeros(nnz, dtype=torch.int64)
    cover(device.decode_indices, end - first, packed, ends, indices, first, end, nnz, low)
    disorder = (indices.diff() <= 0).sum() + (indices[-1:] >= size).sum()
    ones, wrong = torch.stack([counts.sum(), disorder]).tolist()  # the host waits here
    if ones != nnz:
        raise packing.miscounted(nnz, ones)
    if wrong:
        raise packing.unordered(size)
    return indices


def pack_values(values: Tensor, form: int, block: int) -> Tensor:
    """See ``kernels.packing.pack_values``."""
    n = values.numel()
    if form == packing.FP32:
        return values.view(torch.uint8)
    packed = values.new_empty(packing.value_bytes(n, form, block), dtype=torch.uint8)
    if form == packing.BF16:
        cover(device.encode_bf16, n, values.view(torch.int32), packed.view(torch.int16), n)
        return packed
    rows = -(-n // block)
    scales, codes = packed[: 4 * rows].view(torch.float32), packed[4 * rows :].view(torch.int8)
    width = 1 << (block - 1).bit_length()  # what a program sees is as wide as a power of two
    height = max(BLOCK // width, 1)
    arguments = (values, scales, codes, n, block, _LEVELS, _LARGEST_SCALE, _NOT_FINITE)
    launch(device.encode_int8, -(-rows // height), *arguments, ROWS=height, WIDTH=width)
    return packed


def unpack_values(packed: Tensor, nnz: int, form: int, block: int) -> Tensor:
    """See ``kernels.packing.unpack_values``."""
    if form == packing.FP32:
        return packing.view_as(packed, torch.float32)
    values = packed.new_empty(nnz, dtype=torch.float32)
    if form == packing.BF16:
        rounded = packing.view_as(packed, torch.int16)
        cover(device.decode_bf16, nnz, rounded, values.view(torch.int32), nnz)
        return values
    rows = -(-nnz // block)
    scales = packing.view_as(packed[: 4 * rows], torch.float32)
    codes = packed[4 * rows :].view(torch.int8)
    cover(device.decode_int8, nnz, scales, codes, values, nnz, block, _NOT_FINITE)
    return values
