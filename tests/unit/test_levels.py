"""Lloyd-Max levels: a block as received, and the size of its rounding error."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsync import DenseVector
from sparsync.kernels.normal_levels import BITS, pack_codes, unpack_codes
from sparsync.wire import LloydMax

from .strategies import FLOATS, dense_tensors, float_dtypes, same, smallest
from .wire_messages import rounded


@st.composite
def any_floats(draw):
    """Vectors of any finite values of any dtype: alike ones, ones far apart, denormals."""
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


@pytest.mark.parametrize(
    ("bits", "distortion"), [(1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.009497), (8, 5e-5)]
)
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
    assert rounded(LloydMax(bits), small * 2.0**30).tolist() == pytest.approx(
        [tiny * 2.0**30, -tiny * 2.0**30], rel=0.01
    )


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
