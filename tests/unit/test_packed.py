"""Test that every backend packs the specified bytes, and test sizes, rounding and parcels."""

import struct
from math import ceil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsync import SparseVector
from sparsync.errors import ConfigurationError, WireFormatError
from sparsync.kernels import native, packing
from sparsync.wire import Coo, Packed
from sparsync.wire.packed import decode_sum, decode_undealt, encode_dealt

from .strategies import same, same_vector
from .wire_messages import BACKENDS, FORMS, backends, forms, packable, using, vector

INF, NAN = float("inf"), float("nan")

# ---- bytes ----------------------------------------------------------------------------------


blocks = st.sampled_from([1, 3, 8, 128])


needs_native = pytest.mark.skipif(len(BACKENDS) == 1, reason="the native extension is not built")


def compare_backends(codec, original):
    """Check that a message is the same bits from both backends, and is decoded as was said."""
    with using("native"):
        fast = codec.encode(original)
        same_vector(Packed().decode(fast.payload, original.size), fast.decoded)
    with using("torch"):
        slow = codec.encode(original)
    assert torch.equal(fast.payload, slow.payload)
    same(fast.decoded.values, slow.decoded.values)


@needs_native
@settings(max_examples=75)
@given(packable(max_nnz=300), forms, blocks)
def test_native_messages_equal_those_of_the_specification_bit_for_bit(original, form, block):
    compare_backends(Packed(form, block=block), original)


@needs_native
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("density", [1e-5, 1e-3, 0.01, 0.3, 1.0])
def test_long_native_messages_equal_those_of_the_specification(form, density):
    size = 200_003
    generator = torch.Generator().manual_seed(1)
    indices = (torch.rand(size, generator=generator) < density).nonzero().flatten()
    any_bits = torch.randint(-(1 << 31), 1 << 31, (indices.numel(),), generator=generator)
    values = any_bits.to(torch.int32).view(torch.float32)  # of all magnitudes, NaN among them
    compare_backends(Packed(form), SparseVector(indices, values, size))


@needs_native
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
    values = [127.0, 0.5, 1.5, -2.5, -127.0, 0.49, 63.51]
    assert rounded(values, "int8") == [127.0, 0.0, 2.0, -2.0, -127.0, 0.0, 64.0]


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=30))
def test_int8_is_off_by_at_most_half_a_step(values):
    got = rounded(values, "int8", block=8)
    for start in range(0, len(values), 8):
        step = max(map(abs, values[start : start + 8])) / 127
        allowed = max(step / 2 * 1.001, 63.5 * 2.0**-149)  # denormal scales are coarse
        for x, y in zip(values[start : start + 8], got[start : start + 8], strict=True):
            assert abs(x - y) <= allowed


CODECS = [Packed(), Packed("int8"), Packed("int8", block=5), Packed("fp32"), Coo()]
SPECIAL = [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-42, 3.4e38, 1.0]


def noise(size, nnz, seed, special=False):
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randperm(size, generator=generator)[:nnz].sort().values
    values = torch.randn(indices.numel(), generator=generator)
    if special and indices.numel():
        places = torch.randint(indices.numel(), (4,), generator=generator)
        choice = torch.randint(len(SPECIAL), (4,), generator=generator)
        values[places] = torch.tensor(SPECIAL)[choice]
    return SparseVector(indices, values, size)


def on_the_specification(function):
    """Call with the native kernels switched off."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "chosen", lambda: "torch")
        return function()


def same_bits(a, b):
    assert torch.equal(a.indices, b.indices)
    nan = a.values.isnan()
    assert torch.equal(nan, b.values.isnan())
    assert torch.equal(a.values[~nan], b.values[~nan]) and a.size == b.size


# codec, size, entries, ranks, seed
limits = (1, 400), (0, 120), (1, 9), (0, 10_000)
problems = st.tuples(st.sampled_from(CODECS), *(st.integers(*limit) for limit in limits))


@given(problems, st.booleans())
def test_cpp_deals_and_packs_as_the_specification(problem, special):
    codec, size, nnz, world_size, seed = problem
    v, rank = noise(size, min(nnz, size), seed, special), seed % world_size
    fast = encode_dealt(codec, v, world_size, rank, limit=size)
    slow = on_the_specification(lambda: encode_dealt(codec, v, world_size, rank, limit=size))
    for mine, other in zip(fast.messages, slow.messages, strict=True):
        assert torch.equal(mine, other)
    same_bits(fast.own, slow.own)
    same_bits(*(SparseVector(v.indices, made.arriving, size) for made in (fast, slow)))


def exchanged(codec, vectors, world_size, rank):
    """Return the messages that a rank receives, and the rank's own share."""
    sent = [encode_dealt(codec, v, world_size, r, v.size) for r, v in enumerate(vectors)]
    return [parcels.messages[rank] for parcels in sent], sent[rank].own


