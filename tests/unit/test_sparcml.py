"""SparCML's collectives against a dense loop: operations, dtypes, rounding codecs."""

import functools
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsync.collectives.sparcml import Dynamic, Ring
from sparsync.errors import ConfigurationError
from sparsync.reduction import OPERATIONS, Reduction
from sparsync.sparse import DenseVector, SparseVector, densify
from sparsync.wire import Codec, Encoded, Packed, Whole
from sparsync.wire.base import Header
from sparsync.wire.streams import StreamCodec

from .stream_collectives import FACTORIES, make_vectors, reduce_all

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64]
FIRST = Reduction(
    "first", lambda a, b: torch.where(a != 0, a, b), lambda dtype: 0, commutative=False
)

each = pytest.mark.parametrize("name", FACTORIES)


def check(make, tensors, operation):
    """Compare with the dense loop: the same elements, and the same bits on all ranks."""
    expected = functools.reduce(operation.apply, tensors)
    neutral = operation.neutral(expected.dtype)
    dense = [DenseVector(t) for t in tensors]
    sparse = [SparseVector.from_dense(t, neutral) for t in tensors]
    for vectors in (dense, sparse):
        reduced = reduce_all(make, vectors).results
        first = densify(reduced[0].total, operation).values
        assert torch.equal(first, expected)
        for result in reduced:
            values = densify(result.total, operation).values
            assert torch.equal(values.view(torch.uint8), first.view(torch.uint8))
            assert type(result.total) is type(reduced[0].total)
        delivered = [densify(r.delivered, operation).values for r in reduced]
        assert torch.equal(functools.reduce(operation.apply, delivered), expected)


@st.composite
def inputs(draw):
    """An operation, and per rank a vector whose reduction is exact in any order."""
    operation = OPERATIONS[draw(st.sampled_from(sorted(OPERATIONS)))]
    bitwise = operation.name in ("and", "or", "xor")
    dtype = draw(st.sampled_from([t for t in DTYPES if not (bitwise and t.is_floating_point)]))
    palette = [0, 1] if operation.name.startswith("logical") else [0, 1, -1, 2]
    size, world_size = draw(st.integers(0, 12)), draw(st.integers(1, 9))
    neutral = operation.neutral(dtype)
    element = st.sampled_from([neutral, neutral, neutral, *palette])
    row = st.lists(element, min_size=size, max_size=size)
    rows = draw(st.lists(row, min_size=world_size, max_size=world_size))
    return operation, [torch.tensor(r, dtype=dtype) for r in rows]


@each
@settings(max_examples=40)
@given(drawn=inputs(), factor=st.sampled_from([None, 0.0, 0.5, 1.0]))
def test_any_operation_equals_the_dense_loop(name, drawn, factor):
    operation, tensors = drawn
    make = partial(FACTORIES[name], StreamCodec(factor=factor), op=operation, cap=None)
    check(make, tensors, operation)


@pytest.mark.parametrize("name", [name for name in FACTORIES if "dense" not in name])
@pytest.mark.parametrize("op", ["prod", "max", "and"])
def test_neutral_entries_are_not_sent(name, op):
    operation, dtype = OPERATIONS[op], torch.int32 if op == "and" else torch.float32
    neutral = torch.full((50,), operation.neutral(dtype), dtype=dtype)
    stored = SparseVector(torch.arange(50), neutral, 50)
    for vector in (DenseVector(neutral), stored):
        run = reduce_all(partial(FACTORIES[name], op=op, cap=None), [vector] * 5)
        assert all(result.total.nnz == 0 for result in run.results)
        assert all(ledger.total().sent_parts.value == 0 for ledger in run.ledgers)


@pytest.mark.parametrize("name", ["recursive doubling", "split-allgather", "dynamic"])
@pytest.mark.parametrize("world_size", [2, 3, 5, 7, 8, 13])
def test_operations_need_not_commute(name, world_size):
    tensors = [v.to_dense() for v in make_vectors(world_size, size=30)]
    check(partial(FACTORIES[name], op=FIRST, cap=None), tensors, FIRST)


def test_a_ring_refuses_what_does_not_commute():
    with pytest.raises(ConfigurationError, match=r"'first' does not commute.*RecursiveDoubling"):
        Ring(op=FIRST, cap=None)


@each
def test_one_rank_sends_nothing(name):
    assert reduce_all(FACTORIES[name], make_vectors(1), k=20).ledgers[0].total().sent == 0


@pytest.mark.parametrize("name", ["recursive doubling", "split-allgather", "dynamic", "ring"])
def test_at_most_cap_times_k_entries_are_taken(name):
    vectors = make_vectors(3)
    for result, vector in zip(
        reduce_all(FACTORIES[name], vectors, k=7).results, vectors, strict=True
    ):
        assert torch.equal(result.delivered.to_dense(), vector.top(7).to_dense())


@each
def test_the_total_shares_no_memory_with_what_was_delivered(name):
    empty = SparseVector.empty(200, torch.empty(0))
    for world_size in (1, 2, 3, 4):
        vectors = [*[empty] * (world_size - 1), *make_vectors(1)]
        for result in reduce_all(FACTORIES[name], vectors, k=20).results:
            before = result.delivered.to_dense().clone()
            result.total.values.mul_(3)
            assert torch.equal(result.delivered.to_dense(), before)


