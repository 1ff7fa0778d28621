"""Compare linear solvers with derivatives, dense steps, a single rank and the optimum."""

import re
from functools import partial
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.sparse import csr_matrix

from sparsync import simulate
from sparsync.errors import DisagreementError, PeerError
from sparsync.published.sparcml.linear.problem import (
    LOSSES,
    AdaptiveWeights,
    LazyWeights,
    Products,
    soft,
)
from sparsync.published.sparcml.linear.solvers import SCHEDULES, Scd, Sgd
from sparsync.published.sparcml.presets import EXCHANGES
from sparsync.sparse import DenseVector, SparseVector
from sparsync.transports.groups import SoloCommunicator
from sparsync.wire.packed import Packed
from tests.tables import cases, refuses
from tests.unit.linear_problems import make_data, make_problem, sgd, shares, train

DATA = make_data()


# ---- losses, penalties, schedules -----------------------------------------------------------------


def test_the_gradient_is_autograds():
    features, labels = DATA
    for model in LOSSES:
        problem = make_problem(DATA, model)
        solver = sgd(SoloCommunicator(), problem, batch_size=len(labels), shuffle=False)
        start = np.random.default_rng(1).standard_normal(problem.dimensions + 1)
        solver.weights.add_(DenseVector(torch.from_numpy(start)))
        solver.rows = [len(labels)]
        w = torch.tensor(start, requires_grad=True)
        margins = torch.tensor(labels) * (torch.tensor(features.toarray()) @ w[:-1] + w[-1])
        hinge, logistic = torch.relu(1 - margins), torch.nn.functional.softplus(-margins)
        (hinge if model == "svm" else logistic).mean().backward()
        gradient = solver._gradient(np.arange(len(labels)), 0)
        np.testing.assert_allclose(gradient.to_dense(), w.grad, atol=1e-12)
        assert gradient.check().nnz < problem.dimensions + 1  # as sparse as the data


FIVE = st.lists(st.floats(-2, 2), min_size=5, max_size=5)
PENALTIES = {"l1": st.sampled_from([0.0, 0.01, 0.3]), "l2": st.sampled_from([0.0, 0.1, 0.95, 2.0])}


@given(
    steps=st.lists(st.tuples(FIVE, st.floats(0.01, 1)), min_size=1, max_size=30),
    smallest_scale=st.sampled_from([1e-3, 0.5]),
    **PENALTIES,
)
def test_lazy_steps_equal_dense_ones(steps, l1, l2, smallest_scale):
    """Zeros in a gradient are not stored, but their weights must still decay and shrink."""
    dense, intercept = np.zeros(4), 0.0
    lazy = LazyWeights(4, np.dtype(np.float64), l1=l1, l2=l2)
    for numbers, lr in steps:
        gradient = np.where(np.abs(numbers) < 1, 0, numbers)
        with patch("sparsync.published.sparcml.linear.problem._SMALLEST_SCALE", smallest_scale):
            lazy.apply_(SparseVector.from_dense(torch.from_numpy(gradient)), lr)
        dense = soft(max(1 - lr * l2, 0) * dense - lr * gradient[:-1], lr * l1)
        intercept -= lr * gradient[-1]
        np.testing.assert_allclose(lazy.to_dense(), dense, atol=1e-9)
        np.testing.assert_allclose(lazy.at(np.array([2, 0])), dense[[2, 0]], atol=1e-9)
        assert lazy.intercept == pytest.approx(intercept)


