"""Packed messages: the bytes that docs/wire-format.md promises, sizes, round trips, refusals."""

import re
from math import ceil, log2
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsync import ConfigurationError, SparseVector
from sparsync.kernels import packing
from sparsync.transports.ledger import Parts
from sparsync.wire import Packed
from sparsync.wire.base import MessageFraming

from .packed_messages import BACKENDS, FORMS, backends, forms, packable, using, vector
from .strategies import FLOATS, palette, same, same_vector


def hex_of(payload: torch.Tensor) -> str:
    return bytes(payload.tolist()).hex()


# ---- literal bytes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "start", "values"),
    [
        ("bf16", "51020101 03000000 0c0000000000 0000", "803f 20c0 7e3f"),
        # scales 2.5 / 127 and 127/128 / 127 = 2^-7, codes 51, -127, 127
        ("int8", "51020102 03000000 0c0000000000 0200", "8542a13c 0000003c 33 81 7f"),
        ("fp32", "51020103 03000000 0c0000000000 0000", "0000803f 000020c0 00007e3f"),
    ],
)
def test_bytes_of_indices_1_7_10_of_12(form, start, values, each_backend):
    encoded = Packed(form, block=2).encode(vector([1, 7, 10], [1.0, -2.5, 127 / 128], 12))
    # l = 2; low bits 1, 3, 2 (lowest first: 10 11 01), then 1 01 01 0: the high parts 0, 1, 2
    indices = "6d 05"
    assert hex_of(encoded.payload) == (start + values + indices).replace(" ", "")


def test_the_example_of_the_wire_format_document():
    text = (Path(__file__).parents[2] / "docs" / "wire-format.md").read_text()
    shown = "".join(re.findall(r"^\| `((?:[0-9a-f]{2} ?)+)` \|", text, flags=re.MULTILINE))
    encoded = Packed().encode(vector([1, 7, 10], [1.0, -2.5, 0.9921875], 12))
    assert hex_of(encoded.payload) == shown.replace(" ", "")


def test_an_empty_message_is_its_header_and_shape(each_backend):
    payload = Packed().encode(vector([], [], 5, torch.float64)).payload
    assert hex_of(payload) == "5102020100000000" + "0500000000000000"


def test_a_region_may_have_2_to_the_32_elements(each_backend):
    encoded = Packed("fp32").encode(vector([(1 << 32) - 1], [1.0], 1 << 32))
    # l = 32: 32 low bits, then 1 and a 0 for the one high part there is
    assert hex_of(encoded.payload[8:]) == "0000000001000000" + "0000803f" + "ffffffff" + "01"
    same_vector(Packed().decode(encoded.payload, 1 << 32), encoded.decoded)


# ---- round trips ----------------------------------------------------------------------------------


blocks = st.sampled_from([1, 3, 8, 128])


@settings(max_examples=300)
@given(packable(), forms, blocks, backends, backends)
def test_decode_gives_what_encode_said(original, form, block, sender, receiver):
    codec = Packed(form, block=block)
    with using(sender):
        encoded = codec.encode(original)
    with using(receiver):  # which learns the form of the values from the message
        decoded = Packed().decode(encoded.payload, original.size).check()
    same_vector(decoded, encoded.decoded)
    same(decoded.indices, original.indices)
    assert torch.equal(decoded.isfinite(), original.isfinite())
    parts = codec.parts(original.nnz, original.size, original.values.dtype)
    assert encoded.payload.numel() == parts.nbytes
    assert Packed().measure(encoded.payload) == parts


@pytest.mark.skipif(len(BACKENDS) == 1, reason="the native extension is not built")
@settings(max_examples=500)
@given(packable(max_nnz=300), forms, blocks)
def test_native_messages_equal_those_of_the_specification_bit_for_bit(original, form, block):
    with using("native"):
        fast = Packed(form, block=block).encode(original)
    with using("torch"):
        slow = Packed(form, block=block).encode(original)
    assert torch.equal(fast.payload, slow.payload)
    same(fast.decoded.values, slow.decoded.values)


@pytest.mark.skipif(len(BACKENDS) == 1, reason="the native extension is not built")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("density", [1e-5, 1e-3, 0.01, 0.3, 1.0])
def test_long_native_messages_equal_those_of_the_specification(form, density):
    size = 200_003
    generator = torch.Generator().manual_seed(1)
    indices = (torch.rand(size, generator=generator) < density).nonzero().flatten()
    any_bits = torch.randint(-(1 << 31), 1 << 31, (indices.numel(),), generator=generator)
    values = any_bits.to(torch.int32).view(torch.float32)  # of all magnitudes, NaN among them
    with using("native"):
        fast = Packed(form).encode(SparseVector(indices, values, size))
        same_vector(Packed().decode(fast.payload, size), fast.decoded)
    with using("torch"):
        slow = Packed(form).encode(SparseVector(indices, values, size))
    assert torch.equal(fast.payload, slow.payload)
    same(fast.decoded.values, slow.decoded.values)


