"""Packed messages: every backend gives the bytes of the specification; sizes of indices."""

from math import ceil, log2

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsync import ConfigurationError, SparseVector
from sparsync.kernels import packing
from sparsync.wire import Packed

from .strategies import FLOATS, palette, same, same_vector
from .wire_messages import BACKENDS, FORMS, backends, forms, packable, using, vector

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
