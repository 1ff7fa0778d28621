"""Test how Ok-Topk splits, its extreme case, and how it rotates destinations (section 3.1.1)."""

from itertools import pairwise

import pytest
import torch

from sparsync.cli.bench.inputs import Draw, gradient
from sparsync.published.oktopk import allreduce as forms
from sparsync.published.oktopk import oktopk
from sparsync.published.oktopk.regions import Writer, schedule, split_reduce
from sparsync.selection import Exact
from sparsync.sparse import SparseVector, even_boundaries
from sparsync.testing.cases import within
from sparsync.transports.sim import Links, simulate
from sparsync.wire import Coo

from .measured import (
    ADVERSARIAL,
    EXCHANGEABLE,
    RANKS,
    WORDS_PER_ENTRY,
    entry_words_received,
    entry_words_sent,
    k_for,
    phase,
    steps,
)


@pytest.mark.fast(8)
@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("kind", EXCHANGEABLE + ADVERSARIAL)
def test_no_rank_sends_more_than_2k_when_splitting(kind, world_size):
    """Whether or not regions are balanced, an entry has one owner and is sent at most once."""
    for balanced in (True, False):
        for simulation in steps(oktopk(balanced_split=balanced), world_size, kind, 2):
            sent = max(entry_words_sent(t) for t in phase(simulation, "split"))
            assert sent <= WORDS_PER_ENTRY * k_for(world_size)


@pytest.mark.parametrize("world_size", RANKS)
def test_without_balanced_regions_worker_0_receives_2k_from_everyone(world_size):
    """ "Worker 0 has to receive a total of 2(P - 1)k ... while the others receive zero." """
    (simulation,) = steps(oktopk(balanced_split=False), world_size, "one-region", 1)
    received = [entry_words_received(t, t.messages_received) for t in phase(simulation, "split")]
    assert received[0] == WORDS_PER_ENTRY * (world_size - 1) * k_for(world_size)
    assert set(received[1:]) == {0}


@pytest.mark.parametrize("world_size", RANKS)
@pytest.mark.parametrize("kind", ["one-region", "clustered"])
def test_balanced_regions_receive_equation_1(kind, world_size):
    """ "Each worker approximately receives 2k/P elements from any of the other P - 1 workers." """
    (simulation,) = steps("oktopk", world_size, kind, 1)
    form = forms.split_cost(k_for(world_size), world_size)
    traffic = phase(simulation, "split")
    assert max(t.received for t in traffic) <= form.nbytes * (1 + 1 / 8)  # cuts are 1/16 fine
    assert {t.messages_sent for t in traffic} == {form.messages}


@pytest.mark.parametrize("world_size", [2, 3, 8, 13])
def test_rotated_destinations_are_distinct_in_every_turn(world_size):
    """Figure 2b shows rotation; without it (Figure 2a), all other ranks send to rank i in turn i."""
    turns = list(
        zip(*(schedule(r, world_size, rotate=True) for r in range(world_size)), strict=True)
    )
    for turn in turns:
        assert len({dest for dest, _ in turn}) == world_size
    for rank in range(world_size):
        assert [dest for dest, _ in schedule(rank, world_size, rotate=False)] == [
            peer for peer in range(world_size) if peer != rank
        ]


def splits(world_size, kind="uniform", *, buckets, rotate=True, gamma=0.0):
    """Return every rank's entries, its reduced region, and the time of the reduction."""
    k, size = k_for(world_size), 32 * k_for(world_size)
    boundaries = even_boundaries(size, world_size)
    selected = [
        Exact().select(gradient(kind, Draw(size, world_size, rank, 0, 0)), k, 0)
        for rank in range(world_size)
    ]

    async def program(comm):
        mine = selected[comm.rank]
        writer = Writer(Coo(), comm, mine)
        share = await split_reduce(
            comm, mine, boundaries, writer, most=k, buckets=buckets, rotate=rotate
        )
        return share.region, comm.now

    links = Links(alpha=50e-6, beta=8e-9, gamma=gamma)
    regions, times = zip(*simulate(program, world_size, links=links).results, strict=True)
    pieces = [mine.split(boundaries) for mine in selected]
    return pieces, regions, times