@pytest.mark.skipif(len(BACKENDS) == 1, reason="the native extension is not built")
@pytest.mark.parametrize("indices", [[3, 3], [4, 3], [3, 10], [-1, 3], [-1, -1], [1 << 62, 3]])
def test_native_encoding_refuses_unordered_indices(indices):
    with pytest.raises(ConfigurationError, match=r"strictly ascending within \[0, 10\)"):
        Packed().encode(vector(indices, [1.0, 2.0], 10))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("form", FORMS)
def test_exact_means_exact(form, dtype):
    codec = Packed(form)
    values = torch.tensor([v for v in palette(dtype) if v == v], dtype=dtype)
    original = SparseVector(torch.arange(values.numel()), values, 99)
    decoded = codec.encode(original).decoded
    exact = torch.equal(decoded.values, values)
    assert exact or not codec.is_exact(dtype)
    assert codec.is_exact(dtype) == ((form, dtype) in exact_pairs())


def exact_pairs():
    narrow = [torch.float32, torch.bfloat16, torch.float16]
    return [("bf16", torch.bfloat16), *(("fp32", dtype) for dtype in narrow)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("offset", [1, 2, 3, 4, 8])
def test_a_message_may_start_anywhere_in_a_buffer(form, offset, each_backend):
    encoded = Packed(form).encode(vector([1, 4, 6], [1, 2, 3], 8))
    buffer = torch.cat([torch.zeros(offset, dtype=torch.uint8), encoded.payload])
    same_vector(Packed().decode(buffer[offset:], 8), encoded.decoded)
    assert MessageFraming(Packed()).length(torch.cat([encoded.payload, buffer])) == (
        encoded.payload.numel()
    )


def test_strided_and_shifted_views_are_encoded(each_backend):
    indices, values = torch.arange(20)[1::2], torch.randn(20)[1::2]
    expected = SparseVector(indices.clone(), values.clone(), 20)
    given_views = SparseVector(indices, values, 20)
    for form in FORMS:
        codec = Packed(form, block=3)
        assert torch.equal(codec.encode(given_views).payload, codec.encode(expected).payload)


# ---- sizes ----------------------------------------------------------------------------------------


@given(st.integers(1, 1 << 20), st.integers(0, 1 << 32))
def test_indices_take_exactly_the_bits_of_the_formula(nnz, more):
    size = min(nnz + more, 1 << 32)
    low = max(bits for bits in range(33) if nnz << bits <= size)
    assert packing.low_bits(nnz, size) == low
    assert packing.index_bits(nnz, size) == nnz * (low + 1) + ceil(size / 2**low)


@pytest.mark.parametrize(("density", "bits"), [(0.001, 11.95), (0.01, 8.56), (0.02, 7.56)])
def test_indices_cost_half_a_bit_more_than_the_entropy(density, bits):
    size = 14_728_266
    nnz = round(density * size)
    bound = size * (-density * log2(density) - (1 - density) * log2(1 - density)) / nnz
    taken = packing.index_bits(nnz, size) / nnz
    assert taken == pytest.approx(bits, abs=0.01)
    assert bound < taken < bound + 0.56


@given(st.integers(0, 3000), st.integers(0, 1 << 32), forms, st.integers(1, 300))
def test_one_more_entry_takes_more_bytes(nnz, more, form, block):
    size = min(nnz + 1 + more, 1 << 32)
    codec = Packed(form, block=block)
    assert codec.nbytes(nnz, size) < codec.nbytes(nnz + 1, size)


@given(st.integers(16, 1 << 20), st.integers(0, 1 << 32), forms, st.integers(1, 300))
def test_entries_within_is_the_largest_number_that_fits(budget, size, form, block):
    codec = Packed(form, block=block)
    nnz = codec.entries_within(budget, size)
    assert codec.nbytes(nnz, size) <= budget
    assert nnz == size or codec.nbytes(nnz + 1, size) > budget


def test_a_budget_below_an_empty_message_is_refused():
    with pytest.raises(ConfigurationError, match=r"15 bytes cannot hold .* takes 16"):
        Packed().entries_within(15, 100)


def test_parts_tell_header_index_and_value_bytes_apart():
    assert Packed().parts(3, 12, torch.float32) == Parts(header=16, index=2, value=6)
    assert Packed("int8", block=2).parts(3, 12, torch.float32) == Parts(16, 2, 3 + 8)


# ---- what is refused by the sender ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"values": "fp8"}, "values='fp8' is unknown; use one of bf16, int8, fp32"),
        ({"block": 0}, "block=0 .* use 1 to 65535"),
        ({"block": 1 << 16}, "block=65536"),
    ],
)
def test_impossible_options_are_refused(arguments, says):
    with pytest.raises(ConfigurationError, match=says):
        Packed(**arguments)


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (vector([0], [1], 1, torch.int32), r"not torch\.int32; use Coo"),
        (vector([0], [1.0], (1 << 32) + 1), "not 1 of 4294967297"),
        (vector([0, 1], [1.0, 2.0], 1), "not 2 of 1"),
    ],
)
def test_what_has_no_packed_form_is_refused(sent, says):
    with pytest.raises(ConfigurationError, match=says):
        Packed().encode(sent)


def test_ranks_compare_codecs_by_their_names():
    assert repr(Packed("int8", block=64)) == "Packed(values='int8', block=64)"
