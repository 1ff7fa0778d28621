"""AD-PSGD and Eager-SGD: who waits for whom, and that nothing that was learnt is lost."""

import time
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsync.averaging import AdPsgd, EagerSgd, Wagma
from sparsync.averaging.eager import EagerRounds
from sparsync.averaging.schemes import SCHEMES as ALL_SCHEMES
from sparsync.transports.sim import Links, simulate

from .averager_models import add_, linear
from .test_wagma import COMPUTE, late, models, train
from .zmq_group import together

SCHEMES = {
    "adpsgd": AdPsgd,
    "eager, solo": partial(EagerSgd, quorum="solo"),
    "eager, majority": partial(EagerSgd, quorum="majority"),
}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("world_size", [1, 3, 8])
@given(seed=st.integers(0, 10**6), seconds=st.sampled_from([0.01, 0.3, 2]))
@settings(max_examples=4, deadline=None)
def test_whatever_is_late_every_update_arrives_once(scheme, world_size, seed, seconds):
    delay = late(world_size, seconds, 1, seed)
    everyone = models(simulate(train(SCHEMES[scheme], 15, delay), world_size))
    mean = 15 * (world_size + 1) / 2  # every rank adds rank + 1 per step
    for vector in everyone:
        torch.testing.assert_close(vector, torch.full((6,), mean, dtype=torch.float64))
        assert torch.equal(vector, everyone[0])


def seconds_of(make, world_size=8):
    delay = late(world_size, 0.3, 2)
    return simulate(train(make, 30, delay), world_size, links=Links(alpha=1e-6)).seconds


def test_whoever_waits_less_ends_earlier():
    """Per step two of eight ranks are late: allreduce waits for both, a drawn rank is late at times."""
    allreduce, majority = (
        seconds_of(ALL_SCHEMES["allreduce"]),
        seconds_of(SCHEMES["eager, majority"]),
    )
    solo, pairs = seconds_of(SCHEMES["eager, solo"]), seconds_of(AdPsgd)
    assert allreduce == pytest.approx(30 * (COMPUTE + 0.3), rel=0.01)
    assert pairs <= solo * 1.01 < majority < 0.75 * allreduce


# seconds per step: ranks that starve, by turns or for good, as where they share too few cores
STARVED = {
    "three of four": lambda rank, step: 1e-2 * (50 if rank else 1),
    "by turns": lambda rank, step: 1e-2 * (60 if step // 15 % 4 == rank else 1),
}


@pytest.mark.parametrize("name", ["adpsgd", "eager-majority", "eager-solo", "wagma"])
@pytest.mark.parametrize("starved", STARVED)
def test_who_waits_for_nobody_learns_at_its_defaults_where_ranks_starve(name, starved):
    """Gradient descent at a quarter of the longest stable step, to points that differ between ranks."""
    curvature = torch.linspace(0.1, 0.5, 8, dtype=torch.float64)

    async def program(comm):
        averager, vector = ALL_SCHEMES[name](), torch.zeros(8, dtype=torch.float64)
        await averager.begin(comm, vector, 0)
        for step in range(60):
            await comm.compute(STARVED[starved](comm.rank, step))
            vector = vector - curvature * (vector - 1 - 0.1 * comm.rank)
            vector = await averager.average(comm, vector, step)
        return await averager.conclude(comm, vector, 60)

    for vector in simulate(program, 4).results:
        assert (vector - 1.15).abs().max() < 0.2


def test_the_drawn_ranks_begin_equally_often():
    rounds = EagerRounds("majority", 3, 4, torch.zeros(1))
    begun = [sum(rounds.activates(v, rank) for v in range(1, 801, 2)) for rank in range(4)]
    assert sum(begun) == 400 and min(begun) > 70


@pytest.mark.parametrize("scheme", [*SCHEMES.values(), partial(Wagma, group_size=3)])
def test_it_runs_next_to_real_threads_and_one_may_be_late(scheme):
    def rank(comm):
        model = linear()
        before = model.weight.detach().clone()
        with scheme(model, comm=comm) as averager:
            for step in range(6):
                time.sleep(0.05 * (step == 2 and comm.rank == 0))
                add_(model, comm.rank)
                averager.step()
            assert comm.ledger.total().sent > 0
        return model.weight.detach() - before

    moves = together(rank, 3)
    assert all(torch.equal(moves[0], moved) for moved in moves)
    if scheme in SCHEMES.values():  # those in which nothing that was learnt counts less
        torch.testing.assert_close(moves[0], torch.full_like(moves[0], 6.0))
