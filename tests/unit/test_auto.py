"""Test that "auto" picks the fastest prediction, corrected by measurements, on all ranks alike."""

import pytest
import torch

from sparsync.cost.auto import AutoState
from sparsync.cost.machine import Machine
from sparsync.cost.planner import ranking
from sparsync.errors import ConfigurationError
from sparsync.feedback.reducer import Reducer
from sparsync.presets import resolve
from sparsync.transports.sim import Links, simulate
from sparsync.units import Slot, Unit
from tests.tables import cases, refuses

SIZE, RANKS = 20_000, 4
SLOW, FAST = Links(alpha=1e-5, beta=1e-6), Links(alpha=1e-7, beta=1e-12)
IDLE = {"gamma": 0.0, "select": 0.0, "encode": 0.0, "decode": 0.0}  # virtual ranks work in no time


def unit(size=SIZE, name="w"):
    return Unit((Slot(name, 0, size),), torch.float32, torch.device("cpu"))


def machine_of(links, **work):
    return Machine(alpha=links.alpha, beta=links.beta, **{**IDLE, **work})


def auto_of(**options):
    return resolve("auto", **options).make_collective()


def train(links, steps, units=1, **options):
    """Return, for each rank, its choice on every step and whether the law held."""

    async def program(comm):
        planned = [unit(name=f"w{i}") for i in range(units)]
        reducer = Reducer(comm, planned, resolve("auto", **options), density=0.01)
        generator = torch.Generator().manual_seed(comm.rank)
        choices, before = [], torch.zeros(SIZE, dtype=torch.float64)
        for _ in range(steps):
            drawn = (torch.randint(-50, 50, (SIZE,), generator=generator) for _ in planned)
            gradients = [one.float() for one in drawn]
            gained = gradients[0].double()
            choices.append(tuple(c.name for c in reducer.collectives))
            whole = reducer.collectives[0].whole
            total = (await reducer.reduce(gradients))[0].to_dense().double() * RANKS
            residual = reducer.residuals[0].value
            after = torch.zeros_like(before) if residual is None else residual.double()
            sums = await comm.allreduce(before + gained - after, "check")
            assert torch.allclose(sums, total, atol=1e-2), "the law"
            assert bool(after.any()) != whole, "a dense step delivers everything"
            before = after.clone()
        return choices, [c.explain() for c in reducer.collectives]

    return simulate(program, RANKS, links=links).results


@pytest.mark.parametrize("units", [1, 2])
def test_a_slow_network_makes_it_sparse_and_a_fast_one_dense(units):
    slow = train(SLOW, 4, units, machine=machine_of(SLOW))
    fast = train(FAST, 4, units, machine=machine_of(FAST, select=1e-8))
    for results, name in ((slow, "dense"), (fast, "dense")):
        assert all(choices == results[0][0] for choices, _ in results), "ranks differ"
        used = {used for step in results[0][0][1:] for used in step}
        assert (used == {name}) == (results is fast)
    assert "dense wins here" in fast[0][1][0]


def test_what_was_measured_corrects_a_wrong_plan():
    """On a machine declared fast, dense is planned, found to be slow, and soon abandoned."""
    results = train(SLOW, 30, machine=machine_of(FAST, select=1e-8), check_period=3, patience=2)
    names = [step[0] for step in results[0][0]]
    assert names[1] == "dense" and names[7] != "dense" and "dense" not in names[20:]
    assert all(choices == results[0][0] for choices, _ in results)
    assert "measured over predicted: dense" in results[0][1][0]


def test_who_waits_for_a_late_rank_does_not_blame_the_collective():
    async def program(comm):
        auto = auto_of(machine=machine_of(SLOW), check_period=2)
        for step in range(4):
            selected = resolve("budgeted").make_selector().select(torch.rand(SIZE), 200, step)
            await comm.compute(1.0 if comm.rank == 2 else 0.0)
            await auto.reduce(comm, selected, 200, step)
        return [factor for factor in auto.state.factors if factor is not None]

    (factor,) = simulate(program, 3, links=SLOW).results[0]
    assert factor < 3  # a second would be hundreds of times the exchange


