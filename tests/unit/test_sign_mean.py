"""Sign-mean messages: literal bytes, sizes, means, what rounding takes, settings."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsync import ConfigurationError, SparseVector
from sparsync.kernels import packing
from sparsync.transports.ledger import Parts
from sparsync.wire import Coo
from sparsync.wire.base import MessageFraming
from sparsync.wire.sign_mean import SignMean

from .packed_messages import vector
from .sign_mean_messages import layered
from .strategies import FLOATS, same, same_vector, smallest

each_form = pytest.mark.parametrize("form", ["coo", "packed"])


def hex_of(payload: torch.Tensor) -> str:
    return bytes(payload.tolist()).hex()


def joined(text: str) -> str:
    return text.replace(" ", "")


def layers_of(original: SparseVector, codec: SignMean) -> list[SparseVector]:
    layers, start = [], 0
    for width in codec.layers or (original.size,):
        layers.append(original.slice(start, start + width))
        start += width
    return layers


# ---- literal bytes --------------------------------------------------------------------------------

TABLE = "01000000 0000803f  00000000 00000000  02000000 000020c0"


@pytest.mark.parametrize(
    ("form", "start", "indices"),
    [
        ("coo", "51060101 03000000 0c0000000000 0300", "01000000 07000000 0a000000"),
        # l = 2; low bits 1, 3, 2 (lowest first: 10 11 01), then 1 01 01 0: the high parts 0, 1, 2
        ("packed", "51060102 03000000 0c0000000000 0300", "6d 05"),
    ],
)
def test_bytes_of_indices_1_7_10_in_layers_of_5_0_and_7(form, start, indices):
    encoded = SignMean(form, (5, 0, 7)).encode(vector([1, 7, 10], [1.0, -3.0, -2.0], 12))
    assert hex_of(encoded.payload) == joined(start + TABLE + indices)
    assert encoded.decoded.values.tolist() == [1.0, -2.5, -2.5]


@pytest.mark.parametrize("size", [0, 5])
@pytest.mark.parametrize(("form", "option"), [("coo", "01"), ("packed", "02")])
def test_an_empty_message_is_its_header_and_shape_and_an_empty_layer(size, form, option):
    codec, empty = SignMean(form), vector([], [], size, torch.float64)
    payload = codec.encode(empty).payload
    assert hex_of(payload) == f"510602{option}00000000" + f"{size:02x}00000000000100" + "00" * 8
    same_vector(codec.decode(payload, size), empty)


@pytest.mark.parametrize(("form", "index"), [("coo", "ffffffff"), ("packed", "ffffffff01")])
def test_a_region_may_have_2_to_the_32_elements(form, index):
    encoded = SignMean(form).encode(vector([(1 << 32) - 1], [1.0], 1 << 32))
    assert hex_of(encoded.payload[8:]) == "0000000001000100" + "010000000000803f" + index
    same_vector(SignMean(form).decode(encoded.payload, 1 << 32), encoded.decoded)


@pytest.mark.parametrize("form", ["coo", "packed"])
@pytest.mark.parametrize(("dtype", "code"), [*zip(FLOATS, [1, 2, 4, 3], strict=True)])
def test_every_float_dtype_travels_as_one_float32(dtype, code, form):
    encoded = SignMean(form).encode(vector([2, 3], [-1.0, -2.0], 4, dtype))
    assert encoded.payload[2] == code
    assert hex_of(encoded.payload[16:24]) == "02000000" + "0000c0bf"
    same(encoded.decoded.values, torch.tensor([-1.5, -1.5], dtype=dtype))


# ---- round trips and sizes ------------------------------------------------------------------------


@settings(max_examples=200)
@given(layered())
def test_decode_gives_what_encode_said_in_the_bytes_that_were_promised(drawn):
    original, codec = drawn
    encoded = codec.encode(original)
    other = "coo" if codec.indices == "packed" else "packed"  # the message says which it is
    decoded = SignMean(other, codec.layers).decode(encoded.payload, original.size).check()
    same_vector(decoded, encoded.decoded)
    same(decoded.indices, original.indices)
    parts = codec.parts(original.nnz, original.size, original.values.dtype)
    assert parts.nbytes == encoded.payload.numel()
    assert codec.measure(torch.cat([encoded.payload, encoded.payload])) == parts
    assert torch.equal(codec.encode(original).payload, encoded.payload)


def test_parts_tell_counts_indices_and_means_apart():
    assert SignMean("coo", (50, 49)).parts(10, 99, torch.bfloat16) == Parts(24, index=40, value=8)
    packed = (packing.index_bits(10, 99) + 7) // 8
    assert SignMean("packed").parts(10, 99, torch.float64) == Parts(20, index=packed, value=4)
    framing = MessageFraming(SignMean())
    payload = SignMean().encode(vector([1], [1.0], 4)).payload
    assert framing.length(torch.cat([payload, payload])) == payload.numel() == 28


def test_one_word_per_entry_is_half_of_coo():
    assert SignMean().nbytes(1_000_000, 10**9) / Coo().nbytes(1_000_000, 10**9) < 0.50001


@each_form
@pytest.mark.parametrize("offset", [1, 3, 4, 8])
def test_a_message_may_start_anywhere_and_nothing_behind_it_is_read(form, offset):
    codec, original = SignMean(form, (3, 5)), vector([1, 4, 6], [1, 2, 3], 8)
    encoded = codec.encode(original)
    for fill in (0x00, 0xFF):
        buffer = torch.full((encoded.payload.numel() + 16,), fill, dtype=torch.uint8)
        buffer[offset : offset + encoded.payload.numel()] = encoded.payload
        same_vector(
            codec.decode(buffer[offset : offset + encoded.payload.numel()], 8), encoded.decoded
        )


# ---- means ----------------------------------------------------------------------------------------


@settings(max_examples=200)
@given(layered())
def test_every_entry_of_a_layer_arrives_as_the_mean_of_the_layer(drawn):
    original, codec = drawn
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
@given(layered(), st.booleans())
def test_the_error_never_exceeds_the_vector(drawn, one_signed):
    original, codec = drawn
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
    nan, inf = math.nan, math.inf
    values = [1.0, nan, 2.0, inf, 3.0, -inf, inf, -inf, 4.0]
    codec = SignMean("coo", (2, 2, 2, 2, 1))
    encoded = codec.encode(vector(range(9), values, 9, dtype))
    decoded = codec.decode(encoded.payload, 9)
    expected = torch.tensor([nan, nan, inf, inf, -inf, -inf, nan, nan, 4.0], dtype=dtype)
    same(decoded.values, expected)
    same(encoded.decoded.values, expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_values_have_a_finite_mean(dtype):
    most, limit = torch.finfo(dtype).max, torch.finfo(torch.float32).max
    for values, mean in [
        ([most] * 3, most),
        ([-most] * 3, -most),
        ([most, most, -most], most / 3),
    ]:
        decoded = SignMean().encode(vector([0, 1, 2], values, 3, dtype)).decoded
        assert decoded.values.tolist() == pytest.approx([min(max(mean, -limit), limit)] * 3, 0.01)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_mean_that_rounds_to_zero_leaves_explicit_zeros(dtype):
    encoded = SignMean().encode(vector([1, 2, 3], [smallest(dtype), 0.0, 0.0], 4, dtype))
    same_vector(encoded.decoded, vector([1, 2, 3], [0.0, 0.0, 0.0], 4, dtype))
    same_vector(SignMean().decode(encoded.payload, 4), encoded.decoded)


def test_a_mean_is_summed_in_float64():
    values = [2.0**24, *[1.0] * 8]  # in float32 every one of the ones is lost
    decoded = SignMean().encode(vector(range(9), values, 9)).decoded
    assert decoded.values[0] == torch.tensor((2.0**24 + 8) / 9)


# ---- settings -------------------------------------------------------------------------------------


def test_for_layers_keeps_the_form_and_the_repr_tells_ranks_apart():
    codec = SignMean("packed").for_layers([2, 3])
    assert repr(codec) == "SignMean(indices='packed', layers=(2, 3))"
    assert repr(SignMean()) == "SignMean(indices='coo', layers=None)"
    assert not codec.is_exact(torch.float32)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("bf16",), "indices='bf16' is unknown; use one of coo, packed"),
        (("coo", ()), "0 layers of 0 or more"),
        (("coo", (3, -1)), "2 layers of -1 or more"),
        (("coo", (0,) * 65536), "65536 layers of 0 or more"),
    ],
)
def test_wrong_settings_are_refused(arguments, says):
    with pytest.raises(ConfigurationError, match=says):
        SignMean(*arguments)


@pytest.mark.parametrize(
    ("original", "says"),
    [
        (vector([0], [1], 9, torch.int32), r"takes floats, not torch\.int32; use Coo"),
        (vector([0], [1.0], (1 << 32) + 1), "not 1 of 4294967297"),
        (vector([0, 1], [1.0, 1.0], 1), "not 2 of 1"),
        (vector([0], [1.0], 8), "layers of 9 elements together, but the vector has 8"),
    ],
)
def test_what_has_no_message_is_refused_by_the_sender(original, says):
    with pytest.raises(ConfigurationError, match=says):
        SignMean("coo", (4, 5)).encode(original)


def test_a_receiver_of_another_size_than_its_layers_is_refused():
    payload = SignMean("coo", (4, 6)).encode(vector([0], [1.0], 10)).payload
    with pytest.raises(ConfigurationError, match="layers of 9 elements together"):
        SignMean("coo", (4, 5)).decode(payload, 10)
