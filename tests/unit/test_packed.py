"""Packed messages: every backend gives the bytes of the specification; sizes; how values are rounded."""

import struct
from math import ceil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsync import ConfigurationError, SparseVector
from sparsync.kernels import packing
from sparsync.wire import Packed

from .strategies import same, same_vector
from .wire_messages import BACKENDS, FORMS, backends, forms, packable, using, vector

INF, NAN = float("inf"), float("nan")

# ---- bytes ----------------------------------------------------------------------------------


blocks = st.sampled_from([1, 3, 8, 128])


@pytest.mark.skipif(len(BACKENDS) == 1, reason="the native extension is not built")
@settings(max_examples=150)
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


# ---- sizes ----------------------------------------------------------------------------------------


@given(st.integers(1, 1 << 20), st.integers(0, 1 << 32))
def test_indices_take_exactly_the_bits_of_the_formula(nnz, more):
    size = min(nnz + more, 1 << 32)
    low = max(bits for bits in range(33) if nnz << bits <= size)
    assert packing.low_bits(nnz, size) == low
    assert packing.index_bits(nnz, size) == nnz * (low + 1) + ceil(size / 2**low)


# ---- rounding --------------------------------------------------------------------------------------


def rounded(values, form="bf16", block=128, dtype=torch.float32) -> list[float]:
    sent = vector(range(len(values)), values, len(values), dtype)
    return Packed(form, block=block).encode(sent).decoded.values.tolist()


@given(st.floats(width=32, allow_nan=False), backends)
def test_bf16_is_torch_s_own_rounding_except_where_that_overflows(x, backend):
    expected = torch.tensor([x]).to(torch.bfloat16).float().item()
    with using(backend):
        (got,) = rounded([x])
    if abs(expected) == INF != abs(x):
        expected = torch.finfo(torch.bfloat16).max * (1 if x > 0 else -1)
    assert struct.pack("f", got) == struct.pack("f", expected)


def test_bf16_ties_go_to_even_and_finite_stays_finite(each_backend):
    bits = [0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x00008000, 0x00018000]
    values = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    got = torch.tensor(rounded(values.tolist())).view(torch.int32) >> 16
    assert [hex(b) for b in got.tolist()] == ["0x3f80", "0x3f82", "0x3f81", "0x7f7f", "0x0", "0x2"]


def test_every_nan_is_a_nan_and_keeps_its_sign_in_bf16():
    bits = [0x7F800001, 0x7FFFFFFF, -0x007FFFFF, -1]  # the last two have the sign
    nans = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    raw = packing.pack_values(nans, packing.BF16, 0).view(torch.int16)
    assert raw.tolist() == [0x7FC0, 0x7FC0, -64, -64]


def test_int8_rounds_to_multiples_of_the_largest_over_127(each_backend):
    assert rounded([127.0, 0.5, 1.5, -2.5, -127.0, 0.49, 63.51], "int8") == [
        127.0, 0.0, 2.0, -2.0, -127.0, 0.0, 64.0
    ]  # fmt: skip


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=30))
def test_int8_is_off_by_at_most_half_a_step(values):
    got = rounded(values, "int8", block=8)
    for start in range(0, len(values), 8):
        step = max(map(abs, values[start : start + 8])) / 127
        allowed = max(step / 2 * 1.001, 63.5 * 2.0**-149)  # denormal scales are coarse
        for x, y in zip(values[start : start + 8], got[start : start + 8], strict=True):
            assert abs(x - y) <= allowed