@given(steps=st.lists(FIVE, min_size=1, max_size=30), lr=st.floats(0.01, 3), **PENALTIES)
def test_adaptive_steps_equal_dense_ones(steps, lr, l1, l2):
    """With proximal AdaGrad, weights that no gradient reaches must still decay and shrink."""
    dense, squares = np.zeros(4), np.zeros(5)
    intercept = 0.0
    adaptive = AdaptiveWeights(4, np.dtype(np.float64), l1=l1, l2=l2)
    for numbers in steps:
        gradient = np.where(np.abs(numbers) < 1, 0, numbers)
        adaptive.apply_(SparseVector.from_dense(torch.from_numpy(gradient)), lr)
        squares += gradient**2
        rates = np.where(squares > 0, lr / np.sqrt(np.where(squares > 0, squares, 1)), 0)
        moved = np.maximum(1 - rates[:4] * l2, 0) * dense - rates[:4] * gradient[:-1]
        dense = soft(moved, rates[:4] * l1)
        intercept -= rates[4] * gradient[-1]
        np.testing.assert_allclose(adaptive.to_dense(), dense, atol=1e-9)
        np.testing.assert_allclose(adaptive.at(np.array([2, 0])), dense[[2, 0]], atol=1e-9)
        assert adaptive.intercept == pytest.approx(intercept)


def test_the_usual_rate_does_not_depend_on_the_units_of_the_features():
    scores = []
    for scale in (1.0, 1000.0):
        data = DATA[0] * scale, DATA[1]
        _, weights, intercept, _ = train(lambda c, p: Sgd(c, p), [data], 4)
        scores.append(data[0] @ weights + intercept)
    np.testing.assert_allclose(*scores, rtol=1e-9, atol=1e-9)


@cases((60, 1, 1, 60), (1200, 3, 4, 100), (900, 3, 3, 100))
def test_a_small_data_set_has_at_least_a_hundred_steps_an_epoch(rows, world_size, batch, steps):
    data = make_data(rows)

    async def program(comm):
        solver = Sgd(comm, make_problem(shares(data, world_size)[comm.rank]))
        await solver.start()
        return solver.batch_size, solver.epoch_steps

    assert simulate(program, world_size).results == [(batch, steps)] * world_size
    large = Sgd(SoloCommunicator(), make_problem(DATA))
    large.rows = [10**6]
    assert (large.batch_size, large.epoch_steps) == (1000, 1000)


def test_schedules():
    divisors = {name: [divisor(t) for t in (0, 1, 3)] for name, divisor in SCHEDULES.items()}
    assert divisors["constant"] == [1, 1, 1]
    assert divisors["1/t"] == [1, 2, 4]
    assert divisors["1/sqrt(t)"] == pytest.approx([1, 2**0.5, 2])
    assert divisors["step"] == [1, 2, 8]


def test_products_on_threads_are_the_same_products(monkeypatch):
    features, labels = DATA
    weights = LazyWeights(features.shape[1], np.dtype(np.float64))
    weights.add_(DenseVector(torch.arange(features.shape[1] + 1, dtype=torch.float64)))
    expected = features @ np.arange(features.shape[1]) + features.shape[1]
    for threads in (1, 3, 100):  # more than rows: empty blocks
        products = Products(threads)
        np.testing.assert_allclose(products.scores(features, weights), expected, rtol=1e-12)
        sums = products.transposed(features, labels).check()
        np.testing.assert_allclose(sums.to_dense()[:-1], features.T @ labels, atol=1e-12)
        assert sums.to_dense()[-1] == labels.sum()
        with monkeypatch.context() as patched:
            # sums are sorted
            patched.setattr("sparsync.published.sparcml.linear.problem._COMPACT", 0)
            compact = products.transposed(features, labels)
        assert torch.equal(sums.indices, compact.indices)
        assert torch.equal(sums.values, compact.values)


# ---- sgd ------------------------------------------------------------------------------------------


