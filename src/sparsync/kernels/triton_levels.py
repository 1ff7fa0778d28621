# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Lloyd-Max levels on a CUDA device, for float32 in blocks of 2^j >= 8.

The results are bit-equal to ``normal_levels.py``.

See ``triton.py`` for how kernels are written.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sparsync.kernels.triton import BLOCK, _cover, _launch, _positions, jit, tl, warps_of

__all__ = ["decode_levels_", "quantise_"]

Levels = tuple[int, int, float, Tensor, Tensor]  # as in native.py, with blocks of 2^j >= 8


def quantise_(
    scales: Tensor, codes: Tensor, values: Tensor, more: Tensor | None, levels: Levels
) -> None:
    """Write the scales and codes of ``values``, or of their sum with ``more``.

    Cost: one pass.
    """
    n, (bits, block, limit, thresholds, table) = values.numel(), levels
    rows, height = -(-n // block), max(BLOCK // block, 1)
    _launch(
        _quantise,
        -(-rows // height),
        *(values, values if more is None else more, scales, codes, thresholds, table),
        *(n, codes.numel(), limit),
        MORE=more is not None,
        BITS=bits,
        ROWS=height,
        WIDTH=block,
        STEPS=block.bit_length() - 1,
        num_warps=warps_of(height * block),
    )


def decode_levels_(
    into: Tensor,
    messages: Tensor,
    levels: Levels,
    divisor: float = 1.0,
    *,
    sign: int = 1,
    terms: Sequence[Tensor] = (),
) -> None:
    """``into = terms[0] + terms[1] + (messages[0] + sign * sum(messages[1:])) / divisor``.

    There are at most two terms; the first may be ``into``.  ``messages`` are rows of bytes.

    Cost: one pass; a sum of messages stays in registers.
    """
    n, (bits, block, _, _, table) = into.numel(), levels
    count, length = messages.shape
    first, second = (*terms, into, into)[:2]
    arguments = (into, first, second, messages, table, n, count, 2 * -(-n // block), length, block)
    _cover(
        _decode_levels,
        n,
        *arguments,
        float(divisor),
        BITS=bits,
        TERMS=len(terms),
        MANY=count > 1,
        SIGN=sign,
        # dividing in float64 is slow on small GPUs, and only an average has a divisor other than 1 or -1
        DIVIDE=abs(divisor) != 1,
    )


# ---- on the device ---------------------------------------------------------------------------------


@jit
def _sum_of_halves(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr):
    """Return the sum of each row of ``WIDTH = 2^STEPS`` values, computed by adding halves of rows."""
    for step in tl.static_range(STEPS):
        x = tl.sum(tl.reshape(x, [ROWS, 2, WIDTH >> (step + 1)]), axis=1)
    return tl.reshape(x, [ROWS])


@jit
def _quotient(a, b):
    """Divide float32 with a single rounding; some versions of Triton round denormals differently."""
    return (a.to(tl.float64) / b.to(tl.float64)).to(tl.float32)


@jit
def _quantise(
    values_ptr,
    more_ptr,
    scales_ptr,
    codes_ptr,
    thresholds_ptr,
    levels_ptr,
    n,
    nbytes,
    limit,
    MORE: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Write a scale per row of ``WIDTH`` values, and a code per value; ``BITS`` bytes hold 8 codes."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = rows[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = at < n
    values = tl.load(values_ptr + at, mask=inside, other=0.0)
    if MORE:
        values += tl.load(more_ptr + at, mask=inside, other=0.0)
    keys = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    peaks = tl.max(keys, axis=1)
    # the inverse of a power of two is exact, so multiplying by it equals the specification's division
    exponents = tl.minimum(tl.maximum(peaks & 0x7F800000, 0x00800000), 0x7E800000)
    inverses = (0x7F000000 - exponents).to(tl.float32, bitcast=True)
    # a row with NaN or Inf is treated as zeros
    keys = tl.where((peaks < 0x7F800000)[:, None], keys, 0)
    scaled = keys.to(tl.float32, bitcast=True) * inverses[:, None]
    number = tl.zeros([ROWS, WIDTH], tl.int32)
    if BITS == 8:
        largest = tl.max(scaled, axis=1)
        largest = tl.where(largest > 0.0, largest, 1.0)
        # adding 1.5 * 2^23 rounds to an integer, ties to even, because a float32 that large has no
        # fraction
        rounded = scaled * _quotient(tl.full([ROWS], 127.0, tl.float32), largest)[:, None]
        number = ((rounded + 12582912.0) - 12582912.0).to(tl.int32)
    elif BITS > 1:
        lengths = tl.minimum(n - rows * WIDTH, WIDTH)
        means = _quotient(_sum_of_halves(scaled * scaled, ROWS, WIDTH, STEPS), lengths)
        spread = tl.sqrt(means.to(tl.float64)).to(tl.float32)
        for j in tl.static_range((1 << (BITS - 1)) - 1):
            number += (scaled > (tl.load(thresholds_ptr + j) * spread)[:, None]).to(tl.int32)
    nearest = tl.where(inside, tl.load(levels_ptr + number), 0.0)
    products = _sum_of_halves(nearest * scaled, ROWS, WIDTH, STEPS)
    squares = _sum_of_halves(nearest * nearest, ROWS, WIDTH, STEPS)
    scales = _quotient(products, tl.where(squares > 0.0, squares, 1.0))
    scales = tl.minimum(scales * exponents.to(tl.float32, bitcast=True), limit)
    bits = scales.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # round to bf16: to nearest, ties to even
    bits = tl.where(peaks == 0, 0, tl.where(peaks < 0x7F800000, bits, 0x7FC0))
    # store the two bytes separately, because a message may begin at an odd address
    tl.store(scales_ptr + 2 * rows, (bits & 255).to(tl.uint8), mask=rows * WIDTH < n)
    tl.store(scales_ptr + 2 * rows + 1, (bits >> 8).to(tl.uint8), mask=rows * WIDTH < n)
    negative = ((values < 0.0) & (nearest > 0.0)).to(tl.int32)
    codes = number | (negative << (BITS - 1))
    codes = tl.where(inside & ((bits > 0) & (bits < 0x7F80))[:, None], codes, 0)
    shifts = (tl.arange(0, 8) * BITS).to(tl.int64)
    eights = tl.reshape(codes, [ROWS, WIDTH // 8, 8]).to(tl.int64) << shifts[None, None, :]
    words = tl.sum(eights, axis=2)
    places = (rows[:, None] * (WIDTH // 8) + tl.arange(0, WIDTH // 8)[None, :]) * BITS
    for octet in tl.static_range(BITS):
        octets = ((words >> (8 * octet)) & 255).to(tl.uint8)
        tl.store(codes_ptr + places + octet, octets, mask=places + octet < nbytes)


@jit
def _decoded(raw_ptr, levels_ptr, at, inside, first, end, row, BITS: tl.constexpr):
    """Return the values of elements ``at`` of a message with codes ``raw[first:end]``."""
    scale_at = 2 * (at // row)
    low = tl.load(raw_ptr + scale_at, mask=inside, other=0).to(tl.int32)
    high = tl.load(raw_ptr + scale_at + 1, mask=inside, other=0).to(tl.int32)
    scales = ((low << 16) | (high << 24)).to(tl.float32, bitcast=True)
    place = first + ((at * BITS) >> 3)
    word = tl.load(raw_ptr + place, mask=inside, other=0).to(tl.int32)
    if BITS == 3:  # a code may end in the next byte
        more = tl.load(raw_ptr + place + 1, mask=inside & (place + 1 < end), other=0)
        word |= more.to(tl.int32) << 8
    code = (word >> ((at * BITS) & 7).to(tl.int32)) & ((1 << BITS) - 1)
    half = 1 << (BITS - 1)
    # a unary minus would be wrong: Triton computes it as 0 - x, which never gives -0.0
    signs = tl.where(code >= half, -1.0, 1.0)
    return signs * tl.load(levels_ptr + (code & (half - 1))) * scales


@jit
def _decode_levels(
    into_ptr,
    first_ptr,
    second_ptr,
    raw_ptr,
    levels_ptr,
    n,
    count,
    first,
    end,
    row,
    divisor,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    TERMS: tl.constexpr,
    MANY: tl.constexpr,
    SIGN: tl.constexpr,
    DIVIDE: tl.constexpr,
):
    """``into = terms + (messages[0] + SIGN * sum(messages[1:])) / divisor``; a row has ``end`` bytes."""
    at = _positions(BLOCK)
    inside = at < n
    values = _decoded(raw_ptr, levels_ptr, at, inside, first, end, row, BITS)
    # the specification adds values to zeros, which turns -0.0 into 0.0; adding 0.0 has the same effect
    if MANY:
        values += 0.0
        others = tl.zeros([BLOCK], tl.float32) if SIGN < 0 else values
        for number in range(1, count):
            one = raw_ptr + tl.cast(number, tl.int64) * end
            others += _decoded(one, levels_ptr, at, inside, first, end, row, BITS)
        values = values - others if SIGN < 0 else others
    if DIVIDE:
        values = (values.to(tl.float64) / divisor).to(tl.float32)
    else:
        values *= divisor
    if TERMS == 0:
        values += 0.0
    else:
        terms = tl.load(first_ptr + at, mask=inside, other=0.0)
        if TERMS == 2:
            terms += tl.load(second_ptr + at, mask=inside, other=0.0)
        values += terms
    tl.store(into_ptr + at, values, mask=inside)
