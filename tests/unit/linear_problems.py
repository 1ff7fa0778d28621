"""Small linear problems, whole or divided over ranks, and training on virtual ranks."""

from itertools import pairwise

import numpy as np
from scipy.sparse import csr_matrix, random

from sparsync import simulate
from sparsync.published.sparcml.linear.problem import Problem
from sparsync.published.sparcml.linear.solvers import Sgd


def make_data(rows=60, dimensions=40, density=0.15, seed=0):
    """Return sparse rows whose labels a linear model can mostly predict; the last columns are empty."""
    generator = np.random.default_rng(seed)
    features = random(rows, dimensions, density, format="csr", random_state=generator)
    features.data = generator.standard_normal(features.nnz)
    features = csr_matrix(features.multiply(np.arange(dimensions) < dimensions - 3))
    features.eliminate_zeros()
    truth = generator.standard_normal(dimensions)
    noise = 0.3 * generator.standard_normal(rows)
    return features, np.where(features @ truth + noise >= 0.2, 1.0, -1.0)


def make_problem(data, model="logistic", dtype=np.float64, **options):
    return Problem(*data, model, dtype=np.dtype(dtype), **options)


def shares(data, world_size):
    """Return contiguous rows for each rank; if there are more ranks than rows, some ranks get none."""
    features, labels = data
    cuts = [len(labels) * rank // world_size for rank in range(world_size + 1)]
    return [(features[a:b], labels[a:b]) for a, b in pairwise(cuts)]


def sgd(comm, problem, exchange="split-allgather", lr=0.5, **options):
    return Sgd(comm, problem, exchange, lr=lr, **options)


def train(make_solver, parts, epochs=3, **options):
    """Train on virtual ranks; return each rank's (objectives, weights, intercept, accuracy)."""

    async def program(comm):
        solver = make_solver(comm, make_problem(parts[comm.rank], **options))
        await solver.start()
        objectives = [(await solver.evaluate()).objective]
        for epoch in range(epochs):
            await solver.epoch(epoch)
            objectives.append((await solver.evaluate()).objective)
        accuracy = (await solver.evaluate()).accuracy
        return objectives, solver.weights.to_dense(), solver.weights.intercept, accuracy

    results = simulate(program, len(parts)).results
    for objectives, weights, intercept, accuracy in results[1:]:  # replicas: the same bits
        assert (objectives, intercept, accuracy) == (*results[0][:1], *results[0][2:])
        assert weights.tobytes() == results[0][1].tobytes()
    return results[0]