# ---- the dense switch ------------------------------------------------------------------------------


def test_the_form_of_the_total_follows_the_limit():
    few, many = (
        make_vectors(4, per_rank=10),
        make_vectors(4, per_rank=80),
    )  # of 200; the limit is 100
    for name, make in FACTORIES.items():
        small, large = (reduce_all(make, v, k=200).results[0].total for v in (few, many))
        assert isinstance(small, DenseVector) == ("dense" in name), name
        assert isinstance(large, DenseVector) == (name != "split-allgather"), name
        always_sparse = partial(make, StreamCodec(factor=None))
        if "dense" not in name:
            assert isinstance(reduce_all(always_sparse, many, k=200).results[0].total, SparseVector)


def test_one_dense_region_makes_the_total_dense_on_all_ranks():
    tensors = [torch.zeros(80) for _ in range(4)]
    for tensor in tensors:
        tensor[20:40] = 1.0
    run = reduce_all(partial(Dynamic, cap=None), [DenseVector(t) for t in tensors])
    assert all(isinstance(r.total, DenseVector) for r in run.results)
    assert torch.equal(run.results[3].total.values, 4 * tensors[0])
    sent = [ledger.by_phase()["allgather"].sent_parts for ledger in run.ledgers]
    assert all(parts.index == 0 for parts in sent)
    assert sum(parts.value for parts in sent) == 3 * 20 * 4  # that region alone, to three ranks


# ---- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "dtype", "words"),
    [
        ({"op": "max"}, torch.float32, ["cap is 1.0", "'max'", "cap=None"]),
        ({"op": "mux", "cap": None}, torch.float32, ["'mux'", "max"]),
        ({"cap": 0.0}, torch.float32, ["cap is 0.0", "factor > 0"]),
        ({"op": "and", "cap": None}, torch.float32, ["'and'", "torch.float32", "convert"]),
        (
            {"op": "max", "cap": None, "codec": StreamCodec(Packed())},
            torch.float32,
            ["rounds torch.float32", "'max'", "StreamCodec()"],
        ),
        ({}, torch.int32, ["20 entries of torch.int32", "cap=1.0 takes 5", "cap=None"]),
    ],
)
@pytest.mark.parametrize("name", ["recursive doubling", "split-allgather", "dynamic", "ring"])
def test_refusals_say_what_to_do(name, arguments, dtype, words):
    with pytest.raises(ConfigurationError) as caught:
        reduce_all(partial(FACTORIES[name], **arguments), make_vectors(2, dtype=dtype), k=5)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


# ---- codecs that round: equal totals, and every error kept exactly once ----------------------------


class Noisy(Codec):
    """Shifts every value by up to two eighths, with a seed per message source and step."""

    format = 250

    def __init__(self, seed=0):
        self.seed = seed

    def seeded(self, rank, step):
        return Noisy(seed=1000 * step + rank + 1)

    def encode(self, vector):
        generator = torch.Generator().manual_seed(self.seed)
        rounded = vector.values + torch.randint(-2, 3, vector.values.shape, generator=generator) / 8
        return Encoded(self.message(self.start(vector), rounded), DenseVector(rounded))

    def decode(self, payload, size):
        header, body = self.body(payload, size)
        return DenseVector(body.clone().view(header.dtype))

    def header(self, nnz, size, dtype):
        return Header(self.format, dtype, size)

    def layout(self, header):
        return Whole().layout(header)


@each
@pytest.mark.parametrize("world_size", [2, 3, 4, 6, 7, 8])
def test_what_is_rounded_is_kept_once(name, world_size):
    generator = torch.Generator().manual_seed(world_size)
    # eighths: all sums and differences are exact
    tensors = [torch.randint(-40, 40, (60,), generator=generator) / 8 for _ in range(world_size)]
    make = partial(FACTORIES[name], StreamCodec(dense=Noisy(), factor=0.4), cap=None)
    results = reduce_all(make, [DenseVector(t) for t in tensors]).results
    totals = [r.total.to_dense() for r in results]
    assert all(torch.equal(total, totals[0]) for total in totals)
    assert torch.equal(sum(r.delivered.to_dense() for r in results), totals[0])
    dense_is_used = name != "split-allgather"
    assert torch.equal(totals[0], sum(tensors)) != dense_is_used


def test_the_owner_of_a_region_keeps_what_is_rounded_off_its_sum():
    tensors = [torch.full((40,), 0.25) for _ in range(4)]
    make = partial(Dynamic, StreamCodec(dense=Noisy()), cap=None, op="sum", always_dense=True)
    tensors[0][::2] = 0.5
    results = reduce_all(make, [DenseVector(t) for t in tensors]).results
    for rank, result in enumerate(results):
        error = result.delivered.to_dense() - tensors[rank]
        owned = slice(10 * rank, 10 * rank + 10)
        assert error[owned].count_nonzero() > 0
        error[owned] = 0
        assert error.count_nonzero() == 0
