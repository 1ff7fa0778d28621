# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The hot loops and packing on a CUDA device, for float32, in Triton where torch's operations cost more.

``reference.py`` and ``packing.py`` describe the functions; the ones here are bit-equal to them.  If the
length of a result depends on the data, the host waits once to read this length.  It also waits once per
message to check unpacked indices.  No other operation waits for the device.  Arguments are contiguous
and on one device.

Functions decorated with ``jit`` are device code.  A kernel runs as many programs, each for one block of
``BLOCK`` elements.  ``at`` holds the positions of these elements (64 bits, because vectors may have more
than 2^31 elements), and ``inside`` masks positions beyond the end.  Names ending in ``_ptr`` are the
addresses of contiguous tensors; ``bits`` are float32 elements read as int32.  Results do not depend on
the order in which programs run: only integers are added atomically.

Triton is optional: without it, this module can be imported, but no kernel can be launched.  When Triton
is imported, it decides whether kernels are compiled or interpreted: with ``TRITON_INTERPRET=1``, they
run on CPU tensors, slowly, in NumPy.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from sparsync.kernels import packing
from sparsync.kernels.keys import check_pair
from sparsync.kernels.packing import _LARGEST_SCALE, _LEVELS, _NOT_FINITE
from sparsync.kernels.reference import count_from, deal, restrict, undeal

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
    "warps_of",
]

# the 31 bits of a key are four digits; a histogram of 256 counts fits into the registers of a program
_RADIX: Final = 256
_SHIFTS: Final = (24, 16, 8, 0)
# programs that count: enough to fill a large GPU (an H100 has 132 multiprocessors), but few enough that
# their additions to one histogram do not contend
_COUNTING_PROGRAMS: Final = 512
# elements per program; each of its 128 threads has four 16-byte loads of float32 in flight
BLOCK: Final = 2048


