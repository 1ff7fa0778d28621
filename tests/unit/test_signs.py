"""Signs: what a block keeps of its elements, and what is not finite."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsync import DenseVector
from sparsync.wire.signs import Signs

from .strategies import FLOATS, dense_tensors, float_dtypes, same, smallest
from .wire_messages import rounded

NAN, INF = math.nan, math.inf
LARGEST = torch.finfo(torch.float32).max

blocks = st.sampled_from([1, 3, 8, 11, 256])


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


# ---- what a block keeps ---------------------------------------------------------------------------


@settings(max_examples=400)
@given(any_floats(), blocks)
def test_the_error_never_exceeds_the_block(values, block):
    decoded = rounded(Signs(block), values)
    for x, q in zip(rows_of(values, block), rows_of(decoded, block), strict=True):
        error, before = sum((a - b) ** 2 for a, b in zip(x, q, strict=True)), sum(a * a for a in x)
        assert error <= before
        if any(q):
            assert len({abs(b) for b in q}) == 1


@settings(max_examples=200)
@given(st.integers(1, 600), blocks)
def test_what_is_kept_of_the_energy_is_the_projection(size, block):
    values = torch.randn(size, generator=torch.Generator().manual_seed(size)).double()
    decoded = rounded(Signs(block), values)
    left = values.square().sum() - decoded.square().sum()
    torch.testing.assert_close((values - decoded).square().sum(), left, rtol=1e-5, atol=1e-5)


def test_equal_magnitudes_arrive_exactly_and_half_of_normal_noise_does():
    tenths = torch.tensor([0.1, -0.1, -0.1])
    same(rounded(Signs(), tenths), tenths)
    noise = torch.randn(1 << 14, generator=torch.Generator().manual_seed(0))
    error = (noise - rounded(Signs(), noise)).square().sum() / noise.square().sum()
    assert float(error) == pytest.approx(1 - 2 / math.pi, abs=0.02)


# ---- zeros, extremes, what is not finite ----------------------------------------------------------


def test_zero_arrives_as_plus_the_scale_and_zeros_alone_stay_zeros():
    values = torch.tensor([0.0, -0.0, -3.0, 0.0, -0.0, 0.0])
    assert rounded(Signs(3), values).tolist() == [1.0, 1.0, -1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_and_inf_fill_their_own_block_and_no_other(dtype):
    values = [1.0, NAN, 2.0, INF, 3.0, -INF, INF, NAN, -4.0, 4.0, -5.0]
    encoded = Signs(2).encode(DenseVector(torch.tensor(values, dtype=dtype)))
    expected = [NAN, NAN, INF, INF, INF, -INF, NAN, NAN, -4.0, 4.0, -5.0]
    same(encoded.decoded.values, torch.tensor(expected, dtype=dtype))
    same(Signs().decode(encoded.payload, 11).values, encoded.decoded.values)


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FC00000, 0xFF800001, 0xFFC00000])
def test_every_kind_of_nan_is_seen(bits):
    nan = torch.tensor([bits], dtype=torch.uint32).view(torch.float32)
    encoded = Signs(4).encode(DenseVector(torch.cat([torch.ones(3), nan])))
    assert Signs().decode(encoded.payload, 4).values.isnan().all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_values_have_a_finite_scale(dtype):
    most = torch.finfo(dtype).max
    for values, mean in [([most] * 300, most), ([most, -most, most, 0.0], 3 * (most / 4))]:
        decoded = rounded(Signs(65535), torch.tensor(values, dtype=dtype))
        assert decoded[0].item() == pytest.approx(min(mean, LARGEST), rel=0.01)
        assert decoded.isfinite().all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_denormals_have_a_scale(dtype):
    tiny = max(smallest(dtype), smallest(torch.float32))
    decoded = rounded(Signs(), torch.tensor([4 * tiny, -6 * tiny], dtype=dtype))
    assert decoded.tolist() == [5 * tiny, -5 * tiny]


def test_one_large_element_does_not_hide_the_others():
    values = torch.full((65535,), 2.0**-24)
    values[7] = 1.0
    expected = (1 + 65534 * 2.0**-24) / 65535
    assert rounded(Signs(65535), values)[0].item() == pytest.approx(expected, rel=1e-6)
