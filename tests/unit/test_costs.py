"""Closed forms by hand-computed tables; ``tests/claims`` compares them with what is measured."""

import pytest

from sparsync.planning import costs
from sparsync.planning.costs import Cost


def test_costs_add_up_and_convert():
    cost = Cost(2, 800) + Cost(3, 400)
    assert cost == Cost(5, 1200)
    assert (cost.words, cost.words_per(100), cost.words_per(0)) == (300, 3, 0)
    assert cost.seconds(alpha=1e-3, beta=1e-6) == pytest.approx(5e-3 + 1.2e-3)


@pytest.mark.parametrize(
    ("cost", "messages", "nbytes"),
    [
        # two phases of ceil(log2 P) messages; 2 (P - 1) blocks of ceil(n / P) elements
        (costs.dense(1000, 4), 4, 2 * 3 * 250 * 4),
        (costs.dense(1001, 4), 4, 2 * 3 * 251 * 4),
        (costs.dense(1000, 4, element_bytes=8), 4, 2 * 3 * 250 * 8),
        (costs.dense(1000, 5), 6, 2 * 4 * 200 * 4),
        # P - 1 messages' worth of header (8) and k entries (8 each)
        (costs.allgather(100, 4), 2, 3 * 808),
        (costs.allgather(100, 7), 3, 6 * 808),
        # Equation 1
        (costs.split(100, 4), 3, 3 * (8 + 200)),
        # Equation 2, even and extreme
        (costs.balance_and_allgatherv(100, 4), 2, 3 * (8 + 200)),
        (costs.balance_and_allgatherv(100, 8, balanced=True), 7 + 1 + 3, 8 * 8 + 800),
        # Equation 3
        (costs.equation_3(100, 8), 2 * 8 + 2 * 3, 4 * 6 * 100 * 7 / 8),
        # clamp(k / 16, 32, 1024) bins and two outer ones, in blocks of ceil(m / P)
        (costs.histogram(16, 2), 2, 2 * 17 * 4),
        (costs.histogram(1600, 2), 2, 2 * 51 * 4),
        (costs.histogram(10**6, 2), 2, 2 * 513 * 4),
        (costs.histogram(16, 2, refinements=2), 6, 2 * (17 + 32 + 32) * 4),
    ],
)
def test_one_call(cost, messages, nbytes):
    assert cost == Cost(messages, nbytes)


def test_oktopk_is_the_sum_of_its_phases():
    k, p = 1600, 8
    parts = [
        costs.split(k, p),
        costs.histogram(k, p, refinements=1),
        costs.allgatherv(24, p),
        costs.histogram(k, p),
        costs.balance_and_allgatherv(k, p),
    ]
    whole = costs.oktopk(k, p, repartition=True, refinements=1)
    assert whole == sum(parts, Cost(0, 0))
    assert costs.oktopk(k, p, balanced=True).nbytes > costs.oktopk(k, p).nbytes


def test_oktopk_paper_is_the_sum_of_its_phases():
    p = 4
    reused = costs.oktopk_paper(selected=1200, kept=900, world_size=p)
    assert reused == Cost(3, 3 * (8 + 2400)) + Cost(2, 3 * 16) + Cost(2, 3 * (8 + 1800))
    exact = costs.oktopk_paper(1000, 1000, p, reduced=3000, repartition=True)
    more = Cost(2, 3 * (8 + 6000)) + Cost(4, 2 * 3 * 1 * 8)
    assert exact == costs.oktopk_paper(1000, 1000, p) + more


@pytest.mark.parametrize(
    ("world_size", "lower", "exchangeable", "any_input"),
    [
        (1, 0, 0, 0),
        (2, 1, 3, 4),
        (4, 1.5, 4.5, 5),
        (8, 1.75, 5.25, 5.5),
        (32, 1.9375, 5.8125, 5.875),
    ],
)
def test_bounds_in_words_per_k(world_size, lower, exchangeable, any_input):
    k = 1000
    assert costs.lower_bound_words(k, world_size) == k * lower
    for expected, kind in ((exchangeable, True), (any_input, False)):
        bound = costs.oktopk_bound_words(k, world_size, exchangeable=kind)
        assert bound == pytest.approx(k * expected)


@pytest.mark.parametrize(
    "cost",
    [
        costs.dense(1000, 1),
        costs.allgather(100, 1),
        costs.split(100, 1),
        costs.histogram(100, 1, refinements=3),
        costs.balance_and_allgatherv(100, 1),
        costs.balance_and_allgatherv(100, 1, balanced=True),
        costs.oktopk(100, 1, repartition=True, balanced=True),
        costs.oktopk_paper(100, 100, 1, reduced=100, repartition=True),
    ],
)
def test_one_rank_sends_nothing(cost):
    assert cost == Cost(0, 0)


@pytest.mark.parametrize("world_size", [2, 3, 4, 8, 16, 32, 100])
@pytest.mark.parametrize("k", [100_000, 1_000_000])
def test_the_forms_lie_between_their_bounds(k, world_size):
    words = costs.oktopk(k, world_size, repartition=True, refinements=3).words
    assert costs.lower_bound_words(k, world_size) < words
    assert words < costs.oktopk_bound_words(k, world_size, exchangeable=True)
