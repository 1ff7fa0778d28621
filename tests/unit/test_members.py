"""Test that groups that change at any time lose no step and count none twice."""

import math
from collections import Counter

import pytest
import torch

from sparsync.elastic.members import Entry, Members, judge
from sparsync.errors import CheckpointError
from sparsync.feedback.reducer import Reducer
from sparsync.presets import PRESETS
from sparsync.units import plan_units
from tests.tables import cases

from .changing_world import World

FRESH = Entry(0, 77, 0, 0, 0, 1)


@pytest.mark.fast(8)
@pytest.mark.parametrize("name", PRESETS)
def test_nothing_is_lost_and_nothing_counts_twice(name):
    assert sum(World(seed, name).run() for seed in range(6)) > 6


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_nothing_is_lost_in_many_more_orders(name):
    """For more orders, run ``python -m tests.unit.changing_world PRESET FIRST LAST``."""
    assert sum(World(seed, name).run() for seed in range(6, 72)) > 72


def test_members_return_from_absences_as_stale_and_as_current():
    returned = Counter()
    for seed in range(40):
        world = World(seed, "budgeted", change=0, leaving=0, absence=0.01)
        world.run()
        returned += world.returned
    assert returned["stale"] > 10 and returned["current"] > 10, returned


@pytest.mark.parametrize("name", ["budgeted", "dense", "quantised"])
def test_a_step_that_one_rank_applied_alone_is_taken_back(name):
    forks = 0
    for seed in range(40):
        world = World(seed, name, steps=6, alone=0.5, absence=0.01)
        world.run()
        forks += world.forks
    assert forks > 0


@pytest.mark.parametrize("size", [48, 5])  # of 5, a rank gets one or two elements
def test_residuals_are_dealt_by_those_that_leave(size):
    worlds = [World(seed, "budgeted", change=0, leaving=0.15, size=size) for seed in range(20)]
    assert sum(world.run() for world in worlds) > 20
    assert sum(world.withdrawn for world in worlds) > 5


@cases(
    ([FRESH, FRESH], 0, {0, 1}, set(), set()),
    ([FRESH._replace(history=5), FRESH, FRESH], 0, {1, 2}, set(), {0}),
    ([FRESH._replace(history=5), FRESH], 0, {0}, set(), {1}),
    ([FRESH, FRESH._replace(step=9, history=3)], 9, {1}, set(), {0}),
    # one rank has committed the step for which another is prepared; a third rank was prepared
    # for it in an earlier group
    ([Entry(4, 2, 3, 0, 0, 1), Entry(5, 3, 0, 0, 0, 1)], 5, {0, 1}, {0}, set()),
    ([Entry(4, 2, 2, 0, 0, 1), Entry(5, 3, 0, 0, 0, 1)], 5, {1}, set(), {0}),
    # the rank that has committed is behind, so its history counts but its weights do not
    ([Entry(4, 2, 3, 0, 0, 1), Entry(5, 3, 0, 1, 0, 1)], 5, {0}, {0}, set()),
    ([Entry(4, 2, 0, 0, 0, 1), Entry(5, 3, 0, 1, 0, 1)], 4, {0}, set(), {1}),
    # one rank has applied a step that the others repeated in a later group
    ([Entry(5, 3, 0, 0, 0, 1, 0, 6), Entry(5, 4, 0, 0, 0, 1, 0, 7)], 5, {1}, set(), {0}),
    ([Entry(5, 3, 0, 0, 0, 1, 0, 6), Entry(4, 2, 0, 0, 0, 1, 0, 7)], 4, {1}, set(), {0}),
    # one rank has trained on alone, so its history is longer than that of any equal ranks
    ([Entry(6, 3, 0, 0, 0, 1, 0, 6), Entry(4, 2, 0, 0, 0, 1, 0, 7)], 6, {0}, set(), {1}),
)
def test_the_furthest_step_of_the_latest_group_with_whole_weights_holds(
    entries, step, current, commits, stale
):
    verdict = judge(entries)
    found = verdict.step, set(verdict.current), set(verdict.commits), set(verdict.stale)
    assert found == (step, current, commits, stale)
    assert verdict.donor == min(current)


def test_weights_come_from_a_rank_that_stays_if_there_is_one():
    leaves = Entry(4, 2, 0, 0, 1, 1)
    assert judge([leaves, leaves._replace(leaves=0), FRESH]).donor == 1
    assert judge([FRESH, leaves, leaves._replace(leaves=2)]).donor == 1


@cases([Entry(5, 3, 0, 1, 0, 1)], [Entry(5, 3, 0, 1, 0, 1), FRESH], [FRESH._replace(behind=1)])
def test_fresh_weights_do_not_take_the_place_of_lost_ones(entries):
    with pytest.raises(CheckpointError, match=r"rank.* had the weights of exchange . are gone"):
        judge(entries)


@pytest.mark.parametrize("units", [1, 3])
def test_a_rank_that_is_set_up_otherwise_is_told_so(units):
    """However many units the model has there, all ranks call the roll on the same channel."""
    world = World(3, "budgeted", ranks=3, change=0, leaving=0)
    its, views = world.members[1], [(f"w{part}", torch.zeros(48 // units)) for part in range(units)]
    parts = plan_units(views, unit_bytes=4 * 48 // units)
    assert len(parts) == units
    its.reducer = Reducer(its.ends, parts, world.algorithm, world.density, changing=True)
    its.members = Members(its.reducer, start=1, set_up=5)
    said = r"is set up differently from rank . and those that continue with it"
    with pytest.raises(ValueError, match=said):
        world.run()


def test_a_rank_that_ends_with_other_buffers_is_told_so():
    world = World(3, "budgeted", ranks=3, change=0, leaving=0, absence=0, alone=0)
    its = world.members[1].members
    equalise = its.equalise
    its.equalise = lambda tensors: equalise({**tensors, "more": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"rank . ends with other buffers than the others"):
        world.run()


def test_what_has_changed_is_told():
    world = World(9, "budgeted", change=0.01)
    everyone = list(world.members.values())
    assert world.run() >= 3
    died = back = 0
    for member in everyone:
        state = member.members.state()
        changes, ranks, away = state["changes"], 0, 0
        for change in changes:
            ranks += change["came"] - change["left"] - change["died"]
            died += change["died"]
            back += change["back"]
            away += change["died"] - change["back"]
            assert change["ranks"] == ranks and away >= 0 and change["back"] <= change["came"]
            assert (change["lost_norm"] > 0) <= (change["died"] > 0)
        assert state["lost_norm"] <= math.hypot(*(change["lost_norm"] for change in changes))
        assert (state["lost_norm"] > 0) <= (away > 0)
    assert died > 0 and back > 0