@pytest.mark.fast(6)
@pytest.mark.parametrize("schedule", ["adagrad", "1/t"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("model", sorted(LOSSES))
def test_ranks_do_what_one_rank_does_with_the_united_batch(world_size, model, schedule):
    batch, parts = 4, shares(DATA, world_size)
    united = []  # rows in the order in which the ranks use them together
    for turn in range(-(-max(len(labels) for _, labels in parts) // batch)):
        for rank in range(world_size):
            start = len(DATA[1]) * rank // world_size
            united += list(range(start, start + len(parts[rank][1])))[turn * batch :][:batch]
    alone = DATA[0][united], DATA[1][united]
    penalty = {"l2": 0.01, "l1": 0.002}

    solver = partial(sgd, shuffle=False, schedule=schedule)
    many = train(partial(solver, batch_size=batch), parts, model=model, **penalty)
    one = train(partial(solver, batch_size=batch * world_size), [alone], model=model, **penalty)
    np.testing.assert_allclose(many[0], one[0], rtol=1e-10)
    np.testing.assert_allclose(many[1], one[1], atol=1e-10)
    assert many[2] == pytest.approx(one[2], rel=1e-8)


@pytest.mark.fast(5)
@pytest.mark.parametrize("schedule", ["adagrad", "constant"])
@pytest.mark.parametrize("exchange", sorted(set(EXCHANGES) - {"dense"}))
def test_a_sparse_exchange_has_the_dense_ones_loss_curve(exchange, schedule):
    def curve(name):
        make = partial(sgd, exchange=name, batch_size=5, schedule=schedule)
        return train(make, shares(DATA, 3), dtype=np.float32, l2=0.01)[0]

    dense = curve("dense")
    assert dense[-1] < 0.85 * dense[0]
    np.testing.assert_allclose(curve(exchange), dense, rtol=1e-5)


def test_l1_makes_exact_zeros():
    def zeros(l1):
        weights = train(lambda c, p: sgd(c, p, batch_size=10), shares(DATA, 2), 20, l1=l1)[1]
        return int((weights[:-3] == 0).sum())  # the last three columns are empty

    assert zeros(0.0) == 0
    assert 5 < zeros(0.05) < 37 == zeros(10.0)


def test_more_ranks_than_rows_and_no_rows_at_all():
    data, none = (DATA[0][:3], DATA[1][:3]), (csr_matrix((0, 7)), np.zeros(0))
    for make in (sgd, Scd):
        objectives, *_ = train(make, shares(data, 5), l2=0.1)
        assert objectives[-1] < objectives[0]
        np.testing.assert_allclose(objectives, train(make, [data], l2=0.1)[0], rtol=1)
        objectives, weights, *_ = train(make, [none, none], 1)
        assert np.isnan(objectives).all() and not weights.any()


# ---- staleness ------------------------------------------------------------------------------------


@pytest.mark.parametrize("staleness", [1, 2, 7])
def test_totals_are_applied_exactly_that_many_steps_late(staleness):
    """The reference loop keeps earlier models: step t uses the model after t - staleness steps."""
    features, labels, lr = DATA[0].toarray(), DATA[1], 0.5
    models = [np.zeros(features.shape[1])]
    for step in range(6):
        rows = slice(10 * step, 10 * step + 10)
        seen = models[max(step - staleness, 0)]
        margins = labels[rows] * (features[rows] @ seen)
        slopes = labels[rows] * LOSSES["logistic"].slope(margins) / 10
        models.append(models[-1] - lr * features[rows].T @ slopes)
    options = {"batch_size": 10, "shuffle": False, "staleness": staleness, "lr": lr}
    options["schedule"] = "constant"
    late = train(lambda c, p: sgd(c, p, **options), [DATA], 1, intercept=False)
    np.testing.assert_allclose(late[1], models[-1], atol=1e-12)
    parallel = train(lambda c, p: sgd(c, p, **options), shares(DATA, 3), 5, intercept=False)
    assert parallel[0][-1] < parallel[0][0]


# ---- bad input ------------------------------------------------------------------------------------


def alone(make, model="logistic", **options):
    return make(SoloCommunicator(), make_problem(DATA, model), **options)


def test_ranks_that_disagree_are_named():
    for option, said in (({"l2": 0.5}, "penalty"), ({"model": "svm"}, "model")):

        async def program(comm, option=option):
            problem = make_problem(DATA, **(option if comm.rank == 2 else {}))
            await sgd(comm, problem).start()

        with pytest.raises(PeerError, match=f"disagree on {said}.*"):
            simulate(program, 3)


@cases(
    ({"solver": Scd}, "solver: rank 0 has sgd, rank 2 has scd"),
    ({"exchange": "dense"}, "exchange: rank 0 has ring, rank 2 has dense"),
    ({"epochs": 4}, "epochs: rank 0 has 3, rank 2 has 4"),
    ({"options": {"dense": True}}, "options of the exchange: rank 0 has .*dense=False.*, rank 2"),
)
def test_ranks_that_would_train_differently_are_told_how(other, said):
    async def program(comm):
        own = {"solver": Sgd, "exchange": "ring", "epochs": 3, "options": {}}
        own |= other if comm.rank == 2 else {}
        problem = make_problem(DATA)
        solver = own["solver"](comm, problem, own["exchange"], options=own["options"])
        with pytest.raises(DisagreementError) as caught:
            await solver.start(own["epochs"])
        return str(caught.value)

    first, _, third = simulate(program, 3).results
    assert re.match(f"ranks disagree on {said}", first)
    assert third.startswith(first[: first.index(":")])


@refuses(
    (lambda: make_problem(DATA, l1=-1), "l1 is -1"),
    (lambda: alone(sgd, schedule="cosine"), "unknown schedule 'cosine'; choose one of adagrad"),
    (lambda: alone(sgd, lr=0), "lr is 0"),
    (lambda: Products(0), "threads is 0"),
    (lambda: make_problem((DATA[0], DATA[1][1:])), "60 rows have 59 labels"),
    (lambda: make_problem((DATA[0], DATA[1] * 2)), "-1 or \\+1"),
    (lambda: make_problem(DATA, dtype=np.int32), "dtype is int32; give float32 or float64"),
    (lambda: alone(sgd, exchange="oktopk"), "unknown exchange 'oktopk'"),
    (lambda: alone(sgd, batch_size=0), "batch_size is 0"),
    (lambda: alone(sgd, staleness=-1), "staleness is -1"),
    (lambda: alone(Scd, coordinates=0), "coordinates is 0"),
    (lambda: alone(Scd, "svm"), "choose logistic, or sgd"),
)
def test_bad_options_are_one_clear_line(make):
    make()


def optimum(l2):
    """Return the minimum of the objective, computed by another method."""
    features, labels = DATA

    def objective(w):
        margins = labels * (features @ w[:-1] + w[-1])
        return np.logaddexp(0, -margins).mean() + l2 / 2 * w[:-1] @ w[:-1]

    return minimize(objective, np.zeros(features.shape[1] + 1), tol=1e-12).fun


def never_rises(objectives):
    return all(after <= before + 1e-12 for before, after in pairwise(objectives))


@pytest.mark.fast(2)
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("exchange", ["allgather", "dense"])
def test_scd_never_rises_and_reaches_the_optimum(world_size, exchange):
    make = partial(Scd, exchange=exchange, coordinates=6)
    objectives = train(make, shares(DATA, world_size), 50, l2=0.2)[0]
    assert never_rises(objectives)
    assert objectives[-1] == pytest.approx(optimum(0.2), abs=1e-5)


def test_scd_with_l1_never_rises_and_makes_exact_zeros():
    objectives, weights, *_ = train(partial(Scd, coordinates=5), shares(DATA, 2), 60, l1=0.03)
    assert never_rises(objectives)
    assert 5 < (weights[:-3] == 0).sum() < 37


def test_scd_exchanges_give_the_same_bits():
    """Slices do not overlap, so no sum rounds."""
    makers = [partial(Scd, exchange=name, coordinates=4) for name in EXCHANGES]
    results = [train(make, shares(DATA, 3)) for make in makers]
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
    # rank 1 also owns the intercept
    expected = [message(entries, dimensions, torch.float32) for entries in (4, 5)]
    assert [s["allgather"] for s in sent] == expected
    assert all(s["derivatives"] == 2 * 8 * 5 for s in sent)
