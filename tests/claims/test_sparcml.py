"""Check the bounds of SparCML's collectives (section 5.3) on the simulator's ledger and clock.

Supports overlap in one of two extreme ways: all are equal ("full") or all are disjoint ("none").
"""

from functools import cache

import pytest
import torch

from sparsync.collectives.costs import (
    WORD_BYTES,
    Job,
    lemma_5_1_words,
    lower_bound_words,
    sum_bound_words,
)
from sparsync.published.sparcml import Dynamic, RecursiveDoubling, Ring, split_allgather
from sparsync.sparse import DenseVector, SparseVector
from sparsync.transports.sim import Links, simulate
from sparsync.wire import StreamCodec
from sparsync.wire.codec import HEADER_BYTES

MANY = [pytest.param(p, marks=pytest.mark.slow) for p in (32, 64)]
FEW = [2, 3, 4, 5, 8, 12, 16]
RANKS = [*FEW, *MANY]
POWERS = [*(p for p in FEW if p & (p - 1) == 0), *MANY]
K = 64 * 3  # entries of a rank
SIZE = 64 * K * 15  # 1.67 n / P entries fit each region; P = 15 divides nothing
LINKS = Links(alpha=50e-6, beta=8e-9)


def support(rank, world_size, overlap):
    """Return K indices, evenly spread over the whole vector."""
    step = SIZE // (K * 64)
    first = torch.arange(K) * (SIZE // K)
    return first if overlap == "full" else first + rank * step


@cache
def reduce(make, world_size, overlap):
    async def program(comm):
        indices = support(comm.rank, comm.world_size, overlap)
        mine = SparseVector(indices, torch.full((K,), comm.rank + 1.0), SIZE)
        return (await make().reduce(comm, mine, K, step=0)).total

    simulation = simulate(program, world_size, links=LINKS)
    expected = torch.zeros(SIZE)
    for rank in range(world_size):
        expected[support(rank, world_size, overlap)] += rank + 1.0
    assert all(torch.equal(total.to_dense(), expected) for total in simulation.results)
    return simulation


def entry_words(simulation):
    """Return the most words of indices and values that any rank sent or received, without headers."""
    sent = max(
        ledger.total().sent_parts.index + ledger.total().sent_parts.value
        for ledger in simulation.ledgers
    )
    received = max(
        ledger.total().received - HEADER_BYTES * blocks(ledger) for ledger in simulation.ledgers
    )
    return max(sent, received) / WORD_BYTES


def blocks(ledger):
    """Return the number of headers that a rank received; on average, ranks sent equally many."""
    return ledger.total().sent_parts.header / HEADER_BYTES


def messages(simulation):
    return max(ledger.total().messages_sent for ledger in simulation.ledgers)


def log2(world_size):
    return (world_size - 1).bit_length()


def job(world_size, overlap):
    return Job(SIZE, K, world_size, result=K if overlap == "full" else K * world_size)


@cache
def sparse(collective):
    return lambda: collective(StreamCodec(factor=None))


def published_dsar():
    return Dynamic(always_dense=True)


@pytest.mark.parametrize("world_size", POWERS)
@pytest.mark.parametrize("overlap", ["full", "none"])
def test_recursive_doubling_takes_log_p_rounds_and_k_entries_or_twice_as_many_in_each(
    overlap, world_size
):
    simulation = reduce(sparse(RecursiveDoubling), world_size, overlap)
    lower, upper = 2 * K * log2(world_size), 2 * K * (world_size - 1)
    assert entry_words(simulation) == (lower if overlap == "full" else upper)
    assert messages(simulation) == log2(world_size)
    form = RecursiveDoubling().cost(job(world_size, overlap))
    assert simulation.seconds == pytest.approx(form.seconds(LINKS.alpha, LINKS.beta))


@pytest.mark.parametrize("world_size", RANKS)
@pytest.mark.parametrize("overlap", ["full", "none"])
def test_recursive_doubling_on_any_p_costs_one_fold_and_one_hand_back_more(overlap, world_size):
    simulation = reduce(sparse(RecursiveDoubling), world_size, overlap)
    form = RecursiveDoubling().cost(job(world_size, overlap))
    assert messages(simulation) == form.messages
    busiest = max(max(t.total().sent, t.total().received) for t in simulation.ledgers)
    assert busiest <= form.nbytes * (1 + 1e-9) + K * 8  # the fold is received, not sent
    assert simulation.seconds >= log2(world_size) * LINKS.alpha


@pytest.mark.parametrize("world_size", RANKS)
@pytest.mark.parametrize("overlap", ["full", "none"])
def test_split_allgather_stays_within_its_interval(overlap, world_size):
    simulation = reduce(sparse(split_allgather), world_size, overlap)
    lower, upper = 2 * lower_bound_words(K, world_size), 2 * K * world_size
    assert lower * 0.99 <= entry_words(simulation) <= upper
    if overlap == "full" and K % world_size == 0:
        assert entry_words(simulation) == pytest.approx(lower)
    counted = messages(simulation)  # SparCML's P - 1 + log2 P, not Ok-Topk's Table 1
    assert counted == world_size - 1 + log2(world_size) < world_size + 2 * log2(world_size)
    least = LINKS.alpha * log2(world_size) + LINKS.beta * WORD_BYTES * lower
    assert least <= simulation.seconds


@pytest.mark.parametrize("world_size", RANKS)
@pytest.mark.parametrize("overlap", ["full", "none"])
def test_dsar_stays_within_its_interval(overlap, world_size):
    """``(P - 1) / P N <= words <= 2 k + (P - 1) / P N``, with the dense part as published."""
    simulation = reduce(published_dsar, world_size, overlap)
    dense = SIZE * (world_size - 1) / world_size
    assert all(isinstance(total, DenseVector) for total in simulation.results)
    assert dense * 0.999 <= entry_words(simulation) <= 2 * K + dense + world_size
    assert messages(simulation) == world_size - 1 + log2(world_size)


@pytest.mark.parametrize("world_size", RANKS)
@pytest.mark.parametrize("overlap", ["full", "none"])
def test_topkdsa_stays_within_table_1(overlap, world_size):
    """The bounds are ``[4 k (P - 1) / P, (2 k + n) (P - 1) / P]``: sparse as long as it is shorter."""
    simulation = reduce(Dynamic, world_size, overlap)
    lower = 2 * lower_bound_words(K, world_size)
    upper = (2 * K + SIZE) * (world_size - 1) / world_size
    assert lower * 0.99 <= entry_words(simulation) <= upper
    assert messages(simulation) <= world_size + 2 * log2(world_size)


def test_topkdsa_switches_to_dense_exactly_beyond_delta():
    """A region of n / P elements turns dense with its (delta + 1)-th entry."""
    world_size, width = 4, 100
    size = world_size * width
    most = width // 2  # delta: an index takes as many bytes as a value

    def total(entries):
        async def program(comm):
            indices = torch.arange(entries) + comm.rank * 0
            mine = SparseVector(indices, torch.ones(entries), size)
            return (await Dynamic().reduce(comm, mine, entries, step=0)).total

        return simulate(program, world_size).results[0]

    assert isinstance(total(most), SparseVector)
    assert isinstance(total(most + 1), DenseVector)


@pytest.mark.parametrize("world_size", RANKS)
@pytest.mark.parametrize("overlap", ["full", "none"])
def test_no_collective_beats_lemma_5_1(overlap, world_size):
    """Lemma 5.1 counts only values: ``(P - 1) k`` if disjoint, ``2 k (P - 1) / P`` if equal."""
    bound = lemma_5_1_words(K, world_size, disjoint=overlap == "none")
    for collective in (RecursiveDoubling, split_allgather, Ring):
        simulation = reduce(sparse(collective), world_size, overlap)
        # the largest number of words that a rank sent or received; half of them are values
        assert entry_words(simulation) / 2 >= bound * 0.99, collective.__name__
        assert simulation.seconds >= log2(world_size) * LINKS.alpha + bound * 0.99 * WORD_BYTES * (
            LINKS.beta
        )


def test_lemma_5_2_counts_indices():
    """Two ranks with disjoint entries receive fewer values than delta, but more words."""
    size, k = 10_000, 2_600

    async def program(comm):
        mine = torch.zeros(size)
        mine[comm.rank * k : (comm.rank + 1) * k] = 1.0
        await RecursiveDoubling().reduce(comm, SparseVector.from_dense(mine), k, step=0)
        parts = comm.ledger.total().sent_parts  # the other rank receives them
        return parts.value / WORD_BYTES, (parts.value + parts.index) / WORD_BYTES

    delta = sum_bound_words(Job(size, k, 2, result=2 * k))
    for values, words in simulate(program, 2).results:
        assert values == lemma_5_1_words(k, 2, disjoint=True) == 2_600
        assert values < delta == 5_000 < words == 5_200


@pytest.mark.parametrize("world_size", POWERS)
def test_dense_results_cannot_beat_lemma_5_2(world_size):
    """Once the result exceeds delta, delta words must be received."""
    size = 4 * K
    bound = sum_bound_words(Job(size, size, world_size))
    assert bound == size // 2  # delta of four-byte values

    async def program(comm):
        generator = torch.Generator().manual_seed(comm.rank)
        dense = torch.randn(size, generator=generator)
        mine = SparseVector.from_dense(dense)
        return (await Dynamic(always_dense=True).reduce(comm, mine, size, step=0)).total

    simulation = simulate(program, world_size, links=LINKS)
    received = max(ledger.total().received for ledger in simulation.ledgers)
    assert received / WORD_BYTES >= bound
    assert simulation.seconds >= LINKS.alpha * log2(world_size) + bound * WORD_BYTES * LINKS.beta


@pytest.mark.parametrize("world_size", POWERS[2:])  # the paper assumes P > 4
def test_small_results_are_faster_by_doubling_and_large_ones_by_splitting(world_size):
    """Section 8.1: the winner depends on the ratio of latency to bandwidth."""
    small = [
        reduce(sparse(c), world_size, "full").seconds for c in (RecursiveDoubling, split_allgather)
    ]
    assert small[0] < small[1]
    large = [
        c().cost(Job(10**8, 200_000, world_size, result=200_000)).seconds(LINKS.alpha, LINKS.beta)
        for c in (RecursiveDoubling, split_allgather)
    ]
    assert large[1] < large[0]
