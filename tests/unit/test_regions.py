"""Test how regions are cut, scheduled and balanced, and the quantiles of keys over all ranks."""

from bisect import bisect_left
from functools import partial
from itertools import accumulate, pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsync import simulate
from sparsync.published.oktopk import regions
from sparsync.published.oktopk.regions import REFINING_BINS, Bracket, quantiles
from sparsync.transports.ledger import Raw

counts_of_ranks = st.lists(st.integers(0, 50), min_size=1, max_size=12)
world_sizes = st.integers(1, 17)


@st.composite
def counts_and_targets(draw):
    counts = draw(counts_of_ranks)
    total = sum(counts)
    cuts = len(counts) - 1
    inner = draw(st.lists(st.integers(0, total), min_size=cuts, max_size=cuts))
    return counts, [b - a for a, b in pairwise([0, *sorted(inner), total])]


@given(st.integers(0, 1000), world_sizes)
def test_even_boundaries_differ_by_at_most_one(size, parts):
    boundaries = regions.even_boundaries(size, parts)
    widths = [b - a for a, b in pairwise(boundaries)]
    assert (boundaries[0], boundaries[-1], len(widths)) == (0, size, parts)
    assert max(widths) - min(widths) <= 1


@given(st.sets(st.integers(0, 99), max_size=40), world_sizes)
def test_equal_count_cuts_leave_equally_many_in_every_region(chosen, parts):
    indices = sorted(chosen)
    cuts = regions.equal_count_cuts(indices, 100, parts)
    assert len(cuts) == parts - 1
    held = [sum(a <= i < b for i in indices) for a, b in pairwise([0, *cuts, 100])]
    assert sum(held) == len(indices)
    assert max(held) - min(held) <= 1


@given(world_sizes, st.booleans())
def test_schedule_gives_every_message_its_turn(world_size, rotate):
    turns = [list(regions.schedule(r, world_size, rotate=rotate)) for r in range(world_size)]
    for rank, mine in enumerate(turns):
        others = [r for r in range(world_size) if r != rank]
        assert sorted(dest for dest, _ in mine) == sorted(source for _, source in mine) == others
    for turn in range(world_size - 1):
        # turns are paired: if r sends to d in a turn, d expects r's message in the same turn
        if rotate:
            for rank in range(world_size):
                dest, _ = turns[rank][turn]
                assert turns[dest][turn][1] == rank


@given(counts_and_targets())
def test_balance_plan_reaches_the_targets_and_keeps_the_order(drawn):
    counts, targets = drawn
    entries = [(rank, i) for rank, count in enumerate(counts) for i in range(count)]
    arrived: list[list[tuple[int, int]]] = [[] for _ in counts]
    plan = list(regions.balance_plan(counts, targets))
    for source, dest, start, moved in sorted(plan):  # as the receiver joins its pieces
        assert moved > 0
        held = [(source, i) for i in range(counts[source])]
        arrived[dest] += held[start : start + moved]
    assert [len(a) for a in arrived] == targets
    assert [entry for a in arrived for entry in a] == entries
    assert len(plan) <= 2 * len(counts) - 1


@given(counts_of_ranks, st.sampled_from([1.0, 1.5, 4.0]))
def test_balanced_counts_share_evenly_among_those_that_are_not_overfull(counts, trigger):
    holders = regions.holders(counts, trigger)
    targets = regions.balanced_counts(counts, holders)
    overfull = [count * len(counts) > trigger * sum(counts) for count in counts]
    keepers = [t for t, over in zip(targets, overfull, strict=True) if not over]
    assert sum(targets) == sum(counts)
    assert max(keepers) - min(keepers) <= 1
    assert all(t == 0 for t, over in zip(targets, overfull, strict=True) if over)
    assert holders == [r for r, o in enumerate(overfull) if not o]


@given(counts_and_targets(), st.data())
def test_span_is_the_narrowest_run_of_regions_that_holds_the_piece(drawn, data):
    counts, targets = drawn
    slack = data.draw(st.lists(st.integers(0, 3), min_size=len(counts), max_size=len(counts)))
    boundaries = [0, *accumulate(c + s for c, s in zip(counts, slack, strict=True))]
    owners = [rank for rank, count in enumerate(counts) for _ in range(count)]
    ends = [0, *accumulate(targets)]
    expected = []
    for piece in range(len(counts)):
        held = owners[ends[piece] : ends[piece + 1]]
        expected.append((boundaries[held[0]], boundaries[held[-1] + 1]) if held else (0, 0))
    assert regions.spans(counts, targets, boundaries) == expected


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9))
def test_dissemination_sends_is_what_the_busiest_rank_really_sends(lengths):
    async def program(comm):
        payload = torch.zeros(lengths[comm.rank], dtype=torch.uint8)
        await comm.allgatherv(payload, lengths, "gather", Raw("value"))

    ledgers = simulate(program, len(lengths)).ledgers
    assert regions.dissemination_sends(lengths) == max(ledger.total().sent for ledger in ledgers)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=9), st.sampled_from([1.0, 1.5, 4.0]))
