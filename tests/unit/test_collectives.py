"""Compare collectives with worked examples and dense loops, e.g. which rank keeps dropped sums."""

import functools
from collections import defaultdict
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsync.collectives.allgather import Allgather
from sparsync.collectives.budgeted import Budgeted
from sparsync.collectives.changing import Changing
from sparsync.collectives.halving import Halving
from sparsync.collectives.quantised import Quantised
from sparsync.errors import ConfigurationError, WireFormatError
from sparsync.published.baselines.gtopk import GTopk
from sparsync.published.redsync.sign_mean import SignMean
from sparsync.published.sparcml.collectives import Dynamic, Ring
from sparsync.published.wagma.scheme import coded_allreduce
from sparsync.reduction import OPERATIONS, Reduction, densify
from sparsync.sparse import DenseVector, SparseVector
from sparsync.transports.communicator import Communicator
from sparsync.transports.sim import Links, simulate
from sparsync.wire import Codec, Coo, Encoded, LloydMax, Packed, Whole
from sparsync.wire.codec import Header
from sparsync.wire.coo import StreamCodec
from sparsync.wire.qsgd import SparseQsgd
from tests.tables import cases

from .strategies import same, same_vector
from .stream_collectives import FACTORIES, make_vectors, reduce_all

SIZE, LAYERS, COUNT = 40, (24, 0, 16), 8


def one_signed(rank: int) -> SparseVector:
    """Return multiples of 1/8 with one sign at four places per layer; means and sums are exact."""
    generator = torch.Generator().manual_seed(rank)
    low, high = (torch.randperm(n, generator=generator)[:4].sort().values for n in (24, 16))
    values = torch.randint(1, 40, (COUNT,), generator=generator) / 8
    return SparseVector(torch.cat([low, high + 24]), values, SIZE)


def dense_sum(vectors) -> torch.Tensor:
    return torch.stack([vector.to_dense() for vector in vectors]).sum(0)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_an_error_that_nobody_keeps_is_lost(world_size):
    selected = [one_signed(rank) for rank in range(world_size)]
    make = partial(Allgather, SignMean("coo", LAYERS), keep_error=False)
    results = reduce_all(make, selected, k=COUNT).results
    for mine, result in zip(selected, results, strict=True):
        decoded = SignMean("coo", LAYERS).encode(mine).decoded
        assert torch.equal(result.delivered.to_dense(), mine.to_dense())
        assert torch.equal(result.lost.to_dense(), mine.to_dense() - decoded.to_dense())
        assert result.lost.nnz > 0
        assert torch.equal(result.total.to_dense(), results[0].total.to_dense())
    arrived = dense_sum(r.delivered for r in results) - dense_sum(r.lost for r in results)
    assert torch.equal(arrived, results[0].total.to_dense())


def reduced_by(make):
    async def program(comm, vector):
        await make().reduce(comm, SparseVector.from_dense(vector), vector.numel(), 0)

    return program


CALLERS = {
    "budgeted": reduced_by(Budgeted),
    "quantised": reduced_by(partial(Quantised, 16)),
    "dynamic": reduced_by(Dynamic),
    "dynamic, local": reduced_by(partial(Dynamic, local=Coo())),
    "coded_allreduce": lambda comm, vector: coded_allreduce(comm, vector, Whole(torch.bfloat16), 0),
}


@pytest.mark.parametrize("name", CALLERS)
@pytest.mark.parametrize(("world_size", "size"), [(2, 5), (3, 5), (4, 9), (4, 2), (3, 6)])
def test_all_ranks_expect_the_same_of_alltoallv_and_keep_to_it(name, world_size, size, monkeypatch):
    """A native call pads messages to the expected lengths, even if regions differ in width."""
    expected = defaultdict(list)
    plain = Communicator.alltoallv

    async def watched(comm, payloads, capacities, phase, framing):
        expected[comm.rank].append(list(capacities))
        sent = [payload.numel() for r, payload in enumerate(payloads) if r != comm.rank]
        assert max(sent) <= capacities[comm.rank]
        return await plain(comm, payloads, capacities, phase, framing)

    monkeypatch.setattr(Communicator, "alltoallv", watched)
    simulate(lambda comm: CALLERS[name](comm, torch.arange(1.0, size + 1)), world_size)
    assert expected[0]
    assert all(expected[rank] == expected[0] for rank in range(world_size))


