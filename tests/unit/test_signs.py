"""Sign-mean and signs: the means that arrive, and how much rounding takes."""

import math
from fractions import Fraction
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsync import ConfigurationError, DenseVector, SparseVector
from sparsync.wire import SignMean, Signs

from .strategies import FLOATS, dense_tensors, float_dtypes, same, same_vector, smallest
from .wire_messages import messages, rounded, vector

NAN, INF = math.nan, math.inf
LARGEST = torch.finfo(torch.float32).max


def layers_of(original: SparseVector, codec: SignMean) -> list[SparseVector]:
    return original.split([0, *accumulate(codec.layers or (original.size,))])


# ---- means ----------------------------------------------------------------------------------------


@settings(max_examples=200)
@given(messages((SignMean,)))
def test_every_entry_of_a_layer_arrives_as_the_mean_of_the_layer(drawn):
    codec, original = drawn
    dtype = original.values.dtype
    decoded = codec.encode(original).decoded
    for sent, arrived in zip(layers_of(original, codec), layers_of(decoded, codec), strict=True):
        if not sent.nnz:
            continue
        if not sent.isfinite().all():
            assert not arrived.isfinite().any()
            continue
        assert bool((arrived.values == arrived.values[0]).all())
        exact = sum(map(Fraction, sent.values.tolist())) / sent.nnz
        limit = Fraction(torch.finfo(torch.float32).max)
        exact = min(max(exact, -limit), limit)  # a float64 is at most the largest float32
        slack = abs(exact) * Fraction(max(torch.finfo(dtype).eps, 2.0**-23))
        slack += 2 * max(map(Fraction, map(abs, sent.values.tolist()))) * Fraction(2.0**-50)
        slack += Fraction(max(smallest(dtype), smallest(torch.float32)))
        assert abs(Fraction(arrived.values[0].item()) - exact) <= slack


@settings(max_examples=200)
@given(messages((SignMean,)), st.booleans())
def test_the_error_never_exceeds_the_vector(drawn, one_signed):
    codec, original = drawn
    values = torch.where(original.isfinite(), original.values, 1.0).to(original.values.dtype)
    original = SparseVector(original.indices, values.abs() if one_signed else values, original.size)
    decoded = codec.encode(original).decoded
    x, q = ([Fraction(v) for v in w.values.tolist()] for w in (original, decoded))
    before, error = sum(a * a for a in x), sum((a - b) ** 2 for a, b in zip(x, q, strict=True))
    assert error <= before * (1 + Fraction(2.0**-40))
    if one_signed and any(q):
        assert error < before


def test_equal_magnitudes_of_one_sign_arrive_exactly_and_opposite_ones_not_at_all():
    tenths = vector([0, 2, 3], [0.1, 0.1, 0.1], 4)
    same_vector(SignMean().encode(tenths).decoded, tenths)
    assert SignMean().encode(vector([0, 2], [1.0, -1.0], 3)).decoded.values.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_and_inf_reach_their_own_layer_and_no_other(dtype):
    values = [1.0, NAN, 2.0, INF, 3.0, -INF, INF, -INF, 4.0]
    codec = SignMean("coo", (2, 2, 2, 2, 1))
    encoded = codec.encode(vector(range(9), values, 9, dtype))
    decoded = codec.decode(encoded.payload, 9)
    expected = torch.tensor([NAN, NAN, INF, INF, -INF, -INF, NAN, NAN, 4.0], dtype=dtype)
    same(decoded.values, expected)
    same(encoded.decoded.values, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_mean_that_rounds_to_zero_leaves_explicit_zeros(dtype):
    encoded = SignMean().encode(vector([1, 2, 3], [smallest(dtype), 0.0, 0.0], 4, dtype))
    same_vector(encoded.decoded, vector([1, 2, 3], [0.0, 0.0, 0.0], 4, dtype))
    same_vector(SignMean().decode(encoded.payload, 4), encoded.decoded)


def test_a_mean_is_summed_in_float64():
    values = [2.0**24, *[1.0] * 8]  # in float32 every one of the ones is lost
    decoded = SignMean().encode(vector(range(9), values, 9)).decoded
    assert decoded.values[0] == torch.tensor((2.0**24 + 8) / 9)


def test_vectors_of_another_size_than_the_layers_are_refused():
    codec, payload = SignMean("coo", (4, 5)), SignMean("coo", (4, 6)).encode(vector([0], [1.0], 10))
    with pytest.raises(ConfigurationError, match=r"layers of 9 elements together, but .* has 8"):
        codec.encode(vector([0], [1.0], 8))
    with pytest.raises(ConfigurationError, match="layers of 9 elements together"):
        codec.decode(payload.payload, 10)


# ---- signs ------------------------------------------------------------------------------------------


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
def test_the_error_of_signs_never_exceeds_the_block(values, block):
    decoded = rounded(Signs(block), values)
    for x, q in zip(rows_of(values, block), rows_of(decoded, block), strict=True):
        error, before = sum((a - b) ** 2 for a, b in zip(x, q, strict=True)), sum(a * a for a in x)
        assert error <= before
        if any(q):
            assert len({abs(b) for b in q}) == 1


def test_equal_magnitudes_arrive_exactly_and_half_of_normal_noise_does():
    tenths = torch.tensor([0.1, -0.1, -0.1])
    same(rounded(Signs(), tenths), tenths)
    noise = torch.randn(1 << 14, generator=torch.Generator().manual_seed(0))
    error = (noise - rounded(Signs(), noise)).square().sum() / noise.square().sum()
    assert float(error) == pytest.approx(1 - 2 / math.pi, abs=0.02)


# ---- zeros, extremes, what is not finite ----------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_and_inf_fill_their_own_block_and_no_other(dtype):
    values = [1.0, NAN, 2.0, INF, 3.0, -INF, INF, NAN, -4.0, 4.0, -5.0]
    encoded = Signs(2).encode(DenseVector(torch.tensor(values, dtype=dtype)))
    expected = [NAN, NAN, INF, INF, INF, -INF, NAN, NAN, -4.0, 4.0, -5.0]
    same(encoded.decoded.values, torch.tensor(expected, dtype=dtype))
    same(Signs().decode(encoded.payload, 11).values, encoded.decoded.values)


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
