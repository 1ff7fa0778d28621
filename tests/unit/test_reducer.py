"""Test a reducer's bookkeeping, residuals and saved state; the contracts check its results."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsync import ConfigurationError, DenseVector, SparseVector, connect, kernels, simulate
from sparsync.algorithm import Algorithm
from sparsync.feedback.reducer import Reducer
from sparsync.feedback.reducer_state import reducer_state, restore_reducer
from sparsync.feedback.residual import Residual
from sparsync.feedback.schedule import Warmup
from sparsync.monitoring import XiProbe
from sparsync.presets import resolve
from sparsync.published.oktopk import oktopk
from sparsync.selection import Exact, Sampled
from sparsync.selection.selector import mixed_seed
from sparsync.transports.driver import run, together
from sparsync.transports.groups import SoloCommunicator
from sparsync.units import Unit, plan_units
from sparsync_papers.baseline_optimizers import UpdateSpaceSGD
from tests.draws import noise
from tests.tables import refused


@pytest.mark.parametrize("parameters", [3, 60])
def test_quotas_are_derived_once_per_step_for_all_parameters(parameters, monkeypatch):
    """Quotas derived anew for each parameter would cost parameters x units on autograd's thread."""
    calls, collect_from, entries = [], Exact.collect_from, Unit.entries
    collect = lambda *given: calls.append(0) or collect_from(*given)  # noqa: E731
    monkeypatch.setattr(Exact, "collect_from", collect)
    units = plan_units([(str(i), torch.zeros(8)) for i in range(parameters)], parameters * 32 // 3)
    reducer = Reducer(SoloCommunicator(), units, resolve("budgeted"), 0.5)
    monkeypatch.setattr(Unit, "entries", lambda *given: calls.append(1) or entries(*given))
    for _ in range(2):
        calls.clear()
        for index, unit in enumerate(units):
            for slot in unit.slots:
                reducer.accumulate(index, slot.start, torch.ones(slot.size))
        exchanges = [reducer.exchange(index) for index in range(len(units))]
        run(together([*exchanges, reducer.share()]))
        reducer.commit()
        assert len(calls) <= 2 * len(units)


def test_an_operation_other_than_the_sum_is_refused():
    units = plan_units([("w", torch.zeros(4))])
    with refused("ring reduces with 'max', but training needs sums"):
        Reducer(SoloCommunicator(), units, resolve("ring", op="max", cap=None), 0.5)


def test_draws_of_two_seeds_are_two_sequences_and_not_one_shifted():
    drawn = {(seed, step): mixed_seed(seed, step) for seed in range(20) for step in range(20)}
    assert len(set(drawn.values())) == 400 and all(0 <= s < 2**63 for s in drawn.values())
    values = noise(20_000, seed=0)

    def counts(seed):
        selector = Sampled(0.1, enough=0, least=1, seed=seed)
        return [selector.select(values, 400, step).nnz for step in range(4)]

    assert counts(0)[1:] != counts(1)[:-1]
    probes = [XiProbe(1, plan_units([("a", values)]), seed=seed) for seed in (0, 1)]
    for probe, step in zip(probes, (1, 0), strict=True):
        probe.accumulate(step, 0, 0, values)
    assert not torch.equal(*(probe._samples[0] for probe in probes))


PARAMETERS = [("big", torch.zeros(300)), ("bias", torch.zeros(7)), ("other", torch.zeros(100))]


def only_big(name, parameter):
    return parameter.numel() > 50


def gradients(rank, step, units):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(unit.size, generator=generator) for unit in units]


def test_parameters_that_are_not_compressed_have_units_of_their_own():
    units = plan_units(PARAMETERS, compress=only_big)
    found = [([s.name for s in u.slots], u.dense) for u in units]
    assert found == [(["big", "other"], False), (["bias"], True)]
    assert units[1].entries(0.01) == 7


def test_dense_units_are_averaged_exactly_and_do_not_take_part_in_the_shares():
    units = plan_units(PARAMETERS, unit_bytes=4, compress=only_big)

    async def program(comm):
        reducer = Reducer(comm, units, resolve("allgather"), density=0.1)
        for step in range(4):
            mine = gradients(comm.rank, step, units)
            everyone = [gradients(r, step, units)[1] for r in range(comm.world_size)]
            averages = await reducer.reduce([g.clone() for g in mine])
            expected = torch.stack(everyone).sum(0) / comm.world_size
            torch.testing.assert_close(averages[1].to_dense(), expected)
            assert reducer.residuals[1].value is None
            assert reducer.plan.quotas[1] == 7
            assert reducer.plan.quotas[0] + reducer.plan.quotas[2] == 30 + 10
        return reducer.plan.quotas

    assert len(set(simulate(program, 3).results)) == 1


