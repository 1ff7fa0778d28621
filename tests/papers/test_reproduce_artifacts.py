"""Run every artifact in its quick form, and check the computations behind the artifacts."""

from dataclasses import replace

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from sparsync.cli.workloads.workload import Draw
from sparsync.presets import resolve
from sparsync_papers.reproduce import Settings
from sparsync_papers.reproduce.catalogue import ARTIFACTS
from sparsync_papers.reproduce.command import find, reproduce
from sparsync_papers.reproduce.one_process import (
    SimulatedTraining,
    Way,
    digits_recipe,
    lstm_recipe,
    text_recipe,
    train_all,
)
from sparsync_papers.reproduce.redsync_phases import (
    QUANTISED_RGC,
    RGC,
    lstm,
    phases,
    predicted_phases,
)

FAST = {"sparcml-fig7", "redsync-fig7", "redsync-fig8-9", "redsync-fig10", "wagma-control"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(a.name, marks=() if a.name in FAST else pytest.mark.slow) for a in ARTIFACTS],
)
def test_every_artifact_runs_quickly_and_is_drawn(name):
    listed, asked, totals = find(name), set(), []

    class Watched(Settings):
        def steps_or(self, whole, quick):
            asked.add(whole)
            return super().steps_or(whole, quick)

    def run(settings):
        return listed.run(replace(settings, advance=totals.append))

    (finished,) = reproduce([replace(listed, run=run)], Watched(quick=True), draw=True)
    assert finished.error == ""
    assert asked == ({listed.steps} if listed.steps else set())  # as --list shows them
    assert totals == [len(totals)] * len(totals), "progress ends at its total"
    outcome = finished.outcome
    assert outcome.rows and outcome.comparisons and outcome.differs
    assert len({tuple(row) for row in outcome.rows}) == 1, "rows of equal keys"
    assert (finished.picture is None) == (not outcome.panels)


@pytest.mark.parametrize("scheme", [RGC, QUANTISED_RGC], ids=lambda scheme: scheme.name)
def test_redsync_s_closed_form_is_what_the_simulator_takes(scheme):
    simulated, predicted = (f(lstm(), scheme, 4) for f in (phases, predicted_phases))
    for stage, seconds in simulated.items():
        assert predicted[stage] == pytest.approx(seconds, rel=0.05), stage


# ---- training in one process ----------------------------------------------------------------------


@pytest.mark.parametrize("make", [digits_recipe, lstm_recipe, text_recipe])
def test_a_dense_training_is_one_rank_with_the_united_batch(make):
    recipe = make(2)
    many = SimulatedTraining(recipe, resolve("dense"), ranks=3, density=1.0, steps=1)
    plain = recipe.make_model(0)
    losses = []
    for rank in range(3):
        inputs, targets = recipe.workload.batch(Draw(0, 0, rank, 3, 2))
        losses.append(recipe.workload.loss(plain(inputs), targets) / 3)
    sum(losses).backward()
    many.apply(many.gradients())
    for mine, expected in zip(many.model.parameters(), plain.parameters(), strict=True):
        if many.clip is None:
            torch.testing.assert_close(mine.grad, expected.grad, rtol=1e-4, atol=1e-6)
    assert many.losses == pytest.approx([sum(losses).item()], rel=1e-5)
    assert many.bytes_sent[0] > 0


def test_a_sparse_training_keeps_the_law_and_replicas():
    training = SimulatedTraining(
        digits_recipe(4), resolve("oktopk"), ranks=2, density=0.01, steps=2
    )
    for _ in range(2):
        gradients = training.gradients()
        accumulated = sum(training.accumulated(gradients))
        (average,) = training.apply(gradients)
        kept = sum(reducer.residuals[0].value for reducer in training.reducers)
        torch.testing.assert_close(2 * average.to_dense() + kept, accumulated)
        assert torch.equal(gradients[0][0], gradients[1][0])


def test_the_learning_rate_grows_and_falls_linearly_if_it_decays():
    rates = []
    for decay in (False, True):
        training = SimulatedTraining(
            digits_recipe(2), resolve("dense"), ranks=1, density=1.0, steps=30, decay=decay
        )
        for _ in range(30):
            training.apply(training.gradients())
            rates.append(training.optimizer.param_groups[0]["lr"] / training.lr)
    assert rates[:30] == [0.5] + 29 * [1.0]
    assert rates[30:] == pytest.approx([0.5] + [n / 29 for n in range(29, 0, -1)])


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_first_steps_exchange_all_entries(nesterov):
    """During those steps, RGC is dense training, with plain and with Nesterov momentum."""
    recipe = replace(digits_recipe(2), nesterov=nesterov)
    weights = {}
    for name, whole in (("dense", 0), ("redsync", 2), ("redsync", 0)):
        training = SimulatedTraining(
            recipe, resolve(name), ranks=2, density=0.01, steps=2, whole=whole
        )
        for _ in range(2):
            training.apply(training.gradients())
        weights[name, whole] = parameters_to_vector(training.model.parameters())
    torch.testing.assert_close(weights["redsync", 2], weights["dense", 0])
    assert (weights["redsync", 0] - weights["dense", 0]).abs().max() > 1e-4


def test_several_seeds_give_the_mean_of_their_runs_from_their_models():
    recipe, ways = digits_recipe(2), {"a": Way(resolve("oktopk"), 0.05), "b": Way(resolve("dense"))}
    settings = Settings(seed=1, quick=True)
    asked = []

    def initial(seed):
        asked.append(seed)
        return recipe.make_model(seed + 5)

    both = train_all(recipe, ways, replace(settings, seeds=2), 2, evaluations=2, initial=initial)
    single = [
        train_all(recipe, ways, replace(settings, seed=s), 2, evaluations=2, initial=initial)
        for s in (1, 2)
    ]
    assert asked == [1, 2, 1, 2]
    for name, mean in both.items():
        first, second = (runs[name] for runs in single)
        assert first.losses != second.losses
        assert mean.losses == [
            (x + y) / 2 for x, y in zip(first.losses, second.losses, strict=True)
        ]
        assert mean.evaluation.loss == pytest.approx(
            (first.evaluation.loss + second.evaluation.loss) / 2
        )
        assert mean.curve[-1] == (2.0, pytest.approx(mean.evaluation.accuracy))


@pytest.mark.parametrize("name", ["sparcml-fig5", "redsync-table2"])
def test_a_training_says_its_steps_and_seeds(name):
    outcome = find(name).run(Settings(quick=True, steps=4, seeds=2))
    assert outcome.settings["steps"] == 4 and outcome.settings["seeds"] == 2


def test_counted_volumes_are_those_of_table_1():
    outcome = find("oktopk-table1").run(Settings(quick=True))
    for row in outcome.rows:
        if row["algorithm"] in ("dense", "allgather", "gtopk"):
            assert row["words per k"] == pytest.approx(row["to"], rel=0.01)
        if row["algorithm"] == "oktopk":
            assert row["words per k"] <= row["to"]
