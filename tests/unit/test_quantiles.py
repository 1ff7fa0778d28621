from bisect import bisect_left

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsync import simulate
from sparsync.collectives.regions import REFINING_BINS, Bracket, quantiles


def bracket_on_all_ranks(shares, positions, *, stop, bins=8, tolerance=1, start_at=None):
    """Run ``quantiles`` with each rank's keys; check what every rank must agree on."""

    async def program(comm):
        keys = torch.tensor(sorted(shares[comm.rank]), dtype=torch.int64)
        return await quantiles(
            comm,
            keys,
            lambda total: positions,
            stop=stop,
            bins=bins,
            tolerance=lambda total: tolerance,
            start_at=start_at,
            count_limit=1 << 20,
            phase="quantiles",
        )

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
    return (
        shares,
        positions,
        {
            "stop": stop,
            "start_at": start_at,
            "bins": draw(st.sampled_from([2, 8, 64])),
            "tolerance": draw(st.integers(1, 5)),
        },
    )


@settings(max_examples=60)
@given(problems())
def test_brackets_hold_the_wanted_order_statistics(problem):
    shares, positions, options = problem
    bracket_on_all_ranks(shares, positions, **options)


def test_a_vector_without_elements_has_no_keys():
    bracket_on_all_ranks([[], []], [0, 1], stop=0)


def test_equal_float_magnitudes_take_few_rounds():
    """Refining divides 2^31 keys by 64 per round: 6 rounds tell even neighbours apart."""
    stop, key = 1 << 31, 0x3F800000
    shares = [[key, key + 1] * 50, [key + 2] * 50]
    ledger = bracket_on_all_ranks(shares, [75], stop=stop, bins=REFINING_BINS).ledgers[0]
    assert ledger.total().messages_sent <= 2 * 6


def test_a_good_start_saves_rounds():
    shares = [[k * 1000 for k in range(500)], [k * 1000 + 7 for k in range(500)]]
    searched = bracket_on_all_ranks(shares, [500], stop=1 << 31, bins=64)
    known = bracket_on_all_ranks(shares, [500], stop=1 << 31, bins=64, start_at=(250_000, 250_050))
    assert known.ledgers[0].total().sent < searched.ledgers[0].total().sent
