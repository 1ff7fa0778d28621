"""Test that updates are weighted by the amounts of data that ranks have seen."""

import copy

import pytest
import torch

from sparsync.errors import ConfigurationError, PeerError
from sparsync.feedback.reducer import Reducer
from sparsync.feedback.reducer_state import parse_state
from sparsync.fields import Fields, check_saved
from sparsync.presets import PRESETS, resolve
from sparsync.transports.sim import simulate
from sparsync.updates import OuterStep
from sparsync.updates.contributions import Contributions, contributions_kind
from sparsync.updates.fragments import Weights
from sparsync.updates.outer_engine import OuterEngine
from tests.tables import cases, refuses

SIZE, RANKS = 96, 4
# samples of each rank in every step; in some steps, one rank, all ranks or all but one have none
SEEN = ([3, 1, 2, 2], [0, 5, 1, 7], [0, 0, 0, 0], [0, 0, 9, 0], [100, 1, 1, 1], [2, 2, 2, 2])


def moves(rank, step):
    """Return how far a rank moves in a step."""
    draw = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(SIZE, generator=draw)


async def begun(comm, parameters=None, weighs=None, **settings):
    """Return weights, and an outer step as ``attach`` would have begun it."""
    given, vector = OuterStep(**settings), torch.zeros(SIZE)
    layout, weights = given.plan(vector, parameters or {"model": vector}), Weights(vector)
    reducer = Reducer(comm, layout.units, await given.chosen.on(comm), given.density)
    return OuterEngine(given, layout, reducer, weights, weighs=weighs), weights


def residual_of(outer):
    """Return the undelivered part of all units."""
    kept = [r.accumulated.clone() if r.value is not None else 0 for r in outer.reducer.residuals]
    units = outer.reducer.units
    return torch.cat([torch.zeros(u.size) + k for u, k in zip(units, kept, strict=True)])


async def one_step(outer, weights, rank, step, seen):
    """Move a rank, count its samples, and exchange."""
    weights.write(slice(0, SIZE), -moves(rank, step), add=True)
    if seen is not None:
        outer.contributions.add(None, seen, None)
    await outer.advance(step)
    outer.steps += 1


def weights_of(seen):
    return [RANKS * n / sum(seen) if sum(seen) else 0.0 for n in seen]


@pytest.mark.fast(14)
@pytest.mark.parametrize("residual", ["weights", "apart"])
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_the_law_holds_with_weights(name, residual):
    """``sum(residual + weight * moved) == total + sum(residual)``, whatever is dropped or rounded."""
    try:
        algorithm = resolve(name)
    except ConfigurationError as error:
        pytest.skip(str(error))

    async def program(comm):
        settings = {"algorithm": algorithm, "density": 0.1, "period": 1, "residual": residual}
        outer, weights = await begun(comm, **settings)
        kept = []
        for step, seen in enumerate(SEEN):
            before, shared = residual_of(outer), outer.memory["shared"].clone()
            await one_step(outer, weights, comm.rank, step, seen[comm.rank])
            lost = sum((one.to_dense() for one in outer.reducer.lost), torch.zeros(SIZE))
            total = RANKS * (shared - outer.memory["shared"])
            kept.append((before, residual_of(outer), total, lost))
        return kept

    ranks = simulate(program, RANKS).results
    for step, seen in enumerate(SEEN):
        weights = weights_of(seen)
        before, after, totals, lost = zip(*(rank[step] for rank in ranks), strict=True)
        assert all(torch.equal(total, totals[0]) for total in totals)
        moved = [weight * moves(rank, step) for rank, weight in enumerate(weights)]
        given, left = sum(before) + sum(moved), totals[0] + sum(after) + sum(lost)
        torch.testing.assert_close(given, left, atol=2e-4, rtol=1e-4)