def test_layers_keep_their_own_k_where_the_algorithm_says_so():
    units = plan_units(PARAMETERS, unit_bytes=4)
    algorithm = resolve("allgather")
    alone = Algorithm("alone", algorithm.make_selector, algorithm.make_collective, shared=False)

    async def program(comm):
        reducer = Reducer(comm, units, alone, density=0.1)
        for step in range(3):
            await reducer.reduce(gradients(comm.rank, step, units))
        assert "shares" not in comm.ledger.by_phase()
        return reducer.plan.quotas

    assert simulate(program, 2).results == [(30, 1, 10)] * 2


def test_a_sum_is_applied_where_the_algorithm_does_not_average():
    units = plan_units(PARAMETERS[:1])
    exact = resolve("allgather")
    summed = Algorithm("sum", exact.make_selector, exact.make_collective, average=False)

    async def program(comm):
        mine = gradients(comm.rank, 0, units)
        results = []
        for algorithm in (exact, summed):
            reducer = Reducer(comm, units, algorithm, density=0.1)
            (average,) = await reducer.reduce([g.clone() for g in mine])
            results.append(average.to_dense())
        torch.testing.assert_close(results[0] * comm.world_size, results[1])
        return bool((results[1] != 0).any())

    assert simulate(program, 3).results == [True] * 3


def residual(size: int) -> Residual:
    return Residual(size, torch.float32, torch.device("cpu"))


def six(of):
    return st.lists(of, min_size=6, max_size=6)


# gradients, which entries are delivered, and whether the step is refused
steps = st.lists(st.tuples(six(st.integers(-9, 9)), six(st.booleans()), st.booleans()), max_size=6)


@given(steps)
def test_nothing_is_lost_over_any_steps_refused_ones_among_them(steps):
    kept, given_in, given_out = residual(6), torch.zeros(6), torch.zeros(6)
    for gradient, mask, refuse in steps:
        before = kept.value if kept.value is None else kept.value.clone()
        given_gradient = torch.tensor(gradient, dtype=torch.float32)
        kept.accumulate(0, given_gradient)
        if refuse:
            kept.restore()
            assert not given_gradient.any()
            assert (kept.value is None) == (before is None)
            assert before is None or torch.equal(kept.value, before)
            continue
        accumulated = kept.accumulated.clone()
        places = torch.tensor(mask).nonzero()[:, 0]
        delivered = SparseVector.from_dense(accumulated).restrict(places)
        kept.retain(delivered)
        given_in += torch.tensor(gradient)
        given_out += delivered.to_dense()
        assert torch.equal(kept.value, accumulated - delivered.to_dense())
    held = torch.zeros(6) if kept.value is None else kept.value
    assert torch.equal(given_in, given_out + held)


def test_a_refused_step_leaves_no_trace():
    kept = residual(3)
    kept.accumulate(0, torch.tensor([1.0, 1e-30, 2.0]))
    kept.retain(SparseVector.empty(3, kept.accumulated))
    kept.accumulate(2, torch.tensor([float("inf")]))
    kept.accumulate(0, torch.tensor([float("nan"), 1.0]))  # 1 + 1e-30 - 1 is not 1e-30
    kept.restore()
    assert kept.value.tolist() == torch.tensor([1.0, 1e-30, 2.0]).tolist()
    kept.accumulate(0, torch.tensor([1.0, 1.0, 1.0]))
    assert kept.accumulated.tolist() == [2.0, 1.0, 3.0]


