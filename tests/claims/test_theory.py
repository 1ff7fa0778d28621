"""Measure the assumptions in ``docs/theory.md``, and compare its bounds with runs that meet them."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from sparsync.algorithm import Algorithm
from sparsync.collectives.costs import Job, expected_union, lemma_5_2_speedup, sum_bound_words
from sparsync.errors import ConfigurationError
from sparsync.feedback.reducer import Reducer
from sparsync.presets import resolve
from sparsync.published.oktopk import OkTopk
from sparsync.published.oktopk.assumption_1 import xi
from sparsync.published.oktopk.table_1 import TABLE_1
from sparsync.published.sparcml.sgd_bounds import (
    condition_6,
    lemma_c_3,
    theorem_c_4,
    top_k_gamma,
)
from sparsync.published.wagma import Wagma
from sparsync.published.wagma.averaging_bounds import lemma_4_5, theorem_4_1, theorem_4_6
from sparsync.selection import Exact
from sparsync.transports.sim import simulate
from sparsync.units import plan_units

# ---- Table 1 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [2, 16, 64, 256])
def test_table_1_is_the_papers(p):
    """The rows as printed in the paper, written independently."""
    n, k, log = 10**6, 10**4, math.log2(p)
    share = (p - 1) / p
    published = {
        "Dense": (2 * n * share, 2 * n * share, 2 * log),
        "TopkA": (2 * k * (p - 1), 2 * k * (p - 1), log),
        "TopkDSA": (4 * k * share, (2 * k + n) * share, p + 2 * log),
        "gTopk": (4 * k * log, 4 * k * log, 2 * log),
        "Gaussiank": (2 * k * (p - 1), 2 * k * (p - 1), 2 * log),
        "Ok-Topk": (2 * k * share, 6 * k * share, 2 * p + 2 * log),
    }
    assert [row.title for row in TABLE_1.values()] == list(published)
    alpha, beta = 1.5e-6, 0.4e-9
    for name, row in TABLE_1.items():
        least, most, messages = published[row.title]
        assert row.words(n, k, p) == pytest.approx((least, most))
        assert row.messages(p) == messages
        expected = [alpha * messages + beta * words for words in (least, most)]
        assert row.seconds(n, k, p, alpha, beta) == pytest.approx(expected)
        assert resolve(name)  # a preset is that algorithm


def test_table_1_takes_any_p_and_names_what_makes_no_sense():
    assert TABLE_1["allgather"].messages(5) == 3
    assert TABLE_1["oktopk"].seconds(100, 10, 1, 1.0, 1.0) == (0.0, 0.0)
    with pytest.raises(ConfigurationError, match=r"n = 5, k = 6, P = 2.* give 0 <= k <= n"):
        TABLE_1["dense"].seconds(5, 6, 2, 1.0, 1.0)


# ---- Assumption 1 -----------------------------------------------------------------------------------


def test_xi_of_two_ranks_by_hand():
    """The ranks send entries 0 and 1; the mean's largest entry is entry 2, which no rank sends."""
    accumulated = [torch.tensor([4.0, 0.0, 3.0]), torch.tensor([0.0, 4.0, 3.0])]
    gradients = [torch.tensor([1.0, 0.0, 0.0]), torch.tensor([1.0, 0.0, 0.0])]
    assert xi(accumulated, gradients, k=1) == pytest.approx((3.0**2 + 2.0**2) ** 0.5)
    both = (3.0**2 + 2.0**2 + 2.0**2) ** 0.5  # without the second Topk two entries arrive
    assert xi(accumulated, gradients, k=1, reselect=False) == pytest.approx(both)
    assert xi(accumulated, gradients, k=3) == 0.0
    assert xi(accumulated, [torch.zeros(3)] * 2, k=1) == math.inf


@pytest.mark.parametrize("reselect", [True, False])
def test_the_probe_of_a_training_measures_xi(reselect):
    """The probe covers all coordinates; the collective is the second term of Assumption 1, or of C.2."""
    size, k, ranks = 600, 30, 3
    gradients = [
        torch.randn(size, generator=torch.Generator().manual_seed(r)) for r in range(ranks)
    ]
    algorithm = Algorithm("exact", Exact, OkTopk) if reselect else resolve("allgather")

    async def program(comm):
        units = plan_units([("w", torch.zeros(size))], 4)
        reducer = Reducer(comm, units, algorithm, k / size, xi_period=1)
        reducer.monitor.xi.every = 1
        seen, measure = [], reducer.monitor.xi.measure
        reducer.monitor.xi.measure = lambda *given: seen.append(measure(*given)) or seen[-1]
        await reducer.reduce([gradients[comm.rank].clone()])
        return seen[0].xi

    measured = simulate(program, ranks).results[0]
    assert measured == pytest.approx(xi(gradients, gradients, k, reselect=reselect), rel=1e-5)


