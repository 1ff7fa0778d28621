"""Signs: literal bytes, sizes, what a block keeps, what is not finite, settings."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsync import ConfigurationError
from sparsync.transports.ledger import Parts
from sparsync.wire import StreamCodec
from sparsync.wire.base import MessageFraming
from sparsync.wire.signs import Signs

from .strategies import FLOATS, dense_tensors, float_dtypes, same, smallest

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


def hex_of(payload: torch.Tensor) -> str:
    return bytes(payload.tolist()).hex()


def rows_of(values: torch.Tensor, block: int) -> list[list[Fraction]]:
    exact = [Fraction(value) for value in values.tolist()]
    return [exact[at : at + block] for at in range(0, len(exact), block)]


# ---- literal bytes --------------------------------------------------------------------------------

TEN = [1.0, -2.0, 3.0, -0.0, 0.0, -6.0, 0.25, -0.75, -0.5, 0.5]


def test_bytes_of_ten_elements_in_blocks_of_six():
    """The worked example of docs/wire-format.md."""
    encoded = Signs(6).encode(torch.tensor(TEN))
    start, scales = "51070100 0a000000 0a0000000000 0600", "00000040 0000003f"
    signs = "a2 01"  # elements 1, 5, 7; then 8
    assert hex_of(encoded.payload) == (start + scales + signs).replace(" ", "")
    expected = [2.0, -2.0, 2.0, 2.0, 2.0, -2.0, 0.5, -0.5, -0.5, 0.5]
    assert encoded.decoded.tolist() == expected


@pytest.mark.parametrize(("dtype", "code"), [*zip(FLOATS, [1, 2, 4, 3], strict=True)])
def test_every_float_dtype_has_float32_scales_and_comes_back(dtype, code):
    encoded = Signs().encode(torch.tensor([-1.0, 2.0], dtype=dtype))
    assert (
        hex_of(encoded.payload) == f"5107{code:02x}0002000000" + "0200000000000001" + "0000c03f01"
    )
    same(Signs().decode(encoded.payload, 2), torch.tensor([-1.5, 1.5], dtype=dtype))
    empty = Signs().encode(torch.zeros(0, dtype=dtype))
    assert hex_of(empty.payload) == f"5107{code:02x}0000000000" + "0000000000000001"
    same(Signs().decode(empty.payload, 0), torch.zeros(0, dtype=dtype))


# ---- round trips and sizes ------------------------------------------------------------------------


@settings(max_examples=200)
@given(st.one_of(dense_tensors(), any_floats()), blocks)
def test_decode_gives_what_encode_said_in_the_bytes_that_were_promised(values, block):
    codec, before = Signs(block), values.clone()
    encoded = codec.encode(values)
    same(values, before)
    same(Signs().decode(encoded.payload, values.numel()), encoded.decoded)  # told by the message
    parts = codec.parts(values.numel(), values.dtype)
    assert encoded.payload.numel() == parts.nbytes == codec.nbytes(values.numel(), values.dtype)
    assert Signs().measure(torch.cat([encoded.payload, encoded.payload])) == parts
    assert torch.equal(codec.encode(values).payload, encoded.payload)


@pytest.mark.parametrize(
    ("size", "block"),
    [(1, 1), (7, 8), (8, 3), (9, 256), (255, 256), (256, 256), (257, 256), (70_000, 65535)],
)
def test_every_sign_arrives_whatever_the_size_and_the_block(size, block):
    generator = torch.Generator().manual_seed(size)
    values = torch.randn(size, generator=generator)
    codec = Signs(block)
    encoded = codec.encode(values)
    assert encoded.payload.numel() == 16 + 4 * math.ceil(size / block) + math.ceil(size / 8)
    assert torch.equal(encoded.decoded < 0, values < 0)
    means = torch.stack([row.double().abs().mean() for row in values.split(block)])
    scales = torch.stack([row[0].double().abs() for row in encoded.decoded.split(block)])
    torch.testing.assert_close(scales, means, rtol=1e-6, atol=0)
    same(codec.decode(encoded.payload, size), encoded.decoded)


def test_a_large_vector_takes_nine_eighths_of_a_bit_per_element():
    assert 8 * Signs().nbytes(1 << 20) / (1 << 20) == pytest.approx(9 / 8, rel=1e-3)
    assert Signs(2).parts(9, torch.float64) == Parts(header=16, value=5 * 4 + 2)


@pytest.mark.parametrize("offset", [1, 3, 4, 8])
def test_a_message_may_start_anywhere_and_nothing_behind_it_is_read(offset):
    encoded = Signs(6).encode(torch.tensor(TEN))
    end = offset + encoded.payload.numel()
    for fill in (0x00, 0xFF):
        buffer = torch.full((end + 16,), fill, dtype=torch.uint8)
        buffer[offset:end] = encoded.payload
        same(Signs().decode(buffer[offset:end], 10), encoded.decoded)
    framing = MessageFraming(Signs())
    assert framing.length(torch.cat([encoded.payload, buffer])) == encoded.payload.numel() == 26


def test_strided_views_are_encoded_as_their_copies():
    values = torch.linspace(-1, 1, 20)[1::2]
    assert torch.equal(Signs(3).encode(values).payload, Signs(3).encode(values.clone()).payload)


def test_a_stream_may_have_it_as_its_dense_form():
    codec = StreamCodec(dense=Signs())
    assert not codec.is_exact(torch.float32)
    assert 0 < codec.limit(4096, torch.float32) < 4096 / 32


# ---- what a block keeps ---------------------------------------------------------------------------


@settings(max_examples=400)
@given(any_floats(), blocks)
def test_the_error_never_exceeds_the_block(values, block):
    decoded = Signs(block).encode(values).decoded
    for x, q in zip(rows_of(values, block), rows_of(decoded, block), strict=True):
        error, before = sum((a - b) ** 2 for a, b in zip(x, q, strict=True)), sum(a * a for a in x)
        assert error <= before
        if any(q):
            assert len({abs(b) for b in q}) == 1


@settings(max_examples=200)
@given(st.integers(1, 600), blocks)
def test_what_is_kept_of_the_energy_is_the_projection(size, block):
    values = torch.randn(size, generator=torch.Generator().manual_seed(size)).double()
    decoded = Signs(block).encode(values).decoded
    left = values.square().sum() - decoded.square().sum()
    torch.testing.assert_close((values - decoded).square().sum(), left, rtol=1e-5, atol=1e-5)


def test_equal_magnitudes_arrive_exactly_and_half_of_normal_noise_does():
    tenths = torch.tensor([0.1, -0.1, -0.1])
    same(Signs().encode(tenths).decoded, tenths)
    noise = torch.randn(1 << 14, generator=torch.Generator().manual_seed(0))
    error = (noise - Signs().encode(noise).decoded).square().sum() / noise.square().sum()
    assert float(error) == pytest.approx(1 - 2 / math.pi, abs=0.02)


# ---- zeros, extremes, what is not finite ----------------------------------------------------------


def test_zero_arrives_as_plus_the_scale_and_zeros_alone_stay_zeros():
    values = torch.tensor([0.0, -0.0, -3.0, 0.0, -0.0, 0.0])
    assert Signs(3).encode(values).decoded.tolist() == [1.0, 1.0, -1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_and_inf_fill_their_own_block_and_no_other(dtype):
    values = [1.0, NAN, 2.0, INF, 3.0, -INF, INF, NAN, -4.0, 4.0, -5.0]
    encoded = Signs(2).encode(torch.tensor(values, dtype=dtype))
    expected = [NAN, NAN, INF, INF, INF, -INF, NAN, NAN, -4.0, 4.0, -5.0]
    same(encoded.decoded, torch.tensor(expected, dtype=dtype))
    same(Signs().decode(encoded.payload, 11), encoded.decoded)


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FC00000, 0xFF800001, 0xFFC00000])
def test_every_kind_of_nan_is_seen(bits):
    nan = torch.tensor([bits], dtype=torch.uint32).view(torch.float32)
    encoded = Signs(4).encode(torch.cat([torch.ones(3), nan]))
    assert Signs().decode(encoded.payload, 4).isnan().all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_values_have_a_finite_scale(dtype):
    most = torch.finfo(dtype).max
    for values, mean in [([most] * 300, most), ([most, -most, most, 0.0], 3 * (most / 4))]:
        decoded = Signs(65535).encode(torch.tensor(values, dtype=dtype)).decoded
        assert decoded[0].item() == pytest.approx(min(mean, LARGEST), rel=0.01)
        assert decoded.isfinite().all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_denormals_have_a_scale(dtype):
    tiny = max(smallest(dtype), smallest(torch.float32))
    decoded = Signs().encode(torch.tensor([4 * tiny, -6 * tiny], dtype=dtype)).decoded
    assert decoded.tolist() == [5 * tiny, -5 * tiny]


def test_one_large_element_does_not_hide_the_others():
    values = torch.full((65535,), 2.0**-24)
    values[7] = 1.0
    expected = (1 + 65534 * 2.0**-24) / 65535
    assert Signs(65535).encode(values).decoded[0].item() == pytest.approx(expected, rel=1e-6)


# ---- settings -------------------------------------------------------------------------------------


def test_the_repr_tells_ranks_apart():
    assert repr(Signs(64)) == "Signs(block=64)"
    assert Signs().seeded(3, 4).block == 256


@pytest.mark.parametrize("block", [-1, 0, 1 << 16])
def test_impossible_blocks_are_refused(block):
    with pytest.raises(ConfigurationError, match=f"block={block} .* use 1 to 65535"):
        Signs(block)


@pytest.mark.parametrize("values", [torch.ones(3, dtype=torch.int32), torch.ones(2, 2)])
def test_what_has_no_message_is_refused_by_the_sender(values):
    with pytest.raises(ConfigurationError, match="flatten it, or use Whole for integers"):
        Signs().encode(values)