def test_16_bit_gradients_are_undone_exactly():
    kept = Residual(2, torch.bfloat16, torch.device("cpu"))
    kept.accumulate(0, torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    kept.retain(SparseVector(torch.tensor([0]), torch.tensor([0.001]), 2))
    before = kept.value.clone()
    kept.accumulate(0, torch.tensor([3.0, 4.0], dtype=torch.bfloat16))
    assert kept.accumulated.dtype == torch.float32
    kept.restore()
    assert torch.equal(kept.value, before)


def test_what_was_asked_for_is_collected_in_pieces():
    kept = residual(5)
    kept.accumulate(0, torch.tensor([1.0, 0.0, 0.0, 0.0, 5.0]))
    kept.retain(SparseVector.empty(5, kept.accumulated))
    two, three = kernels.magnitude_keys(torch.tensor([2.0, 3.0])).tolist()
    kept.accumulate(3, torch.tensor([3.0, 0.0]), two, 3)
    kept.accumulate(0, torch.tensor([1.0, 1.0, 0.0]), two, 3)
    found = kept.collected().top(9).check()
    assert (found.indices.tolist(), found.values.tolist()) == ([0, 3, 4], [2.0, 3.0, 5.0])
    assert kept.collected(three).indices.tolist() == [3, 4]
    assert kept.collected(three, 1) is kept.collected(two, 2) is None, "more than the limit"
    kept.restore()
    kept.accumulate(0, torch.full((3,), 9.0), two, 4)
    kept.accumulate(3, torch.full((2,), 9.0), two, 4)
    assert kept.collected() is None, "more than the limit of all pieces"


def test_delivering_everything_keeps_no_residual():
    kept = residual(2)
    kept.accumulate(0, torch.tensor([1.0, 2.0]))
    kept.retain(DenseVector(kept.accumulated))
    assert kept.value is None
    kept.accumulate(0, torch.tensor([3.0, 4.0]))
    assert kept.accumulated.tolist() == [3.0, 4.0]


def test_a_dense_step_is_summed_in_the_residuals_own_memory_and_undone_from_the_gradients():
    async def program(comm):
        units = plan_units([("a", torch.zeros(5))])
        reducer = Reducer(comm, units, oktopk(), density=0.4, warmup=Warmup(1))
        (residual,) = reducer.residuals
        residual.load(torch.arange(5.0))
        reducer.accumulate(0, 0, torch.ones(5))
        await reducer.exchange(0)
        total = reducer.reduced[0].total.values
        assert total is residual.accumulated
        assert total.tolist() == [3.0, 6.0, 9.0, 12.0, 15.0]
        reducer.refuse()
        return residual.value.tolist()

    assert simulate(program, 3).results == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 3


def reducer_after(steps, dtype=torch.float32):
    units = plan_units([("a", torch.zeros(30, dtype=dtype)), ("b", torch.zeros(20, dtype=dtype))])
    reducer = Reducer(connect(), units, oktopk(), density=0.1)
    for step in range(steps):
        run(reducer.reduce([noise(50, seed=step).to(dtype)]))
    return reducer


BROKEN = {
    "a residual of another size": lambda s: s["residual"].update(a=torch.zeros(31)),
    "a residual that is a list": lambda s: s["residual"].update(a=[0.0] * 30),
    "a residual that is missing": lambda s: s["residual"].pop("b"),
    "a step between steps": lambda s: s.update(step=1.5),
    "a negative step": lambda s: s.update(step=-1),
    "no step": lambda s: s.pop("step"),
    "no selectors": lambda s: s.pop("selectors"),
    "another field": lambda s: s["selectors"][0].update(surprise=1),
    "a hostile boundary": lambda s: s["collectives"][0].update(boundaries=["x"]),
    "another algorithm": lambda s: s.update(algorithm="dense"),
    "another rank": lambda s: s.update(rank=3),
    "another density, of as many entries": lambda s: s.update(density=0.1001),
    "quotas of another sum": lambda s: s.update(quotas=[4]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(name):
    reducer = reducer_after(2)
    before, broken = copy.deepcopy(reducer_state(reducer)), reducer_state(reducer_after(5))
    BROKEN[name](broken)
    with refused():
        run(restore_reducer(reducer, broken))
    after = reducer_state(reducer)
    assert all(torch.equal(after["residual"][n], before["residual"][n]) for n in "ab")
    assert {**after, "residual": 0} == {**before, "residual": 0}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_16_bit_gradients_lose_nothing_in_the_residual(dtype):
    # in bfloat16, 1 + 1/512 is 1, so a residual of that dtype would stop growing
    units = plan_units([("w", torch.zeros(2, dtype=dtype))])
    reducer = Reducer(connect(), units, oktopk(), density=0.5)
    delivered = torch.zeros(2, dtype=torch.float64)
    gradient = torch.tensor([1.0, 2.0**-9], dtype=dtype)
    for _ in range(200):
        (average,) = run(reducer.reduce([gradient.clone()]))
        delivered += average.to_dense().double()
    fed = 200 * gradient.double()
    assert torch.allclose(delivered + reducer.residuals[0].value.double(), fed)


def test_an_optimizer_state_without_ours_is_refused():
    optimizer = UpdateSpaceSGD(torch.nn.Linear(2, 1), lr=0.1)
    with pytest.raises(ConfigurationError, match=r"has no state\['kind'\]; load a state of an opt"):
        optimizer.load_state_dict(torch.optim.SGD([torch.zeros(1)], lr=0.1).state_dict())


def test_parameters_cannot_join_later():
    optimizer = UpdateSpaceSGD(torch.nn.Linear(2, 1), lr=0.1)
    with pytest.raises(ConfigurationError, match="after the model is complete"):
        optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})
