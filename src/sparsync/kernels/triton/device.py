# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The device code, and how it is launched: functions under ``jit`` are Triton kernels or their helpers.

A kernel runs as many programs, each on one block of ``BLOCK`` elements; ``at`` are the positions of its
elements (64 bits: vectors may have more than 2^31 elements) and ``inside`` masks those beyond
the end.  Names ending in ``_ptr`` are the addresses of contiguous tensors; ``bits`` are float32 elements
read as int32.  No kernel depends on the order in which programs run: nothing but integers is added
atomically.

Triton is optional: without it this module can be imported, but no kernel can be launched.  Whether
kernels are compiled or interpreted is decided when Triton is imported: with ``TRITON_INTERPRET=1`` set by
then, they run on CPU tensors, slowly, in NumPy.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

__all__ = [
    "BLOCK",
    "blocks_of",
    "choose_digit",
    "compact",
    "compact_top",
    "count_above",
    "count_digits",
    "count_ones",
    "count_top",
    "cover",
    "decode_bf16",
    "decode_indices",
    "decode_int8",
    "encode_bf16",
    "encode_indices",
    "encode_int8",
    "installed",
    "launch",
    "positions",
    "scatter",
    "swap_accumulate",
]

# elements of a program: four 16-byte loads of float32 in flight for each of its 128 threads
BLOCK: Final = 2048


def installed() -> bool:
    """Whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def _untouched(function: Callable[..., Any]) -> Any:
    return function


jit: Any = _untouched
tl: Any = None
if installed():
    jit, tl = importlib.import_module("triton").jit, importlib.import_module("triton.language")


def blocks_of(n: int) -> int:
    """Return how many programs cover n elements; 0 programs launch nothing."""
    return -(-n // BLOCK)


def launch(kernel: Any, programs: int, first: Tensor, *arguments: object, **constants: int) -> None:
    """Run a kernel on the device of its first argument, after what was launched there before."""
    with torch.cuda.device(first.device if first.is_cuda else -1):
        kernel[programs,](first, *arguments, **constants)


def cover(kernel: Any, n: int, first: Tensor, *arguments: object, **constants: int) -> None:
    """Launch as many programs as n elements take."""
    launch(kernel, blocks_of(n), first, *arguments, BLOCK=BLOCK, **constants)


# ---- helpers --------------------------------------------------------------------------------------


@jit
def positions(BLOCK: tl.constexpr):
    """Return the positions of this program's elements."""
    return tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)


@jit
def _keys(bits):
    """Order bits of float32 like magnitudes: the specification's ``magnitude_keys``."""
    return bits & 0x7FFFFFFF


# ---- ordered selection: count per block, then compact ------------------------------------------------


@jit
def swap_accumulate(
    residual_ptr, gradient_ptr, counts_ptr, n, key, BLOCK: tl.constexpr, COUNT: tl.constexpr
):
    """``residual, gradient = residual + gradient, residual``; count per block what reaches ``key``."""
    at = positions(BLOCK)
    inside = at < n
    before = tl.load(residual_ptr + at, mask=inside, other=0.0)
    accumulated = before + tl.load(gradient_ptr + at, mask=inside, other=0.0)
    tl.store(residual_ptr + at, accumulated, mask=inside)
    tl.store(gradient_ptr + at, before, mask=inside)
    if COUNT:
        reaching = _keys(accumulated.to(tl.int32, bitcast=True)) >= key
        tl.store(counts_ptr + tl.program_id(0), tl.sum(reaching.to(tl.int32), axis=0))


@jit
def count_above(bits_ptr, counts_ptr, n, key, BLOCK: tl.constexpr):
    """Count per block what reaches ``key`` (at least 1, so that padding never does)."""
    at = positions(BLOCK)
    reaching = _keys(tl.load(bits_ptr + at, mask=at < n, other=0)) >= key
    tl.store(counts_ptr + tl.program_id(0), tl.sum(reaching.to(tl.int32), axis=0))


@jit
def compact(bits_ptr, ends_ptr, positions_ptr, values_ptr, n, key, BLOCK: tl.constexpr):
    """Write positions and bits of what reaches ``key``, ascending; ``ends`` = running sums of counts."""
    at = positions(BLOCK)
    bits = tl.load(bits_ptr + at, mask=at < n, other=0)
    reaching = _keys(bits) >= key
    number = tl.cumsum(reaching.to(tl.int32), axis=0)  # 1 for the block's first
    start = tl.load(ends_ptr + tl.program_id(0)) - tl.sum(reaching.to(tl.int32), axis=0)
    tl.store(positions_ptr + start + number - 1, at, mask=reaching)
    tl.store(values_ptr + start + number - 1, bits, mask=reaching)


