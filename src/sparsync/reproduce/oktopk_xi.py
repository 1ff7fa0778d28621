"""Ok-Topk, Figure 5 and section 5.2: xi of Assumption 1, and the fill-in of TopkDSA, in training."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.presets import oktopk, topkdsa
from sparsync.reproduce.base import (
    Artifact,
    Comparison,
    Outcome,
    Panel,
    Row,
    Settings,
    Stated,
    number,
    points,
)
from sparsync.reproduce.training import (
    Recipe,
    SimulatedTraining,
    digits_recipe,
    lstm_recipe,
    text_recipe,
)

__all__ = ["FIGURE_5", "FILL_IN", "xi"]

_RANKS, _STEPS = 4, 200
_DENSITIES = (0.01, 0.02)
_WINDOW = 20  # steps that a point of the conclusion averages (the figure: thousands)

_BELOW_P = Stated("xi", "below P for all three models", "section 5.1")
_STABLE = Stated(
    "xi over training",
    '"increases quickly in the first few epochs [...] and then turns to be stable"',
    "section 5.1",
)
_DENSER = Stated(
    "xi at a higher density", '"generally smaller than that with a lower density"', "section 5.1"
)
_VGG_FILL = Stated(
    "density of TopkDSA's output, VGG-16, 1 % on 16 ranks", "13.2 %", "section 5.2", (0.132,)
)
_LSTM_FILL = Stated(
    "density of TopkDSA's output, LSTM, 2 % on 32 ranks", "34.5 %", "section 5.2", (0.345,)
)


def xi(accumulated: list[Tensor], gradients: list[Tensor], k: int) -> float:
    """Return the least xi with which Assumption 1 (Equation 5) holds on this step.

    ``|Topk(mean of a_i) - Topk(mean of Topk(a_i))| / |mean of g_i|``; the learning rate cancels where
    residuals are kept in the gradient's units.

    Args:
        accumulated: per rank `[n]`, residual and gradient.
        gradients: per rank `[n]`.
        k: entries of every selection.

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


def _figure_5(settings: Settings) -> Outcome:
    recipes, steps = (digits_recipe(), text_recipe()), settings.pick(_STEPS, 4)
    ranks = settings.pick(_RANKS, 2)
    rows: list[Row] = []
    for recipe in recipes:
        for density in _DENSITIES:
            training = SimulatedTraining(
                recipe, oktopk(), ranks=ranks, density=density, steps=steps, seed=settings.seed
            )
            k = training.units[0].entries(density)
            for step in range(steps):
                gradients = training.gradients()
                accumulated = training.accumulated(gradients)
                value = xi(accumulated, [g.clone() for (g,) in gradients], k)
                training.apply(gradients)
                settings.advance(4 * steps)
                rows.append(
                    {"model": recipe.name, "density, %": 100 * density, "step": step, "xi": value}
                )

    return Outcome(
        rows,
        _compare_xi(rows, steps, ranks, settings.pick(_WINDOW, 1)),
        {"steps": steps, "ranks": ranks},
        f"Models of this size, {steps} steps on {ranks} virtual ranks; xi is exact, of all elements on "
        "every step.",
        [
            Panel(
                recipe.name,
                "step",
                "xi",
                {f"density {100 * d:g} %": _curve(rows, recipe.name, d) for d in _DENSITIES},
                level=float(ranks),
            )
            for recipe in recipes
        ],
    )


def _curve(rows: Sequence[Row], model: str, density: float) -> list[tuple[float, float]]:
    return points(rows, "step", "xi", {"model": model, "density, %": 100 * density})


def _compare_xi(rows: Sequence[Row], steps: int, ranks: int, window: int) -> list[Comparison]:
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
    single = max(number(row, "xi") for row in rows)
    half, quarter = steps // 2, steps // 4
    low, high = ([mean(name, d, half, steps) for name in names] for d in _DENSITIES)
    growth = [
        mean(n, _DENSITIES[0], steps - quarter, steps)
        / mean(n, _DENSITIES[0], half, steps - quarter)
        for n in names
    ]
    stable = all(ratio < 1.25 for ratio in growth)
    denser = all(b <= a for a, b in zip(low, high, strict=True))
    return [
        _BELOW_P.beside(
            f"at most {largest:.2f} on average of {window} steps ({single:.2f} on one), P = {ranks}",
            largest < ranks,
            "" if largest < ranks else "P is small here, and xi grows little with P",
        ),
        _STABLE.beside(
            f"last quarter over the one before: {_list(growth)}",
            stable,
            "" if stable else f"still growing: {steps} steps, and the gradient shrinks",
        ),
        _DENSER.beside(
            f"1 %: {_list(low)}; 2 %: {_list(high)}",
            denser,
            "" if denser else "the difference is within what single steps scatter",
        ),
    ]


def _fill_in(settings: Settings) -> Outcome:
    steps = settings.pick(40, 2)
    cases: list[tuple[Recipe, int, float, Stated]] = [
        (digits_recipe(8), settings.pick(16, 2), 0.01, _VGG_FILL),
        (lstm_recipe(2), settings.pick(32, 2), 0.02, _LSTM_FILL),
    ]
    rows: list[Row] = []
    comparisons = []
    for recipe, ranks, density, stated in cases:
        training = SimulatedTraining(
            recipe, topkdsa(), ranks=ranks, density=density, steps=steps, seed=settings.seed
        )
        size, found = training.units[0].size, []
        for step in range(steps):
            (average,) = training.apply(training.gradients())
            found.append(int(average.values.count_nonzero()) / size)
            rows.append(
                {"model": recipe.name, "P": ranks, "step": step, "density, %": 100 * found[-1]}
            )
            settings.advance(2 * steps)
        mean = fmean(found)
        paper = stated.numbers[0]
        expands = mean > 3 * density and paper / 3 < mean < 3 * paper
        why = (
            f"{mean / density:.0f} times the local density; the paper's {paper / density:.0f} times"
        )
        comparisons.append(stated.beside(f"{100 * mean:.1f} %", expands, why))
    series = {
        recipe.name: points(rows, "step", "density, %", {"model": recipe.name})
        for recipe, *_ in cases
    }
    return Outcome(
        rows,
        comparisons,
        {"steps": steps},
        f"Models of this size, the first {steps} steps; the conclusion counts as the same if the density "
        "is within three times the paper's.",
        [Panel("density of the sum of all ranks' top-k", "step", "density, %", series)],
    )


def _list(values: list[float]) -> str:
    return " and ".join(f"{value:.2f}" for value in values)


FIGURE_5 = Artifact(
    "oktopk-fig5",
    "Ok-Topk",
    "the empirical value of xi over training",
    "xi stays below P, rises at first and then is stable: Assumption 1 holds",
    2.0,
    _figure_5,
)
FILL_IN = Artifact(
    "oktopk-fill-in",
    "Ok-Topk",
    "density of the output of TopkDSA (section 5.2)",
    "sums of sparse gradients fill in by more than ten times",
    1.5,
    _fill_in,
)