@pytest.mark.parametrize("quantised", [True, False])
def test_dense_messages_of_another_dtype_are_refused(quantised):
    """Levels take the same bytes in every dtype, so the length does not tell."""

    async def program(comm):
        vector = torch.arange(1.0, 9.0, dtype=(torch.float32, torch.float64)[comm.rank])
        with pytest.raises(WireFormatError, match=r"claims values of torch\.float\d\d, and this"):
            if quantised:
                await reduced_by(Quantised)(comm, vector)
            else:
                await coded_allreduce(comm, vector, LloydMax(8), 0)

    simulate(program, world_size=2)


def test_what_the_cap_cuts_off_is_neither_delivered_nor_lost():
    selected = [one_signed(rank) for rank in range(3)]
    results = reduce_all(partial(Allgather, SignMean(), keep_error=False), selected, k=5).results
    for mine, result in zip(selected, results, strict=True):
        assert torch.equal(result.delivered.indices, mine.top(5).indices)
        assert torch.equal(result.delivered.values, mine.top(5).values)
        assert set(result.lost.indices.tolist()) <= set(mine.top(5).indices.tolist())


def test_for_layers_reaches_the_codec_and_keeps_the_rest():
    collective = Allgather(SignMean("packed"), 2.0, keep_error=False).for_layers(LAYERS)
    assert (collective.codec.indices, collective.codec.layers) == ("packed", LAYERS)
    assert (collective.cap, collective.keep_error) == (2.0, False)
    kept = Allgather(Coo()).for_layers(LAYERS)
    assert (type(kept.codec), kept.cap, kept.keep_error) == (Coo, 1.0, True)


def test_layers_of_a_fused_group_have_a_mean_each():
    def make():
        return Allgather(SignMean(), keep_error=False).for_layers((2, 2))

    vector = SparseVector(torch.arange(4), torch.tensor([1.0, 3.0, 10.0, 30.0]), 4)
    (result,) = reduce_all(make, [vector], k=4).results
    assert result.total.to_dense().tolist() == [2.0, 2.0, 20.0, 20.0]
    assert result.lost.to_dense().tolist() == [-1.0, 1.0, -10.0, 10.0]


# ---- whole vectors ----------------------------------------------------------------------------------