@cases(
    {"period": 1},
    {"period": 3},
    {"period": 4, "fragments": 2},
    {"period": 3, "delay": 2},
    {"period": 2, "residual": "weights"},
    {"period": 2, "residual": "weights", "algorithm": resolve("quantised", bits=1)},
)
def test_finish_leaves_the_weighted_mean_of_all_steps(settings):
    """Every element is delivered, and the number of samples is the same in every period."""
    numbers, steps = [1.0, 9.0, 0.0, 2.0], 13

    async def program(comm):
        names = {"a": torch.zeros(SIZE // 2), "b": torch.zeros(SIZE - SIZE // 2)}
        given = {"algorithm": "dense", "density": 1.0, **settings}
        outer, weights = await begun(comm, parameters=names, **given)
        for step in range(steps):
            await one_step(outer, weights, comm.rank, step, numbers[comm.rank])
        await outer.deliver()
        return weights.vector, outer.contributions.ranks

    ends = simulate(program, RANKS).results
    every = [sum(moves(rank, step) for step in range(steps)) for rank in range(RANKS)]
    mean = -sum(n * its for n, its in zip(numbers, every, strict=True)) / sum(numbers)
    for end, ranks in ends:
        assert torch.equal(end, ends[0][0])
        torch.testing.assert_close(end, mean, atol=1e-4, rtol=1e-4)
        assert ranks == pytest.approx(12**2 / (1 + 81 + 4))


def test_steps_of_which_nobody_has_seen_anything_count_nothing():
    async def program(comm):
        outer, weights = await begun(comm, algorithm="dense", density=1.0, period=1)
        for step in range(3):
            await one_step(outer, weights, comm.rank, step, 0)
        await outer.deliver()
        return weights.vector

    assert all(not end.any() for end in simulate(program, RANKS).results)


def test_equal_numbers_are_as_none():
    """Equal numbers give the same bits as none, which only cost a message in the first exchange."""
    ends = []
    for seen in (None, 7):

        async def program(comm, seen=seen):
            outer, weights = await begun(comm, algorithm="quantised", residual="weights", period=2)
            for step in range(9):
                await one_step(outer, weights, comm.rank, step, seen)
            sent = comm.ledger.by_phase()["contributions"].sent
            before = weights.vector.clone()
            await outer.deliver()
            return before, weights.vector, sent

        ends.append(simulate(program, RANKS).results)
    for (before, after, _), (other, its, _) in zip(*ends, strict=True):
        assert torch.equal(before, other)
        torch.testing.assert_close(after, its)  # summed in another order
    once, every = (ranks[0][-1] for ranks in ends)
    assert every == 4 * once


def test_who_does_not_count_has_seen_nothing():
    async def program(comm):
        outer, weights = await begun(comm, algorithm="dense", density=1.0, period=1)
        await one_step(outer, weights, comm.rank, 0, 5 if comm.rank == 1 else None)
        return weights.vector

    for end in simulate(program, RANKS).results:
        torch.testing.assert_close(end, -moves(1, 0))


def test_what_ranks_count_must_be_alike():
    async def program(comm):
        outer, _ = await begun(comm, algorithm="dense", density=1.0, period=1)
        outer.contributions.add(*([None, 3, None] if comm.rank else [None, None, 3]))
        with pytest.raises(PeerError, match="ranks count tokens and samples; count the same"):
            await outer.advance(0)

    simulate(program, RANKS)


@refuses(
    ((None, None, None), "was given 0 numbers; give one"),
    ((1, 2, None), "was given 2 numbers; give one"),
    ((None, -1, None), r"contribute\(tokens=-1.0\); give a finite number >= 0"),
    ((float("nan"), None, None), r"contribute\(numbers=nan\)"),
    ((None, None, float("inf")), r"contribute\(samples=inf\)"),
)
def test_what_is_no_number_of_anything_is_refused(given):
    Contributions(weighs=None).add(*given)


def test_counting_begins_with_the_first_step_and_stays_the_same():
    contributions = Contributions(weighs=None)
    contributions.add(None, torch.tensor(3), None)
    with pytest.raises(ConfigurationError, match="was given tokens before and samples now"):
        contributions.add(None, None, 3)
    contributions.weighs = False
    with pytest.raises(ConfigurationError, match="after an exchange without it; call it before"):
        contributions.add(None, 3, None)


def test_a_refused_exchange_takes_back_what_its_steps_have_seen():
    async def program(comm):
        outer, weights = await begun(comm, algorithm="dense", density=1.0, period=2)
        for step in range(4):
            bad = torch.full((SIZE,), torch.inf if (comm.rank, step) == (2, 1) else 0.0)
            weights.write(slice(0, SIZE), bad, add=True)
            # if the first two steps counted, rank 0 would have a larger weight
            seen = 100 if step < 2 and not comm.rank else 1
            await one_step(outer, weights, comm.rank, step, seen)
        return weights.vector, outer.state.refused

    mean = -sum(moves(rank, step) for rank in range(RANKS) for step in (2, 3)) / RANKS
    for end, refused in simulate(program, RANKS).results:
        assert refused == 0
        torch.testing.assert_close(end, mean)


@pytest.mark.parametrize("delay", [0, 2])
def test_a_saved_state_goes_on_bit_for_bit(delay):
    async def steps_from(comm, outer, weights):
        for step in range(7, 12):
            await one_step(outer, weights, comm.rank, step, 1 + comm.rank * step)
        await outer.deliver()
        return weights.vector

    async def program(comm):
        settings = {"residual": "weights", "period": 3, "delay": delay, "algorithm": "quantised"}
        outer, weights = await begun(comm, **settings)
        for step in range(7):
            await one_step(outer, weights, comm.rank, step, 1 + comm.rank * step)
        await outer.settle()
        saved, vector = copy.deepcopy(outer.state_dict()), weights.vector.clone()
        ends = [await steps_from(comm, outer, weights)]
        other, copied = await begun(comm, **settings)
        copied.hold(vector)
        check_saved(saved, Fields(other.kinds(saved)), "state", "load another")
        other.restore(saved, parse_state(other.reducer, saved["reducer"]))
        ends.append(await steps_from(comm, other, copied))
        assert torch.equal(*ends)

    simulate(program, RANKS)


NO_STATES = [{"kind": 7}, {"total": -1.0}, {"total": float("nan")}, {"sent": [2.0]}]
NO_STATES += [{"sent": [0.0, 0.0]}, {"shown": [-1.0]}, {"shown": [1e-12]}, {"weighs": 1}]


@pytest.mark.parametrize("changed", [*NO_STATES, {"ranks": "many"}, {"more": 1}, None])
def test_damaged_states_are_refused(changed):
    contributions = Contributions(weighs=None)
    contributions.plan(1)
    contributions.add(1, None, None)
    state = contributions.state_dict()

    def check(state):
        check_saved(state, contributions_kind(1, state), "contributions", "load another")

    check(state)
    with pytest.raises(ConfigurationError, match="contributions"):
        check(None if changed is None else {**state, **changed})