def split_times(world_size, kind="uniform", **options):
    return splits(world_size, kind, **options)[2]


@pytest.mark.parametrize("buckets", [1, 2, 99])
def test_rotation_removes_endpoint_hotspot(buckets):
    """ "All workers send data to worker i at step i, which may lead to endpoint congestion."

    Ranks are single-ported, with 50 us, 1 Gbit/s and uniform input. Rotation is faster, and its
    gain grows with the number of ranks. With as many buckets as messages, two of them in flight, it
    is 2.2 times as fast on 32 ranks.
    """
    gains = []
    for world_size in (8, 16, 32):
        rotated = max(split_times(world_size, buckets=buckets, rotate=True))
        congested = max(split_times(world_size, buckets=buckets, rotate=False))
        gains.append(congested / rotated)
    assert gains[0] > 1.5
    assert all(after > before for before, after in pairwise(gains))
    assert gains[-1] < 3


@pytest.mark.parametrize("rotate", [True, False])
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_regions_are_folded_in_the_order_of_the_turns(world_size, rotate):
    """The fold starts with rank r's own share, then r - 1, r - 2, ... (without rotation: 0, 1, 2, ...).

    Up to rounding, it equals the sum in rank order. The number of buckets does
    not change a single bit.
    """
    for kind in ("uniform", "overlapping"):
        runs = [
            splits(world_size, kind, buckets=buckets, rotate=rotate, gamma=2e-9)
            for buckets in (1, 2, 3, 99)
        ]
        for rank, region in enumerate(runs[0][1]):
            shares = [pieces[rank] for pieces in runs[0][0]]
            turns = [source for _, source in schedule(rank, world_size, rotate=rotate)]
            expected = SparseVector.merge([shares[source] for source in (rank, *turns)])
            same_bits(region, expected)
            for _, others, _ in runs[1:]:
                same_bits(others[rank], expected)
            in_rank_order = SparseVector.merge(shares).to_dense()
            scale = torch.stack([share.to_dense() for share in shares]).abs().sum(0)
            assert within(expected.to_dense() - in_rank_order, scale, world_size)


def same_bits(one, other):
    assert torch.equal(one.indices, other.indices)
    assert torch.equal(one.values.view(torch.int32), other.values.view(torch.int32))


COSTLY = 2e-9  # seconds per byte reduced: six times the C++ kernel's


@pytest.mark.parametrize("kind", ["uniform", "overlapping"])
@pytest.mark.parametrize("world_size", [16, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("gamma", [0.0, 0.3e-9, COSTLY])
def test_two_buckets_are_never_slower_than_none(gamma, world_size, kind):
    without = max(split_times(world_size, kind, buckets=1, gamma=gamma))
    bucketed = max(split_times(world_size, kind, buckets=2, gamma=gamma))
    assert bucketed <= without * (1 + 1e-9)
    if gamma == COSTLY and kind == "overlapping":
        assert bucketed < 0.95 * without


def test_buckets_overlap_reduction_with_communication():
    """ "Communications in the current bucket can be overlapped with the local reduction of the previous."

    All ranks hide equally much, because the shares of a rank's first bucket are first in its fold.
    Where supports overlap, the sum of a bucket has few entries, and reading it once more costs
    little.
    """
    world_size = 16

    def exposed(buckets):
        """Return the seconds that the reduction adds to each rank's time."""
        still = split_times(world_size, "overlapping", buckets=buckets)
        working = split_times(world_size, "overlapping", buckets=buckets, gamma=COSTLY)
        return [b - a for a, b in zip(still, working, strict=True)]

    everything, bucketed = exposed(buckets=1), exposed(buckets=2)
    hidden = [1 - w / e for w, e in zip(bucketed, everything, strict=True)]
    assert min(hidden) > 0.15
    assert max(hidden) < 0.35