def noise(rank: int, step: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(1000, generator=generator).to(dtype)


def fold(tensors) -> torch.Tensor:
    """Return the left fold in rank order."""
    total = torch.zeros_like(tensors[0])
    for tensor in tensors:
        total = total + tensor
    return total


def test_codecs_draw_for_the_rank_and_the_step():
    codec, vector = SparseQsgd(4, scale="max"), SparseVector.from_dense(noise(0))
    results = reduce_all(partial(Allgather, codec, None), [vector] * 2, step=3).results
    for rank, result in enumerate(results):
        same_vector(result.delivered, codec.seeded(rank, 3).encode(vector).decoded)


def test_ranks_of_different_sizes_are_refused():
    vectors = [SparseVector.from_dense(torch.ones(size)) for size in (7, 8)]
    with pytest.raises(WireFormatError, match=r"region of (7|8) elements, expected (8|7)"):
        reduce_all(partial(Allgather, Packed("int8"), None), vectors)


def reduced(inputs: list[SparseVector], k: int, collective: GTopk | None = None, step: int = 0):
    """Run one call on as many virtual ranks as there are inputs."""

    async def program(comm):
        return await (collective or GTopk()).reduce(comm, inputs[comm.rank], k, step)

    return simulate(program, len(inputs)).results


def tree(inputs: list[SparseVector], k: int) -> SparseVector:
    """Return the result of the simple version, which repeatedly merges neighbours and cuts the sum."""
    level = [vector.top(k) for vector in inputs]
    while len(level) > 1:
        pairs = [level[i : i + 2] for i in range(0, len(level), 2)]
        level = [SparseVector.merge(pair).top(k) if len(pair) == 2 else pair[0] for pair in pairs]
    return level[0]


def sparse(*values: float, dtype: torch.dtype = torch.float32) -> SparseVector:
    return SparseVector.from_dense(torch.tensor(values, dtype=dtype))


def shares(results) -> list[list[float]]:
    return [result.delivered.to_dense().tolist() for result in results]


# ---- by hand --------------------------------------------------------------------------------------


def test_what_is_dropped_on_the_way_stays_with_the_rank_on_the_way():
    """Ranks 2 and 3 merge first and drop 4 in favour of 6; then rank 0 drops 6 in favour of 8."""
    inputs = [sparse(3, 0, 0, 0), sparse(5, 0, 0, 0), sparse(0, 4, 0, 0), sparse(0, 0, 6, 0)]
    results = reduced(inputs, k=1)
    assert [r.total.to_dense().tolist() for r in results] == [[8.0, 0.0, 0.0, 0.0]] * 4
    assert shares(results) == [[3, 0, -6, 0], [5, 0, 0, 0], [0, 0, 0, 0], [0, 0, 6, 0]]


@pytest.mark.parametrize("world_size", [2, 5])
def test_halving_works_for_the_bytes_that_arrive(world_size):
    """Work follows received bytes: only rank 0 has entries, so few ranks send as much."""

    async def program(comm):
        mine = SparseVector.from_dense(noise(0) if comm.rank == 0 else torch.zeros(len(noise(0))))
        await Halving().reduce(comm, mine, k=len(noise(0)), step=0)
        traffic = comm.ledger.by_phase()["reduce-scatter"]
        return comm.ledger.stages["unpack"], traffic.received, traffic.sent

    links = Links(alpha=0.0, beta=0.0, gamma=1.0)
    for worked, received, sent in simulate(program, world_size, links=links).results:
        assert worked == received != sent


def test_lower_ranks_are_the_left_operands():
    """1 + 2^-24 rounds to 1 in float32, so the last bit shows which pair was added first."""
    tiny = 2.0**-24
    total = reduced([sparse(1.0), sparse(tiny), sparse(tiny), sparse(tiny)], k=1)[0].total
    assert total.values.tolist() == [1.0 + 2 * tiny]  # (1 + t) + (t + t)
    total = reduced([sparse(1.0), sparse(tiny), sparse(tiny)], k=1)[0].total
    assert total.values.tolist() == [1.0]  # (1 + t) + t


def test_one_rank_sends_nothing():
    (result,) = reduced([sparse(1.0, 3.0, 2.0)], k=2, collective=GTopk(Packed("int8")))
    assert result.total.to_dense().tolist() == [0.0, 3.0, 2.0]
    assert result.delivered is result.total


# ---- against the loop -----------------------------------------------------------------------------


@st.composite
def contributions(draw):
    """Draw inputs of 1 to 9 ranks, whole numbers, whose sums are exact in any order."""
    size = draw(st.integers(1, 12))
    element = st.one_of(st.just(0.0), st.integers(-9, 9).map(float))
    rank = st.lists(element, min_size=size, max_size=size).map(lambda v: sparse(*v))
    return draw(st.lists(rank, min_size=1, max_size=9)), draw(st.integers(0, size + 1))


@settings(max_examples=60)
@given(contributions())
def test_the_total_is_that_of_the_tree_and_the_sum_of_what_was_delivered(drawn):
    inputs, k = drawn
    results = reduced(inputs, k)
    expected = tree(inputs, k)
    for result in results:
        same_vector(result.total.check(), expected)
        result.delivered.check()
    summed = sum(result.delivered.to_dense() for result in results)
    assert torch.equal(summed, results[0].total.to_dense())


def test_random_draws_differ_by_rank_and_step_and_totals_do_not():
    inputs = [SparseVector.from_dense(torch.linspace(1, 2, 50)) for _ in range(4)]
    collective = GTopk(SparseQsgd(4))
    totals = [[r.total for r in reduced(inputs, 50, collective, step)] for step in (0, 1, 0)]
    for step in totals:
        for total in step:
            same_vector(total, step[0])
    assert not torch.equal(totals[0][0].values, totals[1][0].values)
    same_vector(totals[2][0], totals[0][0])


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64]
FIRST = Reduction("first", lambda a, b: torch.where(a != 0, a, b), lambda dtype: 0, False)

