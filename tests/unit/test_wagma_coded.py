"""Group averages whose values are rounded: nothing is lost, replicas end equal, fewer bytes travel."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsync.averaging import Wagma
from sparsync.averaging.wagma import CODECS, ModelRounds, coded_allreduce
from sparsync.transports.sim import Links, simulate

ROUNDED = ("bf16", "int8")


def drift(step, rank, size):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(size, generator=generator, dtype=torch.float64)


def trained(make, world_size, steps, size=301, seen=None, conclude=True):
    async def program(comm):
        averager, vector = make(), torch.zeros(size, dtype=torch.float64)
        await averager.begin(comm, vector, 0)
        for step in range(steps):
            await comm.compute(0.1)
            mine = vector + drift(step, comm.rank, size)
            vector = await averager.average(comm, mine, step)
            if seen is not None:
                error = averager.memory.get("error", torch.zeros(size))
                seen.setdefault(step, {})[comm.rank] = mine, vector, error
        return await averager.conclude(comm, vector, steps) if conclude else None, comm.ledger

    # messages take no time: nobody is late because of how many there are
    return simulate(program, world_size, links=Links(0.0, 0.0))


@given(st.integers(1, 9), st.integers(0, 40), st.sampled_from(ROUNDED), st.integers(0, 99))
def test_a_sum_and_what_it_lost_make_the_exact_sum(world_size, size, values, seed):
    vectors = [drift(seed, rank, size) for rank in range(world_size)]

    async def program(comm):
        return await coded_allreduce(comm, vectors[comm.rank], CODECS[values], seed)

    sums = simulate(program, world_size).results
    assert all(torch.equal(one.total, sums[0].total) for one in sums)
    lost = sum(one.lost + one.lost_of_sum for one in sums)
    torch.testing.assert_close(sums[0].total + lost, sum(vectors), rtol=1e-12, atol=1e-12)
    if world_size > 1 and size:
        assert all(one.lost.abs().max() < 0.1 for one in sums)


@pytest.mark.parametrize("values", ROUNDED)
@pytest.mark.parametrize(("world_size", "group_size"), [(8, 4), (6, 2), (7, 3)])
def test_the_mean_of_models_and_errors_is_preserved_on_every_step(values, world_size, group_size):
    seen = {}
    make = partial(Wagma, group_size=group_size, sync_period=5, values=values)
    trained(make, world_size, 12, seen=seen)
    owed = 0
    for step, ranks in seen.items():
        # all are fresh, and groups of 3 and of 2 weigh ranks alike only within themselves
        before = sum(mine for mine, _, _ in ranks.values()) + owed
        after = sum(vector for _, vector, _ in ranks.values())
        owed = sum(error for _, _, error in ranks.values())
        torch.testing.assert_close(after + owed, before, rtol=1e-12, atol=1e-10)
        closes = (step + 1) % 5 == 0
        assert (owed.abs().max() == 0) if closes else (0 < owed.abs().max() < 1)


def test_an_old_model_of_a_late_rank_owes_nothing_and_what_was_owed_stays():
    size, first = 10, 5  # rank 1 sums the places from 5 on
    models = {0: [drift(0, 0, size), drift(1, 0, size)], 1: [drift(0, 1, size)]}

    async def program(comm):
        base = torch.zeros(size, dtype=torch.float64)
        rounds = ModelRounds(base, 2, None, codec=CODECS["bf16"])
        rounds.publish(models[comm.rank][0])
        await rounds.reduce(comm, 1, 1)
        owed, newest = rounds.error, 1
        if comm.rank == 0:  # rank 1 is late
            newest = 3
            rounds.publish(models[0][1])
        sent = rounds._vector
        return owed, sent, await rounds.reduce(comm, 3, newest), rounds.error

    (_, fresh, total, _), (owed, old, _, error) = simulate(program, 2).results
    exact = old[first:] + fresh[first:].to(torch.bfloat16).double()
    torch.testing.assert_close(error[first:], owed[first:] + exact - total[first:])
    assert torch.equal(error[:first], owed[:first])
    assert (owed[first:] != 0).any()


@pytest.mark.parametrize("values", ROUNDED)
def test_errors_do_not_grow_with_the_way_from_the_first_model(values):
    async def program(comm):
        averager = Wagma(group_size=2, sync_period=5, values=values)
        vector, errors = torch.zeros(64), []
        ramp = torch.linspace(0.8, 1.1, 64)
        await averager.begin(comm, vector, 0)
        for step in range(60):
            vector = await averager.average(comm, vector + ramp + 0.1 * comm.rank, step)
            errors.append(averager.memory["error"].abs().max() if (step + 1) % 5 else 0)
        return max(errors[:10]), max(errors[50:])

    for early, at_last in simulate(program, 4, links=Links(0.0, 0.0)).results:
        assert 0 < at_last < 3 * early


@pytest.mark.parametrize(("values", "less"), [("bf16", 1.9), ("int8", 3.6)])
def test_fewer_bytes_travel(values, less):
    def sent(values):
        make = partial(Wagma, group_size=4, sync_period=None, values=values)
        return trained(make, 8, 3, 1 << 15, conclude=False).ledgers[0].total().sent

    # float64, where "fp32" is what the model has
    assert sent("fp32") / sent(values) > 2 * less