# ---- where the learning rate sits -------------------------------------------------------------------


def weights_after(rates, *, inside, size=200, k=10, ranks=3):
    """Return models and residual mass of top-k SGD, with the rate inside or outside the accumulator."""
    algorithm = Algorithm("exact", Exact, OkTopk)

    async def program(comm):
        reducer = Reducer(comm, plan_units([("w", torch.zeros(size))], 4), algorithm, k / size)
        generator = torch.Generator().manual_seed(comm.rank)
        weights = torch.zeros(size)
        for rate in rates:
            gradient = torch.randn(size, generator=generator)
            (average,) = await reducer.reduce([gradient * rate if inside else gradient])
            step = average.to_dense()
            weights -= step if inside else rate * step
        return weights

    results = simulate(program, ranks).results
    assert all(torch.equal(one, results[0]) for one in results)
    return results[0]


def test_at_a_constant_rate_it_does_not_matter_where_it_sits():
    """Topk(alpha a) = alpha Topk(a), and alpha is a power of two, so no bit changes."""
    rates = [0.125] * 8
    assert torch.equal(weights_after(rates, inside=True), weights_after(rates, inside=False))


def test_a_rate_that_falls_counts_late_entries_by_their_own_step_only_if_it_is_inside():
    """With a final rate near 0, entries that waited still arrive only if the rate is inside."""
    rates = [0.5, 2.0**-20]
    first, inside, outside = (
        weights_after(rates[:1], inside=True),
        weights_after(rates, inside=True),
        weights_after(rates, inside=False),
    )
    assert float((outside - first).norm()) < 1e-4 * float(first.norm())
    assert float((inside - first).norm()) > 0.5 * float(first.norm())


# ---- Theorems 4.1 (Ok-Topk) and C.4 (SparCML) -------------------------------------------------------


def top(values, k):
    kept, order = np.zeros_like(values), np.argsort(-np.abs(values), kind="stable")[:k]
    kept[order] = values[order]
    return kept


class Logarithms:
    """The smooth, non-convex f(x) = sum of log(1 + ((x_j - a_j) / s)^2), averaged over samples a."""

    def __init__(self, size, scale, samples=64, seed=0):
        self.rng = np.random.default_rng(seed)
        self.scale, self.size = scale, size
        self.points = self.rng.normal(size=(samples, size))
        self.smoothness = 2 / scale**2  # of log(1 + u^2) the second derivative is at most 2
        self.second_moment = size / scale**2  # the first at most 1, per coordinate

    def value(self, x):
        return float(np.log1p(((x - self.points) / self.scale) ** 2).sum(axis=1).mean())

    def _slope(self, u):
        return 2 * u / (1 + u**2) / self.scale

    def gradient(self, x):
        return self._slope((x - self.points) / self.scale).mean(axis=0)

    def sampled(self, x):
        point = self.points[self.rng.integers(len(self.points))]
        return self._slope((x - point) / self.scale)


@pytest.mark.fast(2)
@pytest.mark.parametrize("reselect", [True, False], ids=["Ok-Topk", "SparCML"])
@pytest.mark.parametrize("k", [6, 9])
def test_top_k_sgd_stays_within_theorem_c_4_and_lemma_c_3(reselect, k):
    """Run Algorithm 2 of Ok-Topk, or Algorithm 1 of SparCML for means; also return its constants."""
    size, ranks, steps = 10, 4, 2_000
    task = Logarithms(size, scale=4.0)
    rates = [0.5 / math.sqrt(1 + t) for t in range(steps)]
    v, x = np.full(size, 2.0), np.full(size, 2.0)
    residuals = np.zeros((ranks, size))
    gap = task.value(v)  # f >= 0
    gamma = most_xi = 0.0
    moved, drifts, squares = [], [], []
    for rate in rates:
        squares.append(float(np.sum(task.gradient(v) ** 2)))
        gradients = np.stack([task.sampled(v) for _ in range(ranks)])
        accumulated = residuals + rate * gradients
        sent = np.stack([top(one, k) for one in accumulated])
        update = sent.mean(axis=0)
        if reselect:
            update = top(update, k)
        mean = accumulated.mean(axis=0)
        gamma = max(gamma, np.linalg.norm(mean - top(mean, k)) / np.linalg.norm(mean))
        step = rate * gradients.mean(axis=0)
        most_xi = max(most_xi, np.linalg.norm(top(mean, k) - update) / np.linalg.norm(step))
        # entries that do not reach the sum stay in the residual, including those that the second
        # Topk drops
        residuals = accumulated - np.where(update != 0, sent, 0.0)
        v, x = v - update, x - step
        moved.append(float(np.linalg.norm(step)))
        drifts.append(float(np.sum((v - x) ** 2)))
        np.testing.assert_allclose(v - x, residuals.mean(axis=0), atol=1e-12)
    assert most_xi > 0 and 0 < gamma <= top_k_gamma(k, size)
    constants = {"gamma": gamma, "xi": most_xi}
    for t in (1, 2, 10, 100, steps):
        assert drifts[t - 1] <= lemma_c_3(moved[:t], **constants)
    weighted = float(np.dot(rates, squares)) / sum(rates)
    bound = theorem_c_4(
        rates,
        gap=gap,
        smoothness=task.smoothness,
        second_moment=task.second_moment,
        **constants,
    )
    assert weighted <= bound
    assert 2 * gamma**2 < 1 and condition_6(rates, gamma) < 5
    assert min(squares) <= bound