def test_a_crowded_region_is_one_that_new_cuts_could_relieve(loads, trigger):
    mean = sum(loads) / len(loads)
    assert regions.is_crowded(loads, trigger) == (max(loads) > trigger * mean + 2 * len(loads))
    assert not regions.is_crowded([], trigger)
    assert not regions.is_crowded([loads[0]] * len(loads), trigger)


def bracket_on_all_ranks(shares, positions, *, stop, bins=8, tolerance=1, start_at=None):
    """Run ``quantiles`` with each rank's keys; check that all ranks agree."""

    async def program(comm):
        keys = torch.tensor(sorted(shares[comm.rank]), dtype=torch.int64)
        given = {"stop": stop, "bins": bins, "start_at": start_at, "count_limit": 1 << 20}
        given |= {"tolerance": lambda total: tolerance, "phase": "quantiles"}
        count = partial(torch.searchsorted, keys)
        return await quantiles(comm, count, lambda total: positions, **given)

    simulation = simulate(program, len(shares))
    assert all(result == simulation.results[0] for result in simulation.results)
    union = sorted(key for share in shares for key in share)
    total, brackets = simulation.results[0]
    assert total == len(union)
    assert len(brackets) == len(positions)
    for position, bracket in zip(positions, brackets, strict=True):
        check_bracket(bracket, position, union, tolerance)
    return simulation


def check_bracket(bracket: Bracket, position: int, union: list[int], tolerance: int) -> None:
    low, high = bisect_left(union, bracket.low), bisect_left(union, bracket.high)
    assert (bracket.below, bracket.inside) == (low, high - low)
    if position >= len(union):
        assert (bracket.below, bracket.inside) == (len(union), 0)
        return
    assert bracket.low <= union[position] < bracket.high
    assert bracket.inside <= tolerance or bracket.high - bracket.low == 1


@st.composite
def problems(draw):
    stop = draw(st.sampled_from([1, 2, 50, 1000, 1 << 31, 1 << 40]))
    values = st.one_of(st.integers(0, stop - 1), st.sampled_from([0, stop // 2, stop - 1]))
    share = st.lists(values, max_size=15)
    shares = draw(st.lists(share, min_size=1, max_size=5))
    total = sum(map(len, shares))
    positions = sorted(draw(st.lists(st.integers(0, total + 2), max_size=5)))
    low, high = sorted(draw(st.tuples(st.integers(0, stop), st.integers(0, stop))))
    start_at = draw(st.sampled_from([None, (low, high)])) if low < high else None
    options = {"bins": draw(st.sampled_from([2, 8, 64])), "tolerance": draw(st.integers(1, 5))}
    return shares, positions, {"stop": stop, "start_at": start_at, **options}


@settings(max_examples=60)
@given(problems())
def test_brackets_hold_the_wanted_order_statistics(problem):
    shares, positions, options = problem
    bracket_on_all_ranks(shares, positions, **options)


def test_a_vector_without_elements_has_no_keys():
    bracket_on_all_ranks([[], []], [0, 1], stop=0)


def test_equal_float_magnitudes_take_few_rounds():
    """Each round divides 2^31 keys by 64, so 6 rounds tell even neighbouring keys apart."""
    stop, key = 1 << 31, 0x3F800000
    shares = [[key, key + 1] * 50, [key + 2] * 50]
    ledger = bracket_on_all_ranks(shares, [75], stop=stop, bins=REFINING_BINS).ledgers[0]
    assert ledger.total().messages_sent <= 2 * 6


def test_a_good_start_saves_rounds():
    shares = [[k * 1000 for k in range(500)], [k * 1000 + 7 for k in range(500)]]
    searched = bracket_on_all_ranks(shares, [500], stop=1 << 31, bins=64)
    known = bracket_on_all_ranks(shares, [500], stop=1 << 31, bins=64, start_at=(250_000, 250_050))
    assert known.ledgers[0].total().sent < searched.ledgers[0].total().sent