def test_a_budget_rules_out_what_needs_more():
    loose = train(FAST, 3, machine=machine_of(FAST, select=1e-8))
    tight = train(FAST, 3, machine=machine_of(FAST, select=1e-8), budget=2000.0)
    assert loose[0][0][-1] == ("dense",) and tight[0][0][-1] != ("dense",)


def warmed_up(auto, ks, ranks=2, links=SLOW, *, resume_at=None, **options):
    """Exchange ``ks`` entries, one number a step; return the choices, explanations and last state."""

    async def program(comm):
        using, said = auto_of(**options, **auto), []
        for step, k in enumerate(ks):
            if step == resume_at:
                state = using.state_dict()
                using = auto_of(**options, **auto)
                using.load_state_dict(state)
            selector = resolve("dense" if using.whole else "budgeted").make_selector()
            mine = torch.rand(SIZE, generator=torch.Generator().manual_seed(step))
            await using.reduce(comm, selector.select(mine, k, step), k, step)
            said.append((using.name, using.explain()))
        return said, using.state

    results = simulate(program, ranks, links=links).results
    assert all(result == results[0] for result in results)
    return results[0]


# dense is planned for half of the elements, and a sparse exchange for a thousandth
NEAR = {"machine": machine_of(Links(alpha=5e-5, beta=4e-10), gamma=1e-10, select=1e-9, decode=4e-9)}


