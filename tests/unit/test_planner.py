"""Test which algorithm a plan chooses, its limits of bandwidth and density, and corrections."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsync.cost import planner
from sparsync.cost.machine import Machine
from sparsync.errors import ConfigurationError
from sparsync.presets import candidates, resolve
from tests.tables import cases, refuses

VGG, BERT = 14_728_266, 133_547_324
GIGABIT = Machine(alpha=50e-6, beta=8e-9)
FAST = Machine(alpha=1e-6, beta=8e-12)
ALL = [c.name for c in candidates(planned=False)]
PLANNED = [c.name for c in candidates()]


def plan(size, world_size, machine, names=PLANNED, **more):
    return planner.plan(size, world_size, machine, [resolve(n) for n in names], **more)


def test_budgeted_wins_by_far_on_slow_links():
    made = plan(VGG, 8, GIGABIT, density=0.01)
    assert made.choice == made.table[0].collective == "budgeted"
    assert made.dense.seconds > 20 * made.table[0].seconds
    assert made.why.startswith("budgeted wins here: ") and "against dense's 8" in made.why
    assert [p.seconds for p in made.table] == sorted(p.seconds for p in made.table)
    assert {p.collective for p in made.table} == set(PLANNED)


@pytest.mark.parametrize("density", [0.01, 0.5])
def test_dense_wins_on_fast_links(density):
    made = plan(1_000_000, 2, FAST, density=density)
    assert made.choice == "dense"
    assert made.why.startswith("dense wins here: ") and "sparse would win below" in made.why
    assert made.break_even_bandwidth < 1 / FAST.beta


@pytest.mark.parametrize("ranks", [2, 4, 32])
def test_messages_that_leave_together_share_the_way(ranks):
    """On distant links, only rounds count: two for ``budgeted``, 2 log P for ``halving``."""
    near = Machine(alpha=50e-6, beta=8e-8)
    far = replace(near, alpha=near.alpha + 0.04, distance=0.04)
    for name, rounds in (("budgeted", 2), ("quantised", 2), ("halving", 2 * math.log2(ranks))):
        times = [plan(VGG, ranks, on, [name], density=0.01).table[0].seconds for on in (near, far)]
        assert times[1] - times[0] == pytest.approx(0.04 * rounds), name
    with pytest.raises(ConfigurationError, match=r"distance is 0.1; give at most alpha"):
        Machine(alpha=0.01, distance=0.1)


@settings(max_examples=10, deadline=None)
@given(
    size=st.integers(10**4, 10**9),
    world_size=st.integers(2, 512),
    density=st.floats(1e-4, 0.5),
    compute=st.sampled_from([None, 0.05]),
)
def test_the_choice_turns_at_the_break_even_bandwidth(size, world_size, density, compute):
    more = {"density": density, "compute": compute}
    limit = plan(size, world_size, GIGABIT, **more).break_even_bandwidth

    def choice(rate):
        return plan(size, world_size, replace(GIGABIT, beta=1 / rate), **more).choice

    if limit is None:
        assert choice(1e15) != "dense"
    elif limit:
        assert choice(0.99 * limit) != "dense" == choice(1.01 * limit)
    else:
        assert choice(1.0) == "dense"


@pytest.mark.parametrize("size", [1_000_000, BERT])
def test_the_choice_turns_at_the_break_even_density(size):
    machine = Machine(alpha=20e-6, beta=0.8e-9)
    limit = plan(size, 32, machine).break_even_density
    assert 0.01 < limit < 1
    assert plan(size, 32, machine, density=0.99 * limit).choice != "dense"
    assert plan(size, 32, machine, density=1.01 * limit).choice == "dense"


def test_where_one_side_always_wins_there_is_no_break_even():
    slow = plan(VGG, 8, replace(GIGABIT, beta=1e-5))
    assert slow.break_even_density is None and "density" not in slow.why
    idle = replace(GIGABIT, select=0, encode=0, decode=0, gamma=0, alpha=0)
    assert plan(VGG, 8, idle).break_even_bandwidth is None
    hopeless = plan(VGG, 8, replace(GIGABIT, select=1))
    assert hopeless.choice == "dense"
    assert 0 < hopeless.break_even_bandwidth < 1e3  # the wire must take 15 million seconds
    assert plan(VGG, 8, GIGABIT, names=["dense"]).break_even_bandwidth == 0


def test_what_dense_hides_behind_the_backward_pass_is_no_cost():
    alone, beside = plan(BERT, 32, GIGABIT), plan(BERT, 32, GIGABIT, compute=0.9)
    assert beside.dense.seconds_hidden == pytest.approx(0.6)
    assert beside.dense.seconds == pytest.approx(alone.dense.seconds - 0.6)
    assert beside.break_even_bandwidth < alone.break_even_bandwidth
    assert beside.table[0].seconds_hidden == 0  # one unit
    in_units = plan(BERT, 32, GIGABIT, compute=0.9, unit_bytes=1 << 20).table[0]
    assert in_units.seconds_hidden == pytest.approx(in_units.seconds_exchange, rel=0.01)
    assert plan(1_000_000, 32, GIGABIT, compute=0.9).dense.seconds_hidden == 0


def test_a_budget_leaves_those_that_fit():
    made = plan(VGG, 8, GIGABIT, budget_bytes=1e6)
    assert {p.collective for p in made.table} == {"budgeted", "halving"}
    assert made.choice == "budgeted" and made.k > 0.01 * VGG
    assert all(0.9e6 < p.bytes_sent <= 1e6 for p in made.table)
    assert "1 MB against dense's" in made.why and "103 MB" in made.why
    given_k = plan(VGG, 8, GIGABIT, density=0.01, budget_bytes=8.5e6)
    assert given_k.k == 147_283
    fit = {"budgeted", "halving", "oktopk", "allgather", "recursive-doubling"}
    assert {p.collective for p in given_k.table} == fit
    assert plan(VGG, 8, GIGABIT, budget_bytes=1e12).k == VGG
    assert plan(VGG, 8, GIGABIT, budget_bytes=1e12, names=["dense", "quantised"]).k == VGG


def test_a_budget_that_nothing_fits_is_refused():
    with pytest.raises(ConfigurationError, match=r"within 10 B per step; the least is .* B with"):
        plan(VGG, 8, GIGABIT, budget_bytes=10)
    with pytest.raises(ConfigurationError, match="give a larger budget"):
        plan(VGG, 8, GIGABIT, density=0.5, budget_bytes=1e6)


@cases((1000, 1, "one rank has nobody"), (0, 4, "nothing to exchange"), (0, 1, "nothing to"))
def test_nothing_to_exchange_is_said(size, world_size, words):
    made = plan(size, world_size, GIGABIT)
    assert made.choice == "dense" and words in made.why
    assert made.break_even_bandwidth == made.break_even_density == 0


@pytest.mark.parametrize("world_size", [1, 2, 7])
@pytest.mark.parametrize("more", [{"k": 0}, {"k": 10**9}, {"density": 1.0}, {"compute": 0.0}])
def test_extremes_are_planned(world_size, more):
    for machine in (GIGABIT, replace(GIGABIT, beta=0), replace(GIGABIT, alpha=0)):
        made = plan(1000, world_size, machine, names=ALL, **more)
        assert len(made.table) == len(ALL) and made.k <= 1000
        assert all(math.isfinite(p.seconds) for p in made.table)


@refuses(
    ({"density": 0.1, "k": 3}, "give one of them"),
    ({"density": 0.0}, "density is 0.0"),
    ({"density": 1.5}, "density is 1.5"),
    ({"k": -1}, "k is -1"),
    ({"budget_bytes": 0}, "budget_bytes is 0"),
    ({"compute": -1.0}, "compute is -1.0"),
    ({"compute": math.nan}, "compute is nan"),
    ({"names": []}, "no candidates"),
    ({"names": ["auto"]}, "the cost of 'auto' is unknown"),
    ({"world_size": 0}, "world_size is 0"),
    ({"size": -1}, "size is -1"),
)
def test_bad_arguments_are_refused(more):
    plan(**{"size": 100, "world_size": 2, "machine": GIGABIT, **more})