# ---- exact top k: a radix select, then ordered selection with ties ------------------------------------


@jit
def count_digits(
    bits_ptr,
    state_ptr,
    histogram_ptr,
    n,
    rounds,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    RADIX: tl.constexpr,
):
    """Count the digits above ``SHIFT`` of the keys whose higher digits are ``state[0]``.

    Each program strides over the vector, so that few programs add to the histogram.  What is no
    candidate is counted as digit 0, whose count ``choose_digit`` never reads.
    """
    at = positions(BLOCK)
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
def choose_digit(
    state_ptr,
    histogram_ptr,
    RADIX: tl.constexpr,
):
    """Append to ``state[0]`` the digit of the ``state[1]``-th largest candidate; count down to it."""
    chosen, wanted = tl.load(state_ptr), tl.load(state_ptr + 1)
    digits = tl.arange(0, RADIX)
    counts = tl.load(histogram_ptr + digits)
    counts = tl.where(digits == 0, 0, counts)
    reaching = (
        tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0) + counts
    )  # with this digit or more
    enough = (digits > 0) & (reaching >= wanted)
    digit = tl.max(tl.where(enough, digits, 0), axis=0)
    larger = tl.sum(tl.where(digits > digit, counts, 0), axis=0)
    tl.store(state_ptr, chosen * RADIX + digit)
    tl.store(state_ptr + 1, wanted - larger)


@jit
def count_top(bits_ptr, state_ptr, counts_ptr, n, BLOCK: tl.constexpr):
    """Count per block the keys above the k-th largest, ``state[0]``, and those that tie with it."""
    at = positions(BLOCK)
    keys = _keys(tl.load(bits_ptr + at, mask=at < n, other=0))
    kth = tl.load(state_ptr)
    block, blocks = tl.program_id(0), tl.num_programs(0)
    tl.store(counts_ptr + block, tl.sum((keys > kth).to(tl.int32), axis=0))
    tl.store(counts_ptr + blocks + block, tl.sum((keys == kth).to(tl.int32), axis=0))


@jit
def compact_top(bits_ptr, state_ptr, ends_ptr, positions_ptr, count_ptr, n, BLOCK: tl.constexpr):
    """Write the positions of the top k, ascending, and how many there are.

    Of the ties the first ``state[1]`` are taken; none if the k-th largest is zero.
    """
    at = positions(BLOCK)
    keys = _keys(tl.load(bits_ptr + at, mask=at < n, other=0))
    kth, taken = tl.load(state_ptr), tl.load(state_ptr + 1)
    taken = tl.where(kth > 0, taken, 0)
    block, blocks = tl.program_id(0), tl.num_programs(0)
    larger, ties = (keys > kth).to(tl.int32), (keys == kth).to(tl.int32)
    larger_end, ties_end = tl.load(ends_ptr + block), tl.load(ends_ptr + blocks + block)
    # how many of either kind lie before an element, in all blocks
    larger_before = larger_end - tl.sum(larger, axis=0) + tl.cumsum(larger, axis=0) - larger
    ties_before = ties_end - tl.sum(ties, axis=0) + tl.cumsum(ties, axis=0) - ties
    selected = (keys > kth) | ((keys == kth) & (ties_before < taken))
    tl.store(positions_ptr + larger_before + tl.minimum(ties_before, taken), at, mask=selected)
    if block == blocks - 1:
        tl.store(count_ptr, larger_end + tl.minimum(ties_end, taken))


# ---- sets and sums ----------------------------------------------------------------------------------


@jit
def scatter(dense_ptr, indices_ptr, values_ptr, n, BLOCK: tl.constexpr, SIGN: tl.constexpr):
    """``dense[i] = v``, ``+= v`` or ``-= v`` (``SIGN`` 0, 1 or -1); no index occurs twice."""
    at = positions(BLOCK)
    inside = at < n
    targets = dense_ptr + tl.load(indices_ptr + at, mask=inside, other=0)
    values = tl.load(values_ptr + at, mask=inside, other=0.0)
    if SIGN == 1:
        values = tl.load(targets, mask=inside, other=0.0) + values
    if SIGN == -1:
        values = tl.load(targets, mask=inside, other=0.0) - values
    tl.store(targets, values, mask=inside)


# ---- packing: kernels/packing.py says what the bits are ------------------------------------------------


@jit
def encode_indices(indices_ptr, words_ptr, n, low, unary, BLOCK: tl.constexpr):
    """Or the low bits and the unary bit of each index into zeroed words of 32 bits.

    The unary part begins at the bit ``unary``.
    """
    at = positions(BLOCK)
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
    """Read the bits ``first + at`` below ``end``; 0 beyond."""
    inside = first + at < end
    octets = tl.load(packed_ptr + ((first + at) >> 3), mask=inside, other=0).to(tl.int32)
    return (octets >> ((first + at) & 7).to(tl.int32)) & 1