@pytest.mark.parametrize("resume_at", [None, 3, 4])
def test_it_plans_again_when_the_density_changes(resume_at):
    ks = [SIZE // 2] * 3 + [SIZE // 1000] * 3
    said, state = warmed_up(NEAR, ks, check_period=None, resume_at=resume_at)
    (cold, why) = warmed_up(NEAR, ks[3:], check_period=None)[0][0]
    assert [name for name, _ in said] == ["dense"] * 3 + [cold] * 3 and cold != "dense"
    assert [text for _, text in said[3:]] == [why] * 3
    assert state.planned == (SIZE // 1000, 2)


def test_a_resumed_run_measures_and_chooses_like_the_other():
    ks = [SIZE // 2] * 4 + [SIZE // 1000] * 4
    given = {"check_period": 2, "patience": 1}
    runs = [warmed_up(NEAR, ks, **given, resume_at=at)[1] for at in (None, 2, 4, 6)]
    assert all(run == runs[0] for run in runs) and any(runs[0].factors)


def test_measurements_outlast_a_density_that_changes_on_every_step():
    fast = {"machine": machine_of(FAST, select=1e-8)}
    said, state = warmed_up(fast, range(200, 220), check_period=3, patience=2)
    names = [name for name, _ in said]
    assert names[1] == "dense" and "dense" not in names[-8:]
    assert sum(factor is not None for factor in state.factors) > 1


def test_seconds_of_another_density_are_not_compared_with_this_one():
    """Half of the elements take far longer than a thousandth."""
    one = {"machine": machine_of(SLOW), "candidates": ("allgather",)}
    few, many = SIZE // 1000, SIZE // 2
    state = warmed_up(one, [many] * 3 + [few], check_period=4)[1]
    assert state.factors == (pytest.approx(1.0),)  # virtual links are exactly as predicted


def test_its_state_is_plain_and_comes_back():
    async def program(comm):
        auto = auto_of(machine=machine_of(SLOW), check_period=1)
        for step in range(3):
            selected = resolve("budgeted").make_selector().select(torch.rand(SIZE), 50, step)
            if auto.whole:
                selected = resolve("dense").make_selector().select(torch.rand(SIZE), 50, step)
            await auto.reduce(comm, selected, 50, step)
        twin = auto_of(machine=machine_of(SLOW), check_period=1)
        twin.load_state_dict(auto.state_dict())
        return auto, twin

    auto, twin = simulate(program, 3, links=SLOW).results[0]
    assert twin.state == auto.state and twin.name == auto.name
    assert auto.state.factors != auto_of().state.factors, "something was learned"


@cases({"choice": 99}, {"choice": "dense"}, {"factors": [1.0]}, {"parts": []}, {"parts": None})
def test_a_state_that_does_not_fit_is_refused(change):
    auto = auto_of()
    with pytest.raises(ConfigurationError):
        auto.load_state_dict({**auto.state_dict(), **change})


@refuses(
    ({"candidates": ("dense", "telepathy")}, "candidates"),
    ({"candidates": ()}, "candidates"),
    ({"check_period": 0}, "check_period"),
    ({"gain": 1.5}, "gain"),
    ({"patience": 0}, "patience"),
)
def test_bad_options_are_one_line(options):
    resolve("auto", **options)


# ---- what follows from measurements -------------------------------------------------------------------

PREDICTED = {0: 1.0, 1: 1.5, 2: 9.0}


FRESH = AutoState(0, factors=(None,) * 3)


def checked(measured, state=FRESH, gain=0.1, patience=3):
    choices = []
    for seconds in measured:
        state = state.checked(PREDICTED, seconds, gain=gain, patience=patience)
        choices.append(state.choice)
    return state, choices


def test_it_changes_after_several_checks_in_a_row():
    assert checked([2.0, 2.0, 2.0])[1] == [0, 0, 1]
    assert checked([2.0, 2.0, 0.5, 2.0, 2.0, 2.0, 2.0])[1] == [0] * 5 + [0, 1]


def test_a_small_gain_is_no_reason():
    assert checked([1.6] * 10)[1] == [0] * 10  # 1.5 is 6 % better
    assert checked([1.6] * 10, gain=0.05)[1][-1] == 1


def test_what_was_tried_is_judged_by_its_own_factor():
    state, choices = checked([2.0], patience=1)
    assert choices == [1]
    state, choices = checked([4.5], state, patience=1)  # three times as long as predicted
    assert choices == [0] and state.factors == (2.0, 3.0, None)
    assert checked([2.0] * 10, state)[1] == [0] * 10  # it does not switch back and forth


def test_factors_follow_the_measurements():
    assert checked([1.2, 1.0])[0].factors[0] == pytest.approx(1.1)
    alone = AutoState(0, factors=(None,)).checked({0: 0.0}, 1.0, gain=0.1, patience=1)
    assert alone.factors == (1.0,)  # with one rank, there is nothing to correct


def explained(choice, factors, *, streak=0, **options):
    """Return the reason for a choice among three, of which the plan takes the second, 20 % faster."""
    auto = auto_of(machine=machine_of(SLOW), candidates=("dense", "allgather", "oktopk"), **options)
    auto._sizes = SIZE, 200, RANKS
    auto.state = AutoState(choice, (200, RANKS), streak, factors, auto.state.parts)
    return auto.explain()


def test_the_reason_is_that_of_the_choice_and_not_of_the_plan():
    table = ranking(SIZE, RANKS, machine_of(SLOW), [resolve("oktopk"), resolve("allgather")], k=200)
    best, other = (p.collective for p in table)
    number = {"dense": 0, "allgather": 1, "oktopk": 2}
    slower = table[1].seconds / table[0].seconds

    def factors(of_best, of_other):
        known = {best: of_best, other: of_other}
        return tuple(known.get(name) for name in number)

    kept = explained(number[other], factors(1.0, 0.95 / slower * 1.1))
    assert explained(number[best], (None,) * 3).startswith(f"{best}: {best} wins here: ")
    overruled = explained(number[other], factors(2 * slower, 1.0))
    faster = f"as measured, {other} is faster; measured over predicted: "
    said = f"{other}: {best} was predicted; {faster}"
    assert overruled.startswith(said)
    assert kept.startswith(f"{other}: kept, because {best} would save 4.3 %, and gain is 10 %;")
    waits = explained(number[other], factors(1.0, 2 / slower), streak=1, patience=3)
    said = f"{other}: kept for now; {best} would save 50 %, as found in 1 of 3 checks in a row;"
    assert waits.startswith(said)
    over = explained(0, factors(1.0, 1.0), budget=5000.0)
    assert over.startswith("dense: over the budget; the next check chooses another algorithm;")
    assert explained(-1, (None,) * 3).endswith(": the first step is not planned yet")


def test_a_choice_that_the_budget_rules_out_is_left():
    state = AutoState(2, factors=(None,) * 3).checked({1: 1.5, 0: 2.0}, 1.0, gain=0.1, patience=3)
    assert (state.choice, state.factors) == (1, (None,) * 3)
