# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The device code of packing; ``device.py`` says how to read it, ``kernels/packing.py`` the format."""

from __future__ import annotations

from sparsync.kernels.triton.device import positions
from sparsync.kernels.triton.language import jit, tl

__all__ = [
    "count_ones",
    "decode_bf16",
    "decode_indices",
    "decode_int8",
    "encode_bf16",
    "encode_indices",
    "encode_int8",
]


# ---- indices --------------------------------------------------------------------------------------


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


# ---- values ---------------------------------------------------------------------------------------


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
