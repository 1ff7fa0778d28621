"""Ok-Topk, Figure 5 and section 5.2: xi of Assumption 1, and the fill-in of TopkDSA, in training."""

from __future__ import annotations

from statistics import fmean

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.presets import oktopk, resolve
from sparsync_papers.reproduce import Comparison, Outcome, Panel, Settings, Table, artifact, joined
from sparsync_papers.reproduce.training import (
    SimulatedTraining,
    digits_recipe,
    lstm_recipe,
    text_recipe,
)

_RANKS, _STEPS = 4, 200
_DENSITIES = (0.01, 0.02)
_WINDOW = 20  # steps that a point of the conclusion averages (the figure: thousands)


def xi(accumulated: list[Tensor], gradients: list[Tensor], k: int) -> float:
    """Return the least xi with which Assumption 1 (Equation 5) holds on this step.

    ``|Topk(mean of a_i) - Topk(mean of Topk(a_i))| / |mean of g_i|``; the learning rate cancels where
    residuals are kept in the gradient's units.

    Example:
        >>> same = [torch.tensor([3.0, 1.0])] * 2
        >>> xi(same, same, k=1)
        0.0
    """
    mean = torch.stack(gradients).mean(0)
    wanted = _top(torch.stack(accumulated).mean(0), k)
    reached = _top(torch.stack([_top(mine, k) for mine in accumulated]).mean(0), k)
    return float((wanted - reached).norm() / mean.norm().clamp(min=torch.finfo(mean.dtype).tiny))


def _top(values: Tensor, k: int) -> Tensor:
    """Return the k largest at their places, zeros elsewhere."""
    chosen, positions = torch.zeros_like(values), kernels.top(values, k)
    chosen[positions] = values[positions]
    return chosen


@artifact(
    "oktopk-fig5",
    "xi stays below P, rises at first and then is stable: Assumption 1 holds",
    minutes=2.0,
)
def figure_5(settings: Settings) -> Outcome:
    """Values of xi over training."""
    recipes, steps = (digits_recipe(), text_recipe()), settings.pick(_STEPS, 4)
    ranks = settings.pick(_RANKS, 2)
    rows = Table()
    for recipe, density in settings.track([(r, d) for r in recipes for d in _DENSITIES]):
        training = SimulatedTraining(
            recipe, oktopk(), ranks=ranks, density=density, steps=steps, seed=settings.seed
        )
        k = training.units[0].entries(density)
        for step in range(steps):
            gradients = training.gradients()
            accumulated = training.accumulated(gradients)
            value = xi(accumulated, [g.clone() for (g,) in gradients], k)
            training.apply(gradients)
            rows.append(
                {"model": recipe.name, "density, %": 100 * density, "step": step, "xi": value}
            )
    panels = []
    for recipe in recipes:
        series = {f"density {100 * d:g} %": _curve(rows, recipe.name, d) for d in _DENSITIES}
        panels.append(Panel(recipe.name, "step", "xi", series, level=float(ranks)))
    return Outcome(
        rows,
        _compare_xi(rows, steps, ranks, settings.pick(_WINDOW, 1)),
        {"steps": steps, "ranks": ranks},
        f"Models of this size, {steps} steps on {ranks} virtual ranks; xi is exact, of all elements on "
        "every step.",
        panels,
    )


def _curve(rows: Table, model: str, density: float) -> list[tuple[float, float]]:
    return rows.points("step", "xi", {"model": model, "density, %": 100 * density})


def _compare_xi(rows: Table, steps: int, ranks: int, window: int) -> list[Comparison]:
    names = list(dict.fromkeys(str(row["model"]) for row in rows))

    def mean(model: str, density: float, start: int, stop: int) -> float:
        """Average over the steps from start to stop."""
        return fmean(y for _, y in _curve(rows, model, density)[start:stop])

    largest = max(
        mean(name, density, start, start + window)
        for name in names
        for density in _DENSITIES
        for start in range(0, steps, window)
    )
    single = max(rows.column("xi"))
    half, late = steps // 2, steps - steps // 4
    low, high = ([mean(name, d, half, steps) for name in names] for d in _DENSITIES)
    sparser = _DENSITIES[0]
    growth = [mean(n, sparser, late, steps) / mean(n, sparser, half, late) for n in names]
    where = "section 5.1"
    return [
        Comparison(
            "xi",
            "below P for all three models",
            where,
            f"at most {largest:.2f} on average of {window} steps ({single:.2f} on one), P = {ranks}",
            largest < ranks,
            "P is small here, and xi grows little with P",
        ),
        Comparison(
            "xi over training",
            '"increases quickly in the first few epochs [...] and then turns to be stable"',
            where,
            f"last quarter over the one before: {joined(growth)}",
            all(ratio < 1.25 for ratio in growth),
            f"still growing: {steps} steps, and the gradient shrinks",
        ),
        Comparison(
            "xi at a higher density",
            '"generally smaller than that with a lower density"',
            where,
            f"1 %: {joined(low)}; 2 %: {joined(high)}",
            all(b <= a for a, b in zip(low, high, strict=True)),
            "the difference is within what single steps scatter",
        ),
    ]


@artifact("oktopk-fill-in", "sums of sparse gradients fill in by more than ten times", minutes=1.5)
def fill_in(settings: Settings) -> Outcome:
    """Density of the output of TopkDSA (section 5.2)."""
    steps = settings.pick(40, 2)
    rows = Table()
    comparisons = []
    cases = (
        (digits_recipe(8), "VGG-16, 1 % on 16 ranks", 16, 0.01, 0.132),
        (lstm_recipe(2), "LSTM, 2 % on 32 ranks", 32, 0.02, 0.345),
    )
    for recipe, model, ranks, density, paper in settings.track(cases):
        ranks = settings.pick(ranks, 2)
        training = SimulatedTraining(
            recipe,
            resolve("topkdsa"),
            ranks=ranks,
            density=density,
            steps=steps,
            seed=settings.seed,
        )
        size, found = training.units[0].size, []
        for step in range(steps):
            (average,) = training.apply(training.gradients())
            found.append(int(average.values.count_nonzero()) / size)
            rows.append(
                {"model": recipe.name, "P": ranks, "step": step, "density, %": 100 * found[-1]}
            )
        mean = fmean(found)
        why = (
            f"{mean / density:.0f} times the local density; the paper's {paper / density:.0f} times"
        )
        comparisons.append(
            Comparison(
                f"density of TopkDSA's output, {model}",
                f"{100 * paper:.1f} %",
                "section 5.2",
                f"{100 * mean:.1f} %",
                mean > 3 * density and paper / 3 < mean < 3 * paper,
                why,
                why,
            )
        )
    series = rows.curves("step", "density, %", "model")
    return Outcome(
        rows,
        comparisons,
        {"steps": steps},
        f"Models of this size, the first {steps} steps; the conclusion counts as the same if the density "
        "is within three times the paper's.",
        [Panel("density of the sum of all ranks' top-k", "step", "density, %", series)],
    )
