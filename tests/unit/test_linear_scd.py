"""Coordinate descent: it never rises, reaches the optimum, and sends what it changes."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from sparsync import simulate
from sparsync.linear.solvers import EXCHANGES, Scd
from sparsync.wire.packed import Packed
from tests.unit.linear_problems import make_data, make_problem, shares, train

DATA = make_data()


def optimum(l2):
    """The minimum of the objective, by another way."""
    features, labels = DATA

    def objective(w):
        margins = labels * (features @ w[:-1] + w[-1])
        return np.logaddexp(0, -margins).mean() + l2 / 2 * w[:-1] @ w[:-1]

    return minimize(objective, np.zeros(features.shape[1] + 1), tol=1e-12).fun


def never_rises(objectives):
    return all(after <= before + 1e-12 for before, after in pairwise(objectives))


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("exchange", ["allgather", "dense"])
def test_scd_never_rises_and_reaches_the_optimum(world_size, exchange):
    def solver(comm, problem):
        return Scd(comm, problem, exchange, coordinates=6)

    objectives = train(solver, shares(DATA, world_size), 50, l2=0.2)[0]
    assert never_rises(objectives)
    assert objectives[-1] == pytest.approx(optimum(0.2), abs=1e-5)


def test_scd_with_l1_never_rises_and_makes_exact_zeros():
    objectives, weights, *_ = train(
        lambda c, p: Scd(c, p, coordinates=5), shares(DATA, 2), 60, l1=0.03
    )
    assert never_rises(objectives)
    assert 5 < (weights[:-3] == 0).sum() < 37


def test_scd_exchanges_give_the_same_bits():
    """Slices do not overlap, so nothing is rounded in any sum."""
    results = [
        train(lambda c, p, name=name: Scd(c, p, name, coordinates=4), shares(DATA, 3))
        for name in EXCHANGES
    ]
    for other in results[1:]:
        assert other[0] == results[0][0] and other[1].tobytes() == results[0][1].tobytes()


def test_scd_sends_what_it_changes():
    async def program(comm):
        solver = Scd(comm, make_problem(parts[comm.rank], dtype=np.float32), coordinates=4)
        await solver.start()
        comm.ledger.begin_step(1)
        solver.steps = 1
        await solver.epoch(0)
        return {phase: traffic.sent for phase, traffic in comm.ledger.phases.items()}

    parts = shares(DATA, 2)
    sent = simulate(program, 2).results
    message = Packed("fp32").nbytes
    dimensions = DATA[0].shape[1] + 1
    # rank 1 owns the intercept, too
    expected = [message(entries, dimensions, torch.float32) for entries in (4, 5)]
    assert [s["allgather"] for s in sent] == expected
    assert all(s["derivatives"] == 2 * 8 * 5 for s in sent)
