"""Test that rounding is unbiased or contractive, with a bounded error, even at float limits."""

import math
from fractions import Fraction
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsync import ConfigurationError, DenseVector, SparseVector
from sparsync.published.redsync import SignMean
from sparsync.wire.qsgd import Qsgd, SparseQsgd
from tests.tables import cases

from .strategies import FLOATS, same, same_vector, smallest
from .wire_messages import hex_of, messages, packable, rounded, vector

SETTINGS = [(bits, scale) for bits in (2, 4, 8) for scale in ("l2", "max")]
COPIES = 4000

INF, NAN = float("inf"), float("nan")
LENGTH = 64

every_setting = pytest.mark.parametrize(("bits", "scale"), SETTINGS)


def noise(length: int = LENGTH, seed: int = 0) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(seed))


def spread(length: int = LENGTH) -> torch.Tensor:
    """Return zeros, and values of very different magnitudes."""
    return noise(length) * torch.logspace(0, -9, length) * (torch.arange(length) % 7 > 0)


def samples(codec: Qsgd, x: torch.Tensor, copies: int = COPIES) -> torch.Tensor:
    """Return `[copies, length]` independent roundings of one block, in float64."""
    return rounded(codec, x.repeat(copies)).view(copies, x.numel()).double()


def deviations(quantiser: Qsgd, x: torch.Tensor) -> torch.Tensor:
    """Return the standard deviation of every entry of a block, by the scheme's definition."""
    x = x.double()
    scale = float(x.norm()) if quantiser.scale == "l2" else float(x.abs().max())
    exact = x.abs() / scale * quantiser.levels
    fraction = exact - exact.floor()
    return scale / quantiser.levels * (fraction * (1 - fraction)).sqrt()


def worst(quantiser: Qsgd, length: int) -> torch.Tensor:
    """Return the block with the largest relative variance (for "l2", nearly the largest)."""
    s = quantiser.levels
    if quantiser.scale == "l2":
        return torch.ones(length)
    block = torch.full((length,), 1 / (s + (s**2 + length - 1) ** 0.5))
    block[0] = 1.0
    return block


# ---- expectation and variance ---------------------------------------------------------------------


@every_setting
@pytest.mark.parametrize("x", [noise(), spread(), torch.ones(LENGTH)], ids=["noise", "spread", "1"])
def test_the_expectation_is_the_value(bits, scale, x):
    """The mean is within 5 standard errors, as the scheme defines them, and exact if rounding is."""
    codec = Qsgd(bits, block=LENGTH, scale=scale)
    error = samples(codec, x).mean(0) - x.double()
    standard = deviations(codec, x) / COPIES**0.5
    largest = float(x.norm() if scale == "l2" else x.abs().max())
    assert bool((error.abs() <= 5 * standard + 2.0**-22 * largest).all())
    assert float(standard.max()) < 0.02 * largest, "the test could not fail"


def test_the_expectation_survives_a_second_quantisation():
    """A sum of values quantised earlier in the step must be rounded with other draws."""
    codec, x, y = Qsgd(2, block=LENGTH, scale="max").seeded(1, 1), noise(), noise(seed=1)
    first = samples(codec, x)
    summed = (first + y.double()).float()
    second = rounded(codec, summed.flatten()).view(COPIES, LENGTH).double()
    error = second.mean(0) - (x + y).double()
    standard = second.std(0) / COPIES**0.5
    assert bool((error.abs() <= 5 * standard + 1e-6).all())


@given(st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=40), st.sampled_from(SETTINGS))
def test_no_block_has_more_variance_than_omega(values, setting):
    x, quantiser = torch.tensor(values), Qsgd(setting[0], block=len(values), scale=setting[1])
    if bool((x.abs() > 1e-15).any()):
        exact = deviations(quantiser, x).square().sum() / x.double().square().sum()
        assert float(exact) <= quantiser.omega(len(values)) * (1 + 1e-6)


# ---- draws ----------------------------------------------------------------------------------------


@given(packable(), st.sampled_from(SETTINGS), st.booleans())
def test_dense_and_sparse_messages_round_alike(original, setting, shrink):
    """The scheme is the same, and the blocks of a sparse vector are blocks of its values."""
    arguments = {"bits": setting[0], "scale": setting[1], "shrink": shrink, "block": 3}
    sparse = SparseQsgd(**arguments).encode(original)
    same(sparse.decoded.values, rounded(Qsgd(**arguments), original.values))


@pytest.mark.parametrize("codec", [Qsgd(), SparseQsgd()])
def test_draws_depend_on_seed_rank_step_and_message_alone(codec):
    values = torch.linspace(-1, 1, 300)

    def bytes_of(codec, scale=1.0):
        sent = DenseVector(values * scale)
        if isinstance(codec, SparseQsgd):
            sent = SparseVector(torch.arange(300), sent.values, 300)
        return codec.encode(sent).payload[20:170].numpy().tobytes()  # the codes alone

    other_seed = type(codec)(seed=1)
    drawn = [codec.seeded(0, 0), codec.seeded(1, 0), codec.seeded(0, 1), other_seed]
    assert len({bytes_of(c) for c in drawn}) == len(drawn)
    assert bytes_of(drawn[0], 2.0) != bytes_of(drawn[0])  # the same ratios in another message
    assert bytes_of(drawn[0]) == bytes_of(drawn[0]) == bytes_of(codec.seeded(7, 8).seeded(0, 0))
    assert codec.source == (0, 0), "the codec itself was changed"
    before = torch.get_rng_state()
    bytes_of(codec)
    assert torch.equal(before, torch.get_rng_state())


