"""Test the decoding and the rounding errors of blocks of Lloyd-Max levels."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsync import DenseVector
from sparsync.errors import ConfigurationError, WireFormatError
from sparsync.kernels import native
from sparsync.kernels.normal_levels import BITS, pack_codes, unpack_codes
from sparsync.wire import LloydMax
from sparsync.wire.levels import difference_to, sum_to
from tests.tables import cases

from .strategies import FLOATS, dense_tensors, float_dtypes, same, smallest
from .wire_messages import rounded


@st.composite
def any_floats(draw):
    """Draw vectors of any dtype whose finite values are similar, far apart, or denormal."""
    dtype, most = draw(float_dtypes), 30
    if draw(st.booleans()):
        return draw(dense_tensors(most, dtype, finite=True))
    low = draw(st.sampled_from([-1080, -150, -20, 0, 100, 900]))
    exponents = draw(st.lists(st.integers(low, low + 12), max_size=most))
    parts = [draw(st.floats(-2, 2)) for _ in exponents]
    values = [math.ldexp(part, exponent) for part, exponent in zip(parts, exponents, strict=True)]
    limit = torch.finfo(dtype).max
    return torch.tensor(values, dtype=torch.float64).clamp(-limit, limit).to(dtype)


def rows_of(values: torch.Tensor, block: int) -> list[list[Fraction]]:
    exact = [Fraction(value) for value in values.tolist()]
    return [exact[at : at + block] for at in range(0, len(exact), block)]


NAN, INF = math.nan, math.inf

each_width = pytest.mark.parametrize("bits", BITS)


@settings(max_examples=400)
@given(any_floats(), st.sampled_from([1, 2, 7, 8, 16]), st.sampled_from(BITS))
def test_the_error_never_exceeds_the_block(values, block, bits):
    decoded = rounded(LloydMax(bits, block=block), values)
    for x, q in zip(rows_of(values, block), rows_of(decoded, block), strict=True):
        error, before = sum((a - b) ** 2 for a, b in zip(x, q, strict=True)), sum(a * a for a in x)
        assert error <= before


@cases((1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.009497), (8, 5e-5))
def test_of_normal_noise_the_squares_that_lloyd_and_max_found_are_lost(bits, distortion):
    noise = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0))
    error = (noise - rounded(LloydMax(bits), noise)).square().sum() / noise.square().sum()
    assert float(error) == pytest.approx(distortion, rel=0.02)


@each_width
def test_a_scale_does_not_change_the_codes(bits):
    noise = torch.randn(100, generator=torch.Generator().manual_seed(0))
    for exponent in (-100, 100):
        scaled = rounded(LloydMax(bits, block=25), noise * 2.0**exponent)
        same(scaled, rounded(LloydMax(bits, block=25), noise) * 2.0**exponent)


@each_width
@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_and_inf_fill_their_own_block_and_no_other(dtype, bits):
    values = torch.tensor([1.0, NAN, 2.0, INF, 3.0, -INF, 0.0, -0.0, -4.0], dtype=dtype)
    encoded = LloydMax(bits, block=2).encode(DenseVector(values))
    assert encoded.decoded.values.isnan().tolist() == [True] * 6 + [False] * 3
    assert encoded.decoded.values[-3:].tolist() == pytest.approx([0.0, 0.0, -4.0], rel=0.01)
    same(LloydMax().decode(encoded.payload, 9).values, encoded.decoded.values)


@each_width
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_values_stay_finite(dtype, bits):
    most = torch.finfo(dtype).max
    for values in ([most] * 300, [most, -most, most, 0.0], [most, 1.0, -1.0, 0.0]):
        given = torch.tensor(values, dtype=dtype)
        decoded = rounded(LloydMax(bits, block=65535), given)
        assert decoded.isfinite().all() and decoded[0] > 0


@each_width
def test_denormals_below_the_smallest_scale_are_kept_back(bits):
    tiny = smallest(torch.float32)
    small = torch.tensor([tiny, -tiny])
    assert rounded(LloydMax(bits), small).tolist() == [0.0, 0.0]
    large = small * 2.0**30
    assert rounded(LloydMax(bits), large).tolist() == pytest.approx(large.tolist(), rel=0.01)


@given(st.lists(st.integers(0, 255), max_size=40), st.sampled_from(BITS))
def test_codes_of_any_width_survive(numbers, bits):
    codes = torch.tensor([n % (1 << bits) for n in numbers], dtype=torch.uint8)
    packed = pack_codes(codes, bits)
    stream = "".join(f"{code:0{bits}b}"[::-1] for code in codes.tolist())
    assert packed.tolist() == [int(stream[i : i + 8][::-1], 2) for i in range(0, len(stream), 8)]
    assert torch.equal(unpack_codes(packed, bits, len(codes)), codes)


@pytest.mark.parametrize("into", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_message_is_added_in_the_dtype_of_the_sum(dtype, into):
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    encoded = LloydMax(4).encode(DenseVector(values.to(dtype)))
    sums = torch.ones(1000, dtype=into)
    LloydMax().decode_to(encoded.payload, sums, add=True)
    same(sums, torch.ones(1000, dtype=into).add_(encoded.decoded.values))


@each_width
@pytest.mark.parametrize("block", [24, 64, 512])
def test_a_run_is_quantised_as_part_of_the_whole_also_as_a_sum(bits, block):
    generator = torch.Generator().manual_seed(bits)
    first, second = torch.randn(2, 7 * block + 5, generator=generator)
    codec = LloydMax(bits, block=block)
    expected = codec.written(first + second)
    made = codec.blank(first.numel(), first)
    write = codec.writer(made)
    write(0, first[: 2 * block], second[: 2 * block])
    write(2 * block, first[2 * block :], second[2 * block :])
    same(made, expected)
    opened, part = codec.open(made, first.numel()), torch.ones(3 * block)
    opened.decode_to(part, 4.0, add=True, start=4 * block)
    whole = codec.decode(expected, first.numel()).values
    same(part, torch.ones(3 * block) + whole[4 * block : 7 * block] / 4)


@each_width
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_messages_are_summed_in_their_order_and_the_own_share_last(bits, dtype):
    # in this order the first two cancel, so the third is not rounded away
    rows = [torch.full((600,), value, dtype=dtype) for value in (2.0**60, -(2.0**60), 1.0)]
    codec = LloydMax(bits, block=64)
    messages = [codec.open(codec.written(row), 600) for row in rows]
    sums = torch.full((472,), torch.nan)
    sum_to(sums, messages, 128, torch.full((472,), 0.5))
    one = codec.decode(codec.written(rows[2]), 600).values[0].float()
    same(sums, torch.full((472,), 0.5) + one)
    sum_to(sums, messages[:2], 128)
    assert not sums.any()


@each_width
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [12, 64])  # 12: not of C++
@pytest.mark.parametrize("others", [0, 1, 3])
def test_a_difference_of_messages_is_added_after_what_is_added_first(bits, dtype, block, others):
    generator = torch.Generator().manual_seed(bits)
    rows = torch.randn(1 + others, 9 * block + 5, generator=generator).to(dtype)
    codec = LloydMax(bits, block=block)
    message, *less = (codec.open(codec.written(row), row.numel()) for row in rows)
    start, count = 8 * block, block + 5
    into, plus = torch.randn(2, count, generator=generator)
    alone = message.header.entries  # of the whole message, in runs as well
    made, one = torch.empty(alone, dtype=dtype), torch.zeros(alone)
    message.decode_to(made)
    sum_to(one, less)
    expected = made[start:].float() - one[start:]
    result = into.clone()
    difference_to(result, message, less, start, -3.0, add=True, plus=plus)
    # bfloat16, too, is widened before it is divided
    assert (result - ((into + plus) - expected / 3)).abs().max() < 1e-6
    difference_to(result, message, less, start, 1.0, add=False)
    assert (result - expected).abs().max() < 1e-6


def test_no_run_of_a_message_ends_within_a_block():
    codec = LloydMax(1, block=64)
    opened = codec.open(codec.written(torch.ones(200)), 200)
    opened.decode_to(torch.empty(72), start=128)
    for start, count in [(0, 63), (64, 100), (1, 64), (192, 7)]:
        with pytest.raises(WireFormatError, match=r"has blocks of 64, of which no run goes from"):
            opened.decode_to(torch.empty(count), start=start)
        with pytest.raises(WireFormatError, match=r"has blocks of 64, of which no run goes from"):
            sum_to(torch.empty(count), [opened], start)


@pytest.mark.skipif(native.EXTENSION is None, reason="C++ was not built")
def test_codes_outside_a_message_are_refused_before_any_memory_is_touched():
    tables = torch.zeros(1), torch.ones(1)
    scales, codes = torch.zeros(4, dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8)
    known = native.Codes(scales, codes, 128, (1, 64, 1.0, *tables))
    for start, count in [(64, 128), (-64, 64), (32, 64), (0, 100), (128, 64)]:
        with pytest.raises(ConfigurationError, match="are not whole blocks of 64 of 128 values"):
            known.write_(torch.zeros(count), start)
        with pytest.raises(ConfigurationError, match="are not whole blocks of 64 of 128 values"):
            known.decode_(torch.zeros(count), start, 1.0, keep=False)
        with pytest.raises(ConfigurationError, match="are not whole blocks of 64 of 128 values"):
            native.sum_codes_(torch.zeros(count), [known], start, None)
        with pytest.raises(ConfigurationError, match="are not whole blocks of 64 of 128 values"):
            known.decode_(torch.zeros(count), start, 1.0, keep=True, less=[known])
    with pytest.raises(ConfigurationError, match="4 bytes of scales and 15 of codes"):
        native.Codes(scales, codes[1:], 128, (1, 64, 1.0, *tables))
    with pytest.raises(ConfigurationError, match="32 values to be added to 64"):
        known.write_(torch.zeros(64), 0, torch.zeros(32))
    with pytest.raises(ConfigurationError, match="32 values to be added to 64"):
        known.decode_(torch.zeros(64), 0, 1.0, keep=True, plus=torch.zeros(32))
