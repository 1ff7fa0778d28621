"""Compare C++ that writes, sums and joins messages with codecs and vectors, bit for bit."""

from itertools import pairwise

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from sparsync import SparseVector
from sparsync.errors import ConfigurationError, WireFormatError
from sparsync.kernels import native
from sparsync.wire import Coo, Packed
from sparsync.wire.messages import encode_regions, join_messages, sum_messages
from sparsync.wire.packed import decode_sum, decode_undealt

from .strategies import same_vector
from .wire_messages import using

CODECS = [Coo(), Packed("fp32"), Packed(), Packed("int8", block=3)]
codecs = st.sampled_from(CODECS)


def noise(size, nnz, seed):
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randperm(size, generator=generator)[:nnz].sort().values
    return SparseVector(indices, torch.randint(-2, 3, (nnz,), generator=generator) / 1.0, size)


def alike(function):
    """Call both backends, which must give the same vector or the same error; return the vector."""
    results = []
    for backend in (native.chosen(), "torch"):
        try:
            with using(backend):
                results.append(function())
        except WireFormatError as error:
            results.append(str(error))
    if isinstance(results[1], str):
        assert results[0] == results[1]
        return None
    same_vector(*results)
    return results[0]


@given(
    codecs, st.lists(st.integers(0, 90), min_size=1, max_size=5), st.integers(0, 99), st.integers()
)
def test_sums_are_those_of_decoded_vectors(codec, counts, own, seed):
    vectors = [noise(90, nnz, (seed + i) % 1000) for i, nnz in enumerate(counts)]
    shares = [codec.encode(v).payload for v in vectors]
    shares[own % len(shares)] = vectors[own % len(shares)]
    summed = alike(lambda: sum_messages(codec, shares, vectors[0]))
    decoded = [codec.decode(s, 90) if isinstance(s, torch.Tensor) else s for s in shares]
    same_vector(summed, SparseVector.merge(decoded))


@given(codecs, st.integers(0, 300), st.sets(st.integers(1, 299), max_size=6), st.integers(0, 99))
def test_regions_are_written_and_joined_like_one_by_one(codec, nnz, inner, own):
    v, boundaries = noise(300, nnz, own), [0, *sorted(inner), 300]
    own %= len(boundaries) - 1
    messages, mine = encode_regions(codec, v, boundaries, own)
    parts = v.split(boundaries)
    assert messages[own].numel() == 0
    messages[own] = codec.encode(parts[own]).payload
    same_vector(mine, parts[own])
    assert all(map(torch.equal, messages, [codec.encode(part).payload for part in parts]))
    spans = list(pairwise(boundaries))
    joined = alike(lambda: join_messages(codec, messages, spans, v))
    assert torch.equal(joined.indices, v.indices)
    if codec.is_exact(torch.float32):
        same_vector(joined, v)


@given(codecs, st.integers(0, 10_000), st.integers(0, 400), st.integers(0, 255))
@example(Packed("fp32"), 0, 2, 2)  # of a message of the same length: values of float64
def test_hostile_bytes_give_the_specifications_error_or_result(codec, seed, place, byte):
    v = noise(97, 40, seed)
    good = codec.encode(v).payload
    broken = good.clone()
    broken[place % broken.numel()] = byte
    summed = alike(lambda: sum_messages(codec, [good, broken, v], v))
    spans, like = [(3, 100), (100, 197)], noise(200, 0, 0)
    joined = alike(lambda: join_messages(codec, [good, broken], spans, like))
    for result in (summed, joined):
        if result is not None:
            result.check()


@pytest.mark.parametrize("codec", [Packed("fp32"), Packed(), Packed("int8", block=3)], ids=repr)
@pytest.mark.parametrize("backend", [native.chosen(), "torch"])
def test_a_message_of_another_dtype_is_refused_wherever_messages_are_summed(codec, backend):
    v = noise(97, 40, seed=2)
    doubled = codec.encode(v).payload.clone()
    of_doubles = SparseVector(v.indices, v.values.double(), v.size)
    doubled[:8] = codec.encode(of_doubles).payload[:8]
    with using(backend):
        for combine in (
            lambda: sum_messages(codec, [v, doubled], v),
            lambda: join_messages(codec, [doubled], [(0, 97)], v),
            lambda: decode_sum(codec, [doubled, doubled], 1, v, 40),
            lambda: decode_undealt(codec, [doubled], 40, 0, v, v),
        ):
            with pytest.raises(WireFormatError, match=r"claims values of torch\.float64, and this"):
                combine()


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_messages_for_other_regions_and_pieces_of_messages_are_refused(codec):
    v = noise(60, 30, seed=2)
    message = codec.encode(v).payload
    size = int(v.indices[-1])  # one too few
    for bad in (message, message[:-1], message[:9], message[:0], message.repeat(2)):
        like = noise(size, 9, seed=1)
        assert alike(lambda bad=bad, like=like: sum_messages(codec, [like, bad], like)) is None
        assert alike(lambda bad=bad: join_messages(codec, [bad], [(0, size)], v)) is None


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_messages_may_lie_anywhere_in_memory(codec):
    v = noise(500, 200, seed=3)
    memory = torch.empty(codec.encode(v).payload.numel() + 3, dtype=torch.uint8)
    for offset in range(4):
        message = memory[offset : memory.numel() - 3 + offset]
        message.copy_(codec.encode(v).payload)
        joined = alike(lambda m=message: join_messages(codec, [m], [(0, 500)], v))
        same_vector(joined, codec.decode(message, 500))


@pytest.mark.skipif(native.EXTENSION is None, reason="installed without a C++ compiler")
def test_cpp_refuses_what_does_not_ascend_and_what_has_no_room():
    v = SparseVector(torch.tensor([5, 2]), torch.tensor([1.0, 2.0]), 9)
    with pytest.raises(ConfigurationError, match="ascend"):
        encode_regions(Coo(), v, [0, 9, 9], own=1)
    with pytest.raises(ConfigurationError, match="ascend"):
        sum_messages(Coo(), [v, v], v)
    good = Coo().encode(noise(9, 5, seed=1)).payload
    layout = int.from_bytes(Coo().header(0, 0, torch.float32).pack(), "little"), 0, 0
    room = torch.full((4,), -1), torch.full((4,), -1.0)
    given = [(True, good.data_ptr(), 0, good.numel())] * 2, layout
    ends = room[0].data_ptr(), room[1].data_ptr(), 4
    kernels = {native.EXTENSION.fold: (9,), native.EXTENSION.join: ([(0, 9), (9, 18)],)}
    for kernel, where in kernels.items():
        with pytest.raises(ValueError, match="no room"):
            kernel(*given, *where, ends, native.chosen())
    assert (room[0] == -1).all() and (room[1] == -1).all()
