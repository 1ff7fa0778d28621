import torch

from sparsync import simulate
from sparsync.feedback.reducer import Reducer
from sparsync.presets import Algorithm, resolve
from sparsync.units import plan_units

PARAMETERS = [("big", torch.zeros(300)), ("bias", torch.zeros(7)), ("other", torch.zeros(100))]


def only_big(name, parameter):
    return parameter.numel() > 50


def gradients(rank, step, units):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(unit.size, generator=generator) for unit in units]


def test_parameters_that_are_not_compressed_have_units_of_their_own():
    units = plan_units(PARAMETERS, compress=only_big)
    assert [([s.name for s in u.slots], u.dense) for u in units] == [
        (["big", "other"], False),
        (["bias"], True),
    ]
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