each = pytest.mark.parametrize("name", FACTORIES)


def check(make, tensors, operation):
    """Compare the result with the dense loop: the same elements, and the same bits on all ranks."""
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
    """Draw an operation, and a vector per rank, whose reduction is exact in any order."""
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


@pytest.mark.fast(3)
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


@pytest.mark.parametrize("name", ["recursive doubling", "split-allgather", "dynamic", "ring"])
def test_at_most_cap_times_k_entries_are_taken(name):
    vectors = make_vectors(3)
    results = reduce_all(FACTORIES[name], vectors, k=7).results
    for result, vector in zip(results, vectors, strict=True):
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
    few, many = (make_vectors(4, per_rank=n) for n in (10, 80))  # of 200; the limit is 100
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


@cases(
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
)
@pytest.mark.parametrize("name", ["recursive doubling", "split-allgather", "dynamic", "ring"])
def test_refusals_say_what_to_do(arguments, dtype, words, name):
    with pytest.raises(ConfigurationError) as caught:
        reduce_all(partial(FACTORIES[name], **arguments), make_vectors(2, dtype=dtype), k=5)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


# ---- codecs that round: equal totals, and every error kept exactly once ----------------------------


class Noisy(Codec):
    """A codec that shifts every value by up to two eighths, seeded by the message's source and step."""

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


@pytest.mark.parametrize(("bits", "broken"), [(2, 64), (16, 100)])
def test_vectors_that_stay_in_messages_are_what_these_say(bits, broken):
    tensors = [1e5 * torch.randn(700, generator=torch.Generator().manual_seed(r)) for r in range(3)]
    for result in reduce_all(partial(Quantised, bits, 64), [*map(DenseVector, tensors)]).results:
        total, delivered = result.total, result.delivered
        whole, left = total.values.clone(), torch.ones(700)
        assert total.first_nonfinite() is None and (total.size, total.nnz) == (700, 700)
        assert total.first_nonfinite(torch.float16) == int((whole.abs() > 65504).nonzero()[0])
        delivered.subtract_from_(left)
        same(left, 1 - delivered.values)
        total.divide_(3)
        total.write_to_(left)
        same(left, whole / 3)
        same(total.values, left)
    tensors[1][100] = torch.nan
    for result in reduce_all(partial(Quantised, bits, 64), [*map(DenseVector, tensors)]).results:
        assert result.total.first_nonfinite() == broken


def test_layers_that_never_change_are_not_sent():
    """Once a buffer changes on any rank, that exchange and all later ones deliver it."""
    table = [3, 400, 2]

    async def program(comm):
        collective, told = Changing().for_layers(table), []
        for step in range(5):
            mine = torch.zeros(sum(table))
            mine[:3] = comm.rank + 1
            if step == 2 and comm.rank == 1:
                mine[10] = 7.0
            if step == 4 and comm.rank == 0:
                mine[404] = torch.nan
            before = comm.ledger.total().sent
            reduced = await collective.reduce(comm, DenseVector(mine), 0, step)
            assert reduced.delivered.to_dense() is mine
            sent = comm.ledger.total().sent - before
            told.append((reduced.total.to_dense(), sent, collective.state.moving))
        return told

    everyone = simulate(program, world_size=4).results
    for step, ranks in enumerate(zip(*everyone, strict=True)):
        total, sent, _ = ranks[0]
        assert all(torch.equal(total, t) or step == 4 for t, _, _ in ranks)
        assert {m for _, _, m in ranks} == {[(0,), (0,), (0, 1), (0, 1), (0, 1, 2)][step]}
        assert total[:3].tolist() == [10.0] * 3 and float(total[10]) == (7.0 if step == 2 else 0.0)
        assert bool(total[404].isnan()) == (step == 4)
        # only flags, or the layers that change; all layers would take 2 n (P - 1) / P elements of 4
        # bytes per rank
        assert (sent < 100) == (step < 2) and sent < 2600