def installed() -> bool:
    """Return whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def _untouched(function: Callable[..., Any]) -> Any:
    return function


jit: Any = _untouched
tl: Any = None
if installed():
    jit, tl = importlib.import_module("triton").jit, importlib.import_module("triton.language")


def _blocks_of(n: int) -> int:
    """Return the number of programs that cover n elements; no kernel is launched if it is 0."""
    return -(-n // BLOCK)


def _launch(
    kernel: Any, programs: int, first: Tensor, *arguments: object, **constants: int
) -> None:
    """Launch a kernel on the device of its first argument; it runs after earlier launches there."""
    # disable fused multiply-adds, because the specification rounds products and sums separately
    with torch.cuda.device(first.device if first.is_cuda else -1):
        kernel[programs,](first, *arguments, **constants, enable_fp_fusion=False)


def warps_of(elements: int) -> int:
    """Return the number of warps for a program of this many elements, at least 16 per thread."""
    return min(max(elements // 512, 4), 32)


def _cover(kernel: Any, n: int, first: Tensor, *arguments: object, **constants: int) -> None:
    """Launch the programs that cover n elements."""
    _launch(kernel, _blocks_of(n), first, *arguments, BLOCK=BLOCK, **constants)


# ---- on the host -----------------------------------------------------------------------------------


def accumulate_(
    residual: Tensor, gradient: Tensor, key: int | None = None, limit: int = 0
) -> tuple[Tensor, Tensor] | None:
    """Cost: one pass over both vectors; with a key, a second pass and a host synchronisation."""
    check_pair(residual, gradient)
    n, floor = residual.numel(), max(key or 1, 1)
    counts = residual.new_empty(_blocks_of(n), dtype=torch.int32)
    _cover(_swap_accumulate, n, residual, gradient, counts, n, floor, COUNT=key is not None)
    return None if key is None else _collect(residual, counts, floor, limit)


def find(x: Tensor, key: int, limit: int | None) -> tuple[Tensor, Tensor] | None:
    n, floor = x.numel(), max(key, 1)
    counts = x.new_empty(_blocks_of(n), dtype=torch.int32)
    _cover(_count_above, n, _bits(x), counts, n, floor)
    return _collect(x, counts, floor, limit)


def _collect(
    x: Tensor, counts: Tensor, key: int, limit: int | None
) -> tuple[Tensor, Tensor] | None:
    """Return the elements that reach the key, in order; ``counts`` is their number in each block."""
    n, ends = x.numel(), counts.cumsum(0)
    total = int(ends[-1]) if n else 0  # the host waits here
    if limit is not None and total > limit:
        return None
    indices, values = x.new_empty(total, dtype=torch.int64), x.new_empty(total)
    if total:
        _cover(_compact, n, _bits(x), ends, indices, _bits(values), n, key)
    return indices, values


def top(x: Tensor, k: int) -> Tensor:
    """Cost: six passes over x, no sort; one host synchronisation."""
    n, k = x.numel(), max(min(k, x.numel()), 0)
    positions = x.new_empty(k, dtype=torch.int64)
    if k == 0:
        return positions
    bits, blocks = _bits(x), _blocks_of(n)
    state = _kth(bits, k)
    counts = x.new_empty(2, blocks, dtype=torch.int32)  # counts of larger keys, and of ties
    _cover(_count_top, n, bits, state, counts, n)
    length = x.new_empty(1, dtype=torch.int64)
    _cover(_compact_top, n, bits, state, counts.cumsum(1), positions, length, n)
    return positions[: int(length)]  # the host waits here


def _kth(bits: Tensor, k: int) -> Tensor:
    """Return, on the device, the k-th largest key and the number of its ties to select."""
    n, blocks = bits.numel(), _blocks_of(bits.numel())
    programs = min(blocks, _COUNTING_PROGRAMS)
    rounds = -(-blocks // programs)
    histograms = bits.new_zeros(len(_SHIFTS), _RADIX, dtype=torch.int64)
    # ``state`` holds the digits of the k-th largest key found so far, and the key's rank among the keys
    # that begin with these digits
    state = bits.new_zeros(2, dtype=torch.int64)
    state[1:].fill_(k)
    for shift, histogram in zip(_SHIFTS, histograms, strict=True):
        arguments = (bits, state, histogram, n, rounds)
        _launch(_count_digits, programs, *arguments, SHIFT=shift, BLOCK=BLOCK, RADIX=_RADIX)
        _launch(_choose_digit, 1, state, histogram, RADIX=_RADIX)
    return state


def merge(
    streams: Sequence[tuple[Tensor, Tensor]], size: int, within: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Sum streams by adding each to a dense vector, in a separate launch.

    Indices are unique within a stream, and launches run in order.  So no addition needs to be atomic,
    and every sum is a left fold.

    Cost: three passes over the ``size`` elements of the region and 4 bytes of memory for each of them;
    one host synchronisation.
    """
    if within is not None:
        kept = [restrict(indices, within) for indices, _ in streams]
        streams = [(i[which], v[which]) for which, (i, v) in zip(kept, streams, strict=True)]
    dense = streams[0][1].new_zeros(size)
    for indices, values in streams:
        _add_at(dense, indices, values, sign=1)
    found = find(dense, key=1, limit=None)
    assert found is not None  # cannot be None without a limit
    return found