def test_lemma_c_3_fails_where_xi_is_divided_by_p():
    """Almost all of the vector is sent, but large entries that cancel displace one that all share."""
    size, ranks = 100, 4
    gradients = [torch.full((size,), 10.0 * (-1) ** rank) for rank in range(ranks)]
    for gradient in gradients:
        gradient[0] = 1.0
    k, gamma = size - 1, top_k_gamma(size - 1, size)
    found = xi(gradients, gradients, k, reselect=False)
    assert found == pytest.approx(1.0)
    # one step at rate 1 moves x by the mean gradient, and does not move v at all
    step = float(torch.stack(gradients).mean(0).norm())
    drift = step**2
    assert drift <= lemma_c_3([step], gamma, found)
    assert drift > 4 * lemma_c_3([step], gamma, found, ranks=ranks)


def test_gamma_is_reached_by_equal_entries_and_by_no_others():
    rng = np.random.default_rng(0)
    for k, n in ((1, 2), (10, 1000), (7, 7)):
        equal = np.ones(n)
        left = np.linalg.norm(equal - top(equal, k)) / np.linalg.norm(equal)
        assert left == pytest.approx(top_k_gamma(k, n))
        drawn = rng.normal(size=n)
        left = np.linalg.norm(drawn - top(drawn, k)) / np.linalg.norm(drawn)
        assert left <= top_k_gamma(k, n)


def test_the_bound_says_nothing_at_usual_densities():
    """With 2 gamma^2 > 1, the constant D doubles every step or two, however well the training goes."""
    task = {"gap": 1.0, "smoothness": 1.0, "second_moment": 1.0, "xi": 0.0}
    gamma = top_k_gamma(1, 100)
    assert theorem_c_4([0.1] * 100, gamma=gamma, **task) > 1e20
    assert theorem_c_4([0.1] * 100, gamma=top_k_gamma(60, 100), **task) < 10


@pytest.mark.slow
@pytest.mark.parametrize("model", ["digits", "text"])
def test_error_feedback_evens_out_what_is_accumulated(model):
    """Unsent entries grow until they are sent, so the k largest hold ever less of the whole."""
    training = pytest.importorskip("sparsync_papers.reproduce.one_process")
    recipe = {"digits": training.digits_recipe, "text": training.text_recipe}[model]()
    run = training.SimulatedTraining(
        recipe, resolve("oktopk"), ranks=4, density=0.01, steps=60, seed=0
    )
    k, gammas = run.units[0].entries(0.01), []
    for _ in range(60):
        gradients = run.gradients()
        mean = torch.stack(run.accumulated(gradients)).mean(0).double().numpy()
        gammas.append(np.linalg.norm(mean - top(mean, k)) / np.linalg.norm(mean))
        run.apply(gradients)
    first, last = {"digits": (0.23, 0.83), "text": (0.48, 0.96)}[model]
    assert gammas[0] == pytest.approx(first, abs=0.05)
    assert max(gammas[-10:]) == pytest.approx(last, abs=0.05)
    assert max(gammas) < top_k_gamma(1, 100)


def test_condition_6_is_the_sum_as_printed():
    rates = [1 / (1 + t) ** 0.7 for t in range(30)]
    for gamma in (0.3, 0.6, 0.9):
        sums = [
            sum((2 * gamma**2) ** j * rates[t - j] ** 2 for j in range(1, t + 1)) / rates[t]
            for t in range(1, len(rates))
        ]
        assert condition_6(rates, gamma) == pytest.approx(max(sums))


# ---- SparCML, section 5.3 and appendix B ------------------------------------------------------------