@jit
def count_ones(packed_ptr, counts_ptr, first, end, BLOCK: tl.constexpr):
    """Count per block of bits those set in ``[first, end)``."""
    ones = _ones(packed_ptr, first, end, positions(BLOCK))
    tl.store(counts_ptr + tl.program_id(0), tl.sum(ones, axis=0))


@jit
def decode_indices(packed_ptr, ends_ptr, indices_ptr, first, end, n, low, BLOCK: tl.constexpr):
    """Write the index of each set bit; what is beyond ``n`` is not written."""
    at = positions(BLOCK)
    ones = _ones(packed_ptr, first, end, at)
    start = tl.load(ends_ptr + tl.program_id(0)) - tl.sum(ones, axis=0)
    order = start + tl.cumsum(ones, axis=0) - 1
    wanted = (ones == 1) & (order < n)
    low_at = order * low
    low_bits = tl.zeros([BLOCK], tl.int64)
    for octet in tl.static_range(5):  # 32 bits that begin within an octet end in the fifth
        place = (low_at >> 3) + octet
        octets = tl.load(packed_ptr + place, mask=wanted & (place * 8 < end), other=0).to(tl.int64)
        low_bits |= octets << (8 * octet)
    mask = (tl.full([BLOCK], 1, tl.int64) << low) - 1
    low_bits = (low_bits >> (low_at & 7)) & mask
    tl.store(indices_ptr + order, ((at - order) << low) | low_bits, mask=wanted)


@jit
def encode_bf16(bits_ptr, packed_ptr, n, BLOCK: tl.constexpr):
    """Round to nearest, ties to even, by integers; never up to Inf, and to one NaN."""
    at = positions(BLOCK)
    bits = tl.load(bits_ptr + at, mask=at < n, other=0)
    magnitude = bits & 0x7FFFFFFF
    rounded = (magnitude >> 16) + (((magnitude & 0xFFFF) + 0x7FFF + ((magnitude >> 16) & 1)) >> 16)
    rounded = tl.where(magnitude < 0x7F800000, tl.minimum(rounded, 0x7F7F), rounded)
    rounded = tl.where(magnitude > 0x7F800000, 0x7FC0, rounded)
    tl.store(packed_ptr + at, (rounded | ((bits >> 16) & 0x8000)).to(tl.int16), mask=at < n)


@jit
def decode_bf16(packed_ptr, bits_ptr, n, BLOCK: tl.constexpr):
    """Append sixteen zero bits."""
    at = positions(BLOCK)
    rounded = tl.load(packed_ptr + at, mask=at < n, other=0).to(tl.int32)
    tl.store(bits_ptr + at, rounded << 16, mask=at < n)


@jit
def encode_int8(
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
    """Scale each row of ``row`` values (``row <= WIDTH``) by its largest, and round."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    at = rows[:, None] * row + columns[None, :]
    inside = (columns[None, :] < row) & (at < n)
    values = tl.load(values_ptr + at, mask=inside, other=0.0)
    magnitude = tl.abs(values)
    finite = magnitude < float("inf")
    peaks = tl.max(tl.where(finite, magnitude, 0.0), axis=1)
    # divided in float64 and rounded to float32, which is the quotient rounded once: not every version
    # of Triton divides float32 exactly where numbers are denormal
    scales = tl.minimum((peaks.to(tl.float64) / levels).to(tl.float32), largest)
    tl.store(scales_ptr + rows, scales, mask=rows * row < n)
    divisors = tl.where(scales == 0.0, 1.0, scales)[:, None]
    scaled = (tl.where(finite, values, 0.0).to(tl.float64) / divisors).to(tl.float32)
    # 1.5 * 2^23: a float32 that large has no fraction, so the sum is rounded, ties to even
    rounded = (scaled + 12582912.0) - 12582912.0
    codes = tl.minimum(tl.maximum(rounded, -levels), levels)
    codes = tl.where(finite, codes, not_finite).to(tl.int8)
    tl.store(codes_ptr + at, codes, mask=inside)


@jit
def decode_int8(scales_ptr, codes_ptr, values_ptr, n, row, not_finite, BLOCK: tl.constexpr):
    """Multiply each code with the scale of its row; the code ``not_finite`` stands for NaN."""
    at = positions(BLOCK)
    inside = at < n
    codes = tl.load(codes_ptr + at, mask=inside, other=0)
    values = codes.to(tl.float32) * tl.load(scales_ptr + at // row, mask=inside, other=0.0)
    tl.store(values_ptr + at, tl.where(codes == not_finite, float("nan"), values), mask=inside)