@given(problems)
def test_cpp_sums_as_the_specification(problem):
    codec, size, nnz, world_size, seed = problem
    vectors = [noise(size, min(nnz, size), seed + r, special=r == 1) for r in range(world_size)]
    rank = seed % world_size
    messages, own = exchanged(codec, vectors, world_size, rank)
    for k in (0, 1, nnz // 2, nnz, size):
        fast = decode_sum(codec, messages, rank, own, k)
        slow = on_the_specification(lambda k=k: decode_sum(codec, messages, rank, own, k))
        same_bits(fast.check(), slow)


@given(problems, st.booleans())
def test_dealing_and_joining_is_the_identity_up_to_rounding(problem, special):
    codec, size, nnz, world_size, seed = problem
    v = noise(size, min(nnz, size), seed, special)
    parcels = encode_dealt(codec, v, world_size, rank=0, limit=size)
    messages = [codec.encode(parcels.own).payload, *parcels.messages[1:]]
    # join all messages of one rank; another rank sent different values
    own = 0, parcels.own, noise(size, min(nnz, size), seed + 1, special)
    for k in (0, 1, nnz // 2, max(nnz - 1, 0), size):
        fast = decode_undealt(codec, messages, k, *own)
        slow = on_the_specification(lambda k=k: decode_undealt(codec, messages, k, *own))
        for one, other in zip(fast, slow, strict=True):  # the total, what was delivered
            same_bits(one.check(), other)
    assert torch.isin(fast[0].indices, v.indices).all()
    if codec.exact and not special:  # zeros are not stored
        same_vector(fast[0], v)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_what_does_not_fit_is_the_smallest_and_does_not_arrive(codec):
    v = noise(1000, 600, seed=1)
    parcels = encode_dealt(codec, v, world_size=3, rank=2, limit=50)
    arrived = parcels.arriving != 0
    assert [codec.decode(m, 334).nnz for m in parcels.messages[:2]] == [50, 50]
    assert int(arrived.sum()) <= 100 + parcels.own.nnz
    assert v.values[arrived].abs().max() == v.values.abs().max()


@pytest.mark.parametrize("size", [10, 2**31, 2**34])
def test_indices_beyond_32_bits(size):
    v = SparseVector(torch.tensor([0, size // 2, size - 1]), torch.tensor([1.0, 2.0, 3.0]), size)
    parcels = encode_dealt(Packed(), v, world_size=8, rank=0, limit=3)
    messages = [Packed().encode(parcels.own).payload, *parcels.messages[1:]]
    same_vector(decode_undealt(Packed(), messages, 3, 0, parcels.own, v)[0], v)


@given(st.integers(0, 10_000), st.integers(0, 200), st.integers(0, 255))
def test_hostile_bytes_give_an_error_or_entries_within_the_vector(seed, place, byte):
    size, world_size = 97, 3
    v = noise(size, 60, seed)
    parcels = encode_dealt(Packed(), v, world_size, rank=0, limit=size)
    messages = [Packed().encode(parcels.own).payload, *parcels.messages[1:]]
    broken = messages[1].clone()
    broken[place % broken.numel()] = byte
    hostile = [messages[0], broken, messages[2]]
    for decode in (
        lambda: decode_undealt(Packed(), hostile, 30, 0, parcels.own, v)[0],
        lambda: decode_sum(Packed(), hostile, 0, parcels.own, size),
    ):
        try:
            result = decode()
        except WireFormatError:
            continue
        result.check()


def test_messages_of_another_form_are_understood():
    size, vectors = 200, [noise(200, 90, seed) for seed in range(3)]
    others = [Packed("int8"), Packed("fp32"), Packed("int8", block=3)]
    sent = [encode_dealt(*of, 3, r, size) for r, of in enumerate(zip(others, vectors, strict=True))]
    messages, own = [parcels.messages[0] for parcels in sent], sent[0].own
    fast = decode_sum(Packed(), messages, 0, own, 50)
    same_bits(fast, on_the_specification(lambda: decode_sum(Packed(), messages, 0, own, 50)))
    assert fast.nnz == 50


@pytest.mark.parametrize("k", [1, 9])
def test_a_single_share_keeps_the_zeros_that_it_stores(k):
    own = SparseVector(torch.tensor([0, 2]), torch.tensor([0.0, -1.0]), 9)
    message = Packed().encode(own).payload

    def summed():
        return decode_sum(Packed(), [message], 0, own, k)

    same_bits(summed(), on_the_specification(summed))
    assert summed().indices.tolist() == ([2] if k == 1 else [0, 2])


def test_messages_for_another_region_are_refused():
    own = noise(50, 20, seed=1)
    message = Packed().encode(noise(51, 20, seed=2)).payload
    for bad in (message, message[:-1], message[:9], message[:0]):
        with pytest.raises(WireFormatError):
            decode_sum(Packed(), [message, bad], 0, own, 9)


def test_an_element_beyond_the_vector_is_refused():
    # 4 elements have 3 owners, so the last group has one element, but an owner claims another one
    width = 2
    claim = SparseVector(torch.tensor([1]), torch.tensor([1.0]), width)
    empty = SparseVector.empty(width, claim.values)
    for codec in (Packed(), Coo()):
        refused = 0
        for owner in range(3):
            vectors = [claim if r == owner else empty for r in range(3)]
            messages = [codec.encode(x).payload for x in vectors]
            try:
                sent = SparseVector.empty(4, claim.values)
                decode_undealt(codec, messages, 9, 0, vectors[0], sent)
            except WireFormatError as error:
                assert f"rank {owner}" in str(error) and "beyond the vector's 4" in str(error)
                refused += 1
        assert refused == 2


def test_unordered_entries_are_refused():
    v = SparseVector(torch.tensor([5, 2]), torch.tensor([1.0, 2.0]), 9)
    with pytest.raises(ConfigurationError, match="ascend"):
        encode_dealt(Packed(), v, world_size=1, rank=5, limit=9)


@pytest.mark.skipif(native.EXTENSION is None, reason="installed without a C++ compiler")
@pytest.mark.parametrize("capacity", [0, 1, 29])
def test_cpp_writes_no_more_entries_than_fit(capacity):
    codec, v = Packed("fp32"), noise(200, 60, seed=1)
    header = codec.header(0, 100, torch.float32)
    style = *struct.unpack("<2Q", header.pack()), header.option, header.detail, 100
    parcels = encode_dealt(codec, v, 2, 0, 200)
    own = parcels.own
    messages = [codec.encode(own).payload, parcels.messages[1]]
    raw = [(message.data_ptr(), message.numel()) for message in messages]
    sums = own.values.data_ptr(), own.nnz
    mine = 0, own.indices.data_ptr(), *sums
    sent = v.indices.data_ptr(), parcels.arriving.data_ptr(), v.nnz
    indices, values = torch.full((64,), -1), torch.full((64,), -1.0)
    small = indices.data_ptr(), values.data_ptr(), capacity
    others = torch.full((64,), -1), torch.full((64,), -1.0)
    large = *(tensor.data_ptr() for tensor in others), 64
    undeal = style, 200, 30, (0, *sums), sent
    for kernel, arguments in (
        (native.EXTENSION.unpack_and_sum, (*mine, style, 30, small)),
        (native.EXTENSION.unpack_and_undeal, (*undeal, small, large)),
        (native.EXTENSION.unpack_and_undeal, (*undeal, large, small)),
    ):
        with pytest.raises(ValueError, match=f"room for {capacity} entries, and there are"):
            kernel(raw, *arguments, native.chosen())
        assert (indices[capacity:] == -1).all() and (values[capacity:] == -1).all()


def test_ties_across_a_tile_fit_the_room_that_is_made():
    size = 1 << 17  # all entries of a tile tie, and k is far smaller
    v = SparseVector.from_dense(torch.ones(size))
    parcels = encode_dealt(Packed(), v, world_size=2, rank=0, limit=size)
    messages = [Packed().encode(parcels.own).payload, parcels.messages[1]]
    for k in (1, 5, (1 << 16) + 1):
        same_vector(decode_undealt(Packed(), messages, k, 0, parcels.own, v)[0], v.top(k))