def subtract_(dense: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    return _add_at(dense, indices, values, sign=-1)


def scatter_(dense: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    return _add_at(dense.zero_(), indices, values, sign=0)


def _add_at(dense: Tensor, indices: Tensor, values: Tensor, sign: int) -> Tensor:
    n = indices.numel()
    _cover(_scatter, n, dense, indices, values, n, SIGN=sign)
    return dense


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


# ---- packing --------------------------------------------------------------------------------------


def pack_indices(indices: Tensor, size: int) -> Tensor:
    nnz = indices.numel()
    low, bits = packing.low_bits(nnz, size), packing.index_bits(nnz, size)
    words = indices.new_zeros(bits // 32 + 2, dtype=torch.int32)
    _cover(_encode_indices, nnz, indices, words, nnz, low, nnz * low)
    return words.view(torch.uint8)[: (bits + 7) // 8]


def unpack_indices(packed: Tensor, nnz: int, size: int) -> Tensor:
    low = packing.low_bits(nnz, size)
    # read the padding as unary, as in the specification
    first, end = nnz * low, 8 * packed.numel()
    counts = packed.new_empty(_blocks_of(end - first), dtype=torch.int32)
    _cover(_count_ones, end - first, packed, counts, first, end)
    ends, indices = counts.cumsum(0), packed.new_zeros(nnz, dtype=torch.int64)
    _cover(_decode_indices, end - first, packed, ends, indices, first, end, nnz, low)
    disorder = (indices.diff() <= 0).sum() + (indices[-1:] >= size).sum()
    # the host waits here, once for both numbers
    ones, wrong = torch.stack([counts.sum(), disorder]).tolist()
    if ones != nnz:
        raise packing.miscounted(nnz, ones)
    if wrong:
        raise packing.unordered(size)
    return indices


def pack_values(values: Tensor, form: int, block: int) -> Tensor:
    n = values.numel()
    if form == packing.FP32:
        return values.view(torch.uint8)
    packed = values.new_empty(packing.value_bytes(n, form, block), dtype=torch.uint8)
    if form == packing.BF16:
        _cover(_encode_bf16, n, values.view(torch.int32), packed.view(torch.int16), n)
        return packed
    rows = -(-n // block)
    scales, codes = packed[: 4 * rows].view(torch.float32), packed[4 * rows :].view(torch.int8)
    width = 1 << (block - 1).bit_length()  # the width of a Triton block is a power of two
    height = max(BLOCK // width, 1)
    arguments = (values, scales, codes, n, block, _LEVELS, _LARGEST_SCALE, _NOT_FINITE)
    warps = warps_of(height * width)
    _launch(_encode_int8, -(-rows // height), *arguments, ROWS=height, WIDTH=width, num_warps=warps)
    return packed


def unpack_values(packed: Tensor, nnz: int, form: int, block: int) -> Tensor:
    if form == packing.FP32:
        return packing.view_as(packed, torch.float32)
    values = packed.new_empty(nnz, dtype=torch.float32)
    if form == packing.BF16:
        rounded = packing.view_as(packed, torch.int16)
        _cover(_decode_bf16, nnz, rounded, values.view(torch.int32), nnz)
        return values
    rows = -(-nnz // block)
    scales = packing.view_as(packed[: 4 * rows], torch.float32)
    codes = packed[4 * rows :].view(torch.int8)
    _cover(_decode_int8, nnz, scales, codes, values, nnz, block, _NOT_FINITE)
    return values


# ---- on the device ---------------------------------------------------------------------------------


# ---- helpers --------------------------------------------------------------------------------------


@jit
def _positions(BLOCK: tl.constexpr):
    """Return the positions of this program's elements."""
    return tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)


@jit
def _keys(bits):
    """Return magnitude keys from the bits of float32: the specification's ``magnitude_keys``."""
    return bits & 0x7FFFFFFF


# ---- ordered selection: count per block, then compact ------------------------------------------------


@jit
def _swap_accumulate(
    residual_ptr, gradient_ptr, counts_ptr, n, key, BLOCK: tl.constexpr, COUNT: tl.constexpr
):
    """Compute ``residual, gradient = residual + gradient, residual``; count keys >= ``key`` by block."""
    at = _positions(BLOCK)
    inside = at < n
    before = tl.load(residual_ptr + at, mask=inside, other=0.0)
    accumulated = before + tl.load(gradient_ptr + at, mask=inside, other=0.0)
    tl.store(residual_ptr + at, accumulated, mask=inside)
    tl.store(gradient_ptr + at, before, mask=inside)
    if COUNT:
        reaching = _keys(accumulated.to(tl.int32, bitcast=True)) >= key
        tl.store(counts_ptr + tl.program_id(0), tl.sum(reaching.to(tl.int32), axis=0))


@jit
def _count_above(bits_ptr, counts_ptr, n, key, BLOCK: tl.constexpr):
    """Count, per block, the elements that reach ``key``; it is at least 1, so padding never counts."""
    at = _positions(BLOCK)
    reaching = _keys(tl.load(bits_ptr + at, mask=at < n, other=0)) >= key
    tl.store(counts_ptr + tl.program_id(0), tl.sum(reaching.to(tl.int32), axis=0))


@jit
def _compact(bits_ptr, ends_ptr, positions_ptr, values_ptr, n, key, BLOCK: tl.constexpr):
    """Write positions and bits of elements with keys >= ``key``; ``ends`` are running sums of counts."""
    at = _positions(BLOCK)
    bits = tl.load(bits_ptr + at, mask=at < n, other=0)
    reaching = _keys(bits) >= key
    number = tl.cumsum(reaching.to(tl.int32), axis=0)  # counts from 1 in each block
    start = tl.load(ends_ptr + tl.program_id(0)) - tl.sum(reaching.to(tl.int32), axis=0)
    tl.store(positions_ptr + start + number - 1, at, mask=reaching)
    tl.store(values_ptr + start + number - 1, bits, mask=reaching)


# ---- exact top k: a radix select, then ordered selection with ties ------------------------------------


@jit
def _count_digits(
    bits_ptr,
    state_ptr,
    histogram_ptr,
    n,
    rounds,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    RADIX: tl.constexpr,
):
    """Count the digits above bit ``SHIFT`` of the keys whose higher digits are ``state[0]``.

    Each program handles blocks all over the vector, so that only a few programs add to the histogram.
    Keys that are not candidates are counted as digit 0, whose count ``_choose_digit`` never reads.
    """
    at = _positions(BLOCK)
    chosen = tl.load(state_ptr)
    counts = tl.zeros([RADIX], tl.int64)
    for _ in range(rounds):
        keys = _keys(tl.load(bits_ptr + at, mask=at < n, other=0))
        digits = keys >> SHIFT
        digits = tl.where(digits // RADIX == chosen, digits % RADIX, 0)
        counts += tl.histogram(digits, RADIX)
        at += tl.num_programs(0).to(tl.int64) * BLOCK
    tl.atomic_add(histogram_ptr + tl.arange(0, RADIX), counts, sem="relaxed")


@jit
def _choose_digit(state_ptr, histogram_ptr, RADIX: tl.constexpr):
    """Append the digit of the ``state[1]``-th largest candidate to ``state[0]``; update ``state[1]``."""
    chosen, wanted = tl.load(state_ptr), tl.load(state_ptr + 1)
    digits = tl.arange(0, RADIX)
    counts = tl.where(digits == 0, 0, tl.load(histogram_ptr + digits))
    # the number of candidates with this digit or a larger one
    reaching = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0) + counts
    enough = (digits > 0) & (reaching >= wanted)
    digit = tl.max(tl.where(enough, digits, 0), axis=0)
    larger = tl.sum(tl.where(digits > digit, counts, 0), axis=0)
    tl.store(state_ptr, chosen * RADIX + digit)
    tl.store(state_ptr + 1, wanted - larger)


@jit
def _count_top(bits_ptr, state_ptr, counts_ptr, n, BLOCK: tl.constexpr):
    """Count, per block, the keys above ``state[0]``, the k-th largest one, and the ties with it."""
    at = _positions(BLOCK)
    keys = _keys(tl.load(bits_ptr + at, mask=at < n, other=0))
    kth = tl.load(state_ptr)
    block, blocks = tl.program_id(0), tl.num_programs(0)
    tl.store(counts_ptr + block, tl.sum((keys > kth).to(tl.int32), axis=0))
    tl.store(counts_ptr + blocks + block, tl.sum((keys == kth).to(tl.int32), axis=0))


@jit
def _compact_top(bits_ptr, state_ptr, ends_ptr, positions_ptr, count_ptr, n, BLOCK: tl.constexpr):
    """Write the positions of the top k, in ascending order, and their number.

    Of the ties, only the first ``state[1]`` are written, and none if the k-th largest key is zero.
    """
    at = _positions(BLOCK)
    keys = _keys(tl.load(bits_ptr + at, mask=at < n, other=0))
    kth, taken = tl.load(state_ptr), tl.load(state_ptr + 1)
    taken = tl.where(kth > 0, taken, 0)
    block, blocks = tl.program_id(0), tl.num_programs(0)
    larger, ties = (keys > kth).to(tl.int32), (keys == kth).to(tl.int32)
    larger_end, ties_end = tl.load(ends_ptr + block), tl.load(ends_ptr + blocks + block)
    # the number of larger keys, and of ties, before an element, over all blocks
    larger_before = larger_end - tl.sum(larger, axis=0) + tl.cumsum(larger, axis=0) - larger
    ties_before = ties_end - tl.sum(ties, axis=0) + tl.cumsum(ties, axis=0) - ties
    selected = (keys > kth) | ((keys == kth) & (ties_before < taken))
    tl.store(positions_ptr + larger_before + tl.minimum(ties_before, taken), at, mask=selected)
    if block == blocks - 1:
        tl.store(count_ptr, larger_end + tl.minimum(ties_end, taken))


# ---- sets and sums ----------------------------------------------------------------------------------


@jit
def _scatter(dense_ptr, indices_ptr, values_ptr, n, BLOCK: tl.constexpr, SIGN: tl.constexpr):
    """Set elements of ``dense``, or add or subtract values (``SIGN`` 0, 1 or -1); indices are unique."""
    at = _positions(BLOCK)
    inside = at < n
    targets = dense_ptr + tl.load(indices_ptr + at, mask=inside, other=0)
    values = tl.load(values_ptr + at, mask=inside, other=0.0)
    if SIGN == 1:
        values = tl.load(targets, mask=inside, other=0.0) + values
    if SIGN == -1:
        values = tl.load(targets, mask=inside, other=0.0) - values
    tl.store(targets, values, mask=inside)


# ---- packing: kernels/packing.py describes the bits ----------------------------------------------------


@jit
def _encode_indices(indices_ptr, words_ptr, n, low, unary, BLOCK: tl.constexpr):
    """Set the low bits and the unary bit of each index in 32-bit words, which are zero at first.

    The unary part begins at bit ``unary``.
    """
    at = _positions(BLOCK)
    inside = at < n
    indices = tl.load(indices_ptr + at, mask=inside, other=0)
    ones = tl.full([BLOCK], 1, tl.int64)
    # an entry's low bits may straddle two words
    low_at = at * low
    low_bits = (indices & ((ones << low) - 1)) << (low_at & 31)
    first, second = low_bits.to(tl.int32), (low_bits >> 32).to(tl.int32)
    tl.atomic_or(words_ptr + (low_at >> 5), first, mask=inside & (first != 0), sem="relaxed")
    tl.atomic_or(words_ptr + (low_at >> 5) + 1, second, mask=inside & (second != 0), sem="relaxed")
    unary_at = unary + (indices >> low) + at
    bit = (ones << (unary_at & 31)).to(tl.int32)
    tl.atomic_or(words_ptr + (unary_at >> 5), bit, mask=inside, sem="relaxed")


@jit
def _ones(packed_ptr, first, end, at):
    """Return the bits at ``first + at``, and 0 at positions from ``end`` on."""
    inside = first + at < end
    octets = tl.load(packed_ptr + ((first + at) >> 3), mask=inside, other=0).to(tl.int32)
    return (octets >> ((first + at) & 7).to(tl.int32)) & 1


@jit
def _count_ones(packed_ptr, counts_ptr, first, end, BLOCK: tl.constexpr):
    """Count, per block of bits, the set bits in ``[first, end)``."""
    ones = _ones(packed_ptr, first, end, _positions(BLOCK))
    tl.store(counts_ptr + tl.program_id(0), tl.sum(ones, axis=0))


@jit
def _decode_indices(packed_ptr, ends_ptr, indices_ptr, first, end, n, low, BLOCK: tl.constexpr):
    """Write the index that each set bit of the unary part stands for, up to ``n`` indices."""
    at = _positions(BLOCK)
    ones = _ones(packed_ptr, first, end, at)
    start = tl.load(ends_ptr + tl.program_id(0)) - tl.sum(ones, axis=0)
    order = start + tl.cumsum(ones, axis=0) - 1
    wanted = (ones == 1) & (order < n)
    low_at = order * low
    low_bits = tl.zeros([BLOCK], tl.int64)
    # 32 bits that begin in one octet end in the fifth at the latest
    for octet in tl.static_range(5):
        place = (low_at >> 3) + octet
        octets = tl.load(packed_ptr + place, mask=wanted & (place * 8 < end), other=0).to(tl.int64)
        low_bits |= octets << (8 * octet)
    mask = (tl.full([BLOCK], 1, tl.int64) << low) - 1
    low_bits = (low_bits >> (low_at & 7)) & mask
    tl.store(indices_ptr + order, ((at - order) << low) | low_bits, mask=wanted)


@jit
def _encode_bf16(bits_ptr, packed_ptr, n, BLOCK: tl.constexpr):
    """Round to nearest, ties to even, with integers; never up to Inf; write only one kind of NaN."""
    at = _positions(BLOCK)
    bits = tl.load(bits_ptr + at, mask=at < n, other=0)
    magnitude = bits & 0x7FFFFFFF
    rounded = (magnitude >> 16) + (((magnitude & 0xFFFF) + 0x7FFF + ((magnitude >> 16) & 1)) >> 16)
    rounded = tl.where(magnitude < 0x7F800000, tl.minimum(rounded, 0x7F7F), rounded)
    rounded = tl.where(magnitude > 0x7F800000, 0x7FC0, rounded)
    tl.store(packed_ptr + at, (rounded | ((bits >> 16) & 0x8000)).to(tl.int16), mask=at < n)


@jit
def _decode_bf16(packed_ptr, bits_ptr, n, BLOCK: tl.constexpr):
    """Convert bf16 to float32 by appending sixteen zero bits."""
    at = _positions(BLOCK)
    rounded = tl.load(packed_ptr + at, mask=at < n, other=0).to(tl.int32)
    tl.store(bits_ptr + at, rounded << 16, mask=at < n)


@jit
def _encode_int8(
    values_ptr,
    scales_ptr,
    codes_ptr,
    n,
    row,
    levels,
    largest,
    not_finite,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Divide each row of ``row`` values (``row <= WIDTH``) by its scale, and round."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    at = rows[:, None] * row + columns[None, :]
    inside = (columns[None, :] < row) & (at < n)
    values = tl.load(values_ptr + at, mask=inside, other=0.0)
    magnitude = tl.abs(values)
    finite = magnitude < float("inf")
    peaks = tl.max(tl.where(finite, magnitude, 0.0), axis=1)
    # not every version of Triton divides denormal float32 exactly; a float64 quotient rounded to float32
    # equals a quotient that is rounded once
    scales = tl.minimum((peaks.to(tl.float64) / levels).to(tl.float32), largest)
    tl.store(scales_ptr + rows, scales, mask=rows * row < n)
    divisors = tl.where(scales == 0.0, 1.0, scales)[:, None]
    scaled = (tl.where(finite, values, 0.0).to(tl.float64) / divisors).to(tl.float32)
    # the constant is 1.5 * 2^23: a float32 that large has no fraction, so the sum is rounded to an
    # integer, ties to even
    rounded = (scaled + 12582912.0) - 12582912.0
    codes = tl.minimum(tl.maximum(rounded, -levels), levels)
    codes = tl.where(finite, codes, not_finite).to(tl.int8)
    tl.store(codes_ptr + at, codes, mask=inside)


@jit
def _decode_int8(scales_ptr, codes_ptr, values_ptr, n, row, not_finite, BLOCK: tl.constexpr):
    """Multiply each code by the scale of its row; the code ``not_finite`` becomes NaN."""
    at = _positions(BLOCK)
    inside = at < n
    codes = tl.load(codes_ptr + at, mask=inside, other=0)
    values = codes.to(tl.float32) * tl.load(scales_ptr + at // row, mask=inside, other=0.0)
    tl.store(values_ptr + at, tl.where(codes == not_finite, float("nan"), values), mask=inside)