def test_draws_are_the_same_on_every_machine():
    """This test pins the results of torch's generator, the hash and the arithmetic."""
    payload = Qsgd(4, seed=3).seeded(2, 5).encode(DenseVector(torch.arange(-12, 12) / 8)).payload
    assert hex_of(payload[16:]) == "00008840eefeeffeff00000011212132"


# ---- error feedback -------------------------------------------------------------------------------


@every_setting
@pytest.mark.parametrize("length", [1, 1024])
def test_shrinking_makes_it_a_contraction(bits, scale, length):
    codec = Qsgd(bits, block=length, scale=scale, shrink=True)
    omega = codec.omega(length)
    assert codec.contractive
    for x in (noise(length), spread(length) + 1e-3, worst(codec, length)):
        left = (samples(codec, x, 200) - x.double()).square().sum(1) / x.double().square().sum()
        limit = omega / (1 + omega)
        assert limit < 1
        assert float(left.mean()) <= limit + 5 * float(left.std()) / 200**0.5 + 1e-6


def test_a_block_cut_short_shrinks_by_its_own_length():
    """16 entries in a block of 1024 have the variance of a block of 16."""
    codec, x = Qsgd(4, shrink=True), noise(16)
    factor = 1 / (1 + codec.omega(16))
    mean = samples(Qsgd(4, block=16, shrink=True), x).mean(0)
    torch.testing.assert_close(mean, factor * x.double(), rtol=0, atol=0.05)
    assert float(rounded(codec, torch.tensor([2.0]))) == pytest.approx(2.0 / (1 + codec.omega(1)))


@cases(
    ({"bits": 2}, False),
    ({"bits": 4}, False),
    ({"bits": 8}, True),  # sqrt(1024) / 127
    ({"bits": 4, "block": 48}, True),
    ({"bits": 4, "block": 49}, False),  # 49 / 7^2
    ({"bits": 2, "block": 8, "scale": "max"}, True),
    ({"bits": 2, "block": 9, "scale": "max"}, False),  # sqrt(1 + 8) is 3
    ({"bits": 4, "block": 392, "scale": "max"}, True),
    ({"bits": 4, "block": 393, "scale": "max"}, False),
    ({"bits": 8, "block": 65535, "scale": "max"}, True),
    ({"bits": 2, "shrink": True}, True),
)
def test_contractive_says_whether_the_error_may_be_kept(arguments, expected):
    assert Qsgd(**arguments).contractive is SparseQsgd(**arguments).contractive is expected


def residual_after(codec: Qsgd, steps: int = 60) -> float:
    """Return the norm of the residual under error feedback, relative to that of a gradient."""
    residual = torch.zeros(1024)
    for step in range(steps):
        accumulated = residual + noise(1024, seed=step)
        residual = accumulated - rounded(codec.seeded(0, step), accumulated)
    return float(residual.norm() / 1024**0.5)


def test_the_residual_of_unbiased_qsgd_explodes_and_that_of_shrunk_qsgd_does_not():
    """The design predicts "2 bits: 10^6 x in 60 steps"; a contraction is bounded by a few omega."""
    assert residual_after(Qsgd(2)) > 1e6
    shrunk = Qsgd(2, shrink=True)
    assert residual_after(shrunk) < 2 * shrunk.omega(1024)
    assert residual_after(Qsgd(4, block=256, scale="max")) < 1


# ---- the edges of the floats ----------------------------------------------------------------------


@every_setting
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shrink", [False, True])
def test_what_is_not_finite_arrives_so_and_spoils_nothing(bits, scale, dtype, shrink):
    most = torch.finfo(dtype).max
    values = torch.tensor([1.0, NAN, INF, -INF, most, -most, 0.0], dtype=dtype)
    alone = values.clone()
    alone[1:4] = 0
    for block in (3, 7, 1024):
        codec = Qsgd(bits, block=block, scale=scale, shrink=shrink)
        decoded = rounded(codec, values)
        assert decoded.isfinite().tolist() == values.isfinite().tolist()
        assert bool(decoded[1:4].isnan().all())
        raw = codec.encode(DenseVector(values)).payload, codec.encode(DenseVector(alone)).payload
        scales = slice(16, 16 + 4 * -(-7 // block))
        assert torch.equal(raw[0][scales], raw[1][scales])


def test_float64_is_first_rounded_to_float32():
    values = torch.tensor([1e300, -1e-300, 2.0**-149], dtype=torch.float64)
    decoded = rounded(Qsgd(8, block=1, scale="max"), values)
    assert decoded.dtype == torch.float64
    assert decoded.tolist() == [torch.finfo(torch.float32).max, 0.0, 2.0**-149]


NAN, INF = math.nan, math.inf


def layers_of(original: SparseVector, codec: SignMean) -> list[SparseVector]:
    return original.split([0, *accumulate(codec.layers or (original.size,))])


# ---- means ----------------------------------------------------------------------------------------


@settings(max_examples=100)
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


@settings(max_examples=100)
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