def test_sparsity_alone_saves_at_most_2_over_kappa():
    """A sum with delta entries needs delta words; a dense allreduce needs 2 N (P - 1) / P."""
    n, p = 10**6, 1024
    dense = 2 * n * (p - 1) / p
    least = sum_bound_words(Job(n, n // 4, p, result=n))
    assert dense / least == pytest.approx(lemma_5_2_speedup() * (p - 1) / p)
    assert lemma_5_2_speedup() == 4.0  # kappa = 1/2: indices as wide as values
    assert lemma_5_2_speedup(index_bytes=4, value_bytes=8) == 3.0


@pytest.mark.parametrize(("k", "n", "p"), [(5, 512, 8), (64, 512, 16), (1, 50, 3)])
def test_the_expected_size_of_a_sum_is_the_alternating_sum_and_the_mean_of_draws(k, n, p):
    printed = n * sum((-1) ** (i - 1) * math.comb(p, i) * (k / n) ** i for i in range(1, p + 1))
    assert expected_union(k, n, p) == pytest.approx(printed, rel=1e-9)
    rng = np.random.default_rng(0)
    sizes = [
        len(set(np.concatenate([rng.choice(n, k, replace=False) for _ in range(p)])))
        for _ in range(400)
    ]
    deviation = np.std(sizes) / math.sqrt(len(sizes))
    assert abs(np.mean(sizes) - printed) <= 4 * deviation


# ---- WAGMA ------------------------------------------------------------------------------------------


def test_wagma_as_it_is_analysed_stays_within_theorem_4_6_and_lemma_4_5():
    """Average S random ranks, with the others' models one gradient old, and all of them every tau."""
    ranks, group, period, steps = 4, 2, 2, 16_384
    task = Logarithms(4, scale=4.0, seed=1)
    setting = {
        "gap": task.value(np.full(4, 2.0)),
        "smoothness": task.smoothness,
        "second_moment": task.second_moment,
        "group_size": group,
        "world_size": ranks,
        "sync_period": period,
    }
    rate = ranks / math.sqrt(steps)
    models, late = np.full((ranks, 4), 2.0), np.zeros((ranks, 4))  # late: each rank's last update
    squares, apart = [], 0.0
    spread = lemma_4_5(rate, period, world_size=ranks, second_moment=task.second_moment)
    for t in range(steps):
        mean = models.mean(axis=0)
        squares.append(float(np.sum(task.gradient(mean) ** 2)))
        apart = max(apart, float(np.sum((models - mean) ** 2)))
        chosen = task.rng.choice(ranks, group, replace=False)
        older, before = models + late, models.copy()
        for i in chosen:
            others = sum(older[j] for j in chosen if j != i)
            late[i] = rate * task.sampled(before[i])
            models[i] = (before[i] + others) / group - late[i]
        if (t + 1) % period == 0:
            models[:], late[:] = models.mean(axis=0), 0.0
    bound = theorem_4_6(steps, **setting)
    assert bound < task.second_moment, "else it says nothing"
    assert float(np.mean(squares)) <= bound
    assert 0 < apart <= spread
    assert theorem_4_1(bound, **setting) == pytest.approx(steps, rel=1e-3)


def test_models_of_wagma_stay_as_near_as_lemma_4_5_says():
    """Run the scheme itself with late ranks, and steps as long as the second moment allows."""
    ranks, period, rate, size = 8, 5, 0.1, 3

    def delay(step, rank):
        return 0.5 if (step + rank) % 3 == 0 else 0.0

    async def program(comm):
        averager, vector = Wagma(group_size=2, sync_period=period), torch.zeros(size)
        generator = torch.Generator().manual_seed(comm.rank)
        await averager.begin(comm, vector, 0)
        seen = []
        for step in range(20):
            await comm.compute(0.1 + delay(step, comm.rank))
            gradient = torch.nn.functional.normalize(torch.randn(size, generator=generator), dim=0)
            vector = await averager.average(comm, vector - rate * gradient, step)
            seen.append(vector)
        return torch.stack(seen)

    models = torch.stack(simulate(program, ranks).results)
    apart = (models - models.mean(0)).square().sum(dim=(0, 2))
    bound = lemma_4_5(rate, period, world_size=ranks, second_moment=1.0)
    assert 0 < float(apart.max()) <= bound
    assert apart[period - 1 :: period].tolist() == pytest.approx([0.0] * 4, abs=1e-10)


def test_theorem_4_6_refuses_too_few_steps_and_says_something_only_beyond_64_s_to_the_4():
    task = {"gap": 0.0, "smoothness": 0.0, "second_moment": 1.0, "sync_period": 1}
    at = partial(theorem_4_6, group_size=4, world_size=4, **task)
    assert at(64 * 4**4) == pytest.approx(1.0)
    with pytest.raises(ConfigurationError, match=r"from P\^4 tau\^4 = 256 interactions on"):
        at(255)
