"""Fit the study's model of step counts relative to dense to the frontier's curves.

    python benchmarks/steps.py     (seconds; writes benchmarks/steps.md, and coefficients into papers/)

The data are the runs in `frontier/results.jsonl`; nothing is trained. An observation is the ratio
of a method's steps to dense's steps, up to the loss that dense training with the same optimizer has
after half, two thirds and all of its run. The method's steps are the fewest in its runs of any
length, averaged over seeds. If no run reaches the loss, the length of the longest run gives a lower
bound. Settings in which dense's own loss rises along the way are excluded. The logarithm of the
ratio is linear in the features. A bound counts as the value expected beyond it (a Tobit model),
coefficients have a normal prior around 0, and each task adds its own term. Methods that the model
does not describe are excluded (signs, adaptive periods, 1-bit Adam). Bits per value and samples per
rank had no measurable effect. Features and priors were chosen by the errors on held-out tasks, so
errors on a new task may be larger.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from frontier.methods import METHODS, gradients, power_sgd, selected_twice, updates
from frontier.report import Entry, entries, reached, table, value_at
from frontier.results import Results, Row
from rich.console import Console

from sparsync_papers.time_to_loss import steps_to_loss as model
from sparsync_papers.time_to_loss.steps_to_loss import Recipe, features

HERE = Path(__file__).parent
DATA, OUT, PACKAGE = HERE / "frontier" / "results.jsonl", HERE / "steps.md", Path(model.__file__)
BEGIN, END = "# begin: fitted by benchmarks/steps.py\n", "# end\n"
PARTS = (1 / 2, 2 / 3, 1.0)  # parts of dense's run at whose losses curves are compared
NOISE = 1.01  # a dense curve that rises by more than this factor makes no progress
TASK_DEVIATION = 0.15  # standard deviation of each task's own term, which predictions do not know
FAMILY_DEVIATION = 1.0  # standard deviation of the prior of a family's coefficient
DEVIATIONS = {  # the same for all other coefficients
    **dict.fromkeys(
        (
            "period",
            "period of Muon",
            "period under momentum",
            "delay",
            "selection",
            "length",
            "matrix rank",
        ),
        0.25,
    ),
    **dict.fromkeys(("ranks", "ranks of updates"), 0.1),  # only one small model did not have 4
}
LEAST_SPREAD = 0.05  # smallest spread of the logarithm around the fit
ROUNDS = 100  # rounds of expectation and maximisation
DIGITS = 4  # decimal places of the coefficients in the package


@dataclass(frozen=True)
class Observation:
    """A measured ratio of step counts, or a lower bound of it."""

    task: str
    method: str
    optimizer: str
    ranks: int
    batch: int
    steps: int  # length of dense's run
    part: float  # part of dense's run that determines the loss
    recipe: Recipe
    ratio: float
    bound: bool = False
    weight: float = 1.0

    @property
    def features(self) -> dict[str, float]:
        """The features of the study's model."""
        return features(self.recipe, self.optimizer, self.ranks, self.steps)


# SGD with momentum 0.9: steps to dense's loss after 100 steps (benchmarks/train_lab.md)
OF_SGD = (
    Observation("train_lab", "budgeted", "sgd", 4, 8, 100, 1.0, Recipe("sparse gradients"), 1.05),
    Observation("train_lab", "powersgd-r4", "sgd", 4, 8, 100, 1.0, Recipe("low-rank"), 1.16),
)


def recipe_of(name: str) -> Recipe | None:
    """Return the study's recipe for a frontier method, or None if the study does not describe it."""
    method = METHODS[name]
    given = {**method.settings, **method.untuned}
    if method.make is power_sgd:
        return Recipe("low-rank", matrix_rank=given["rank"])
    if method.make is gradients:
        return Recipe("sparse gradients")
    period = given.get("period")
    if (
        method.make not in (updates, selected_twice)
        or not isinstance(period, int)
        or "dct" in given
    ):
        return None
    momentum = given.get("momentum", 0.0) != 0
    return Recipe(
        "updates" if given.get("noise_correction") else "outer momentum" if momentum else "local",
        period,
        delayed=given.get("delay", 0) > 0,
        selects=given["density"] < 1 if "density" in given else True,
    )


def observations(rows: Sequence[Row]) -> list[Observation]:
    """Return the ratios of all methods that the model describes, if dense has a matching run."""
    found, finished = list(OF_SGD), [row for row in rows if not row["lab"]]
    for place in dict.fromkeys((row["task"], row["ranks"], row["batch"]) for row in finished):
        here = [row for row in finished if (row["task"], row["ranks"], row["batch"]) == place]
        runs = {steps: entries(here, steps) for steps in sorted({row["steps"] for row in here})}
        for (steps, made), (name, kind) in product(runs.items(), keys_of(runs)):
            dense, recipe = made.get(("dense", kind)), recipe_of(name)
            own = [its[name, kind] for its in runs.values() if (name, kind) in its]
            longest = max(entry.best[0]["steps"] for entry in own)
            if recipe and dense and progresses(dense) and longest >= steps:
                task, ranks, batch = place
                seen = Observation(task, name, kind, ranks, batch, steps, 1.0, recipe, 1.0)
                found += ratios(seen, dense, own)
    return found


def keys_of(runs: Mapping[int, Mapping[tuple[str, str], Entry]]) -> list[tuple[str, str]]:
    """Return the methods and optimizers of runs of any length."""
    return sorted({key for made in runs.values() for key in made})


def progresses(dense: Entry) -> bool:
    """Return whether dense's loss falls throughout; if not, its steps to a loss depend on chance."""
    return not dense.diverged and all(
        after <= NOISE * before
        for row in dense.best
        for (_, before), (_, after) in pairwise(row["curve"])
    )


def ratios(place: Observation, dense: Entry, own: Sequence[Entry]) -> Iterator[Observation]:
    """Yield the observations of a method in one setting; their weights add up to one."""
    for part in PARTS:
        aim = part * place.steps
        goals = {seed: value_at(row["curve"], aim) for seed, row in dense.by_seed.items()}
        fewest, longest = math.inf, 0
        for entry in own:
            shared = [seed for seed in entry.by_seed if seed in goals]
            steps = [reached(entry.by_seed[seed].get("curve", ()), goals[seed]) for seed in shared]
            there = [step for step in steps if step is not None]
            if shared and len(there) == len(shared):
                fewest = min(fewest, fmean(there))
            elif shared:
                longest = max(longest, entry.best[0]["steps"])
        never = fewest == math.inf
        if longest or not never:
            ratio = (longest if never else fewest) / aim
            yield replace(place, part=part, ratio=ratio, bound=never, weight=1 / len(PARTS))


# ---- the fit -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """The coefficients by feature, and the spread of a ratio's logarithm around the model."""

    coefficients: Mapping[str, float]
    spread: float

    def log_ratio(self, seen: Observation) -> float:
        """Predict a ratio's logarithm; features that were not in the data add nothing."""
        return sum(self.coefficients.get(name, 0.0) * x for name, x in seen.features.items())


def numbers(given: Sequence[Any]) -> torch.Tensor:
    """Return a tensor in double precision."""
    return torch.tensor(given, dtype=torch.float64)


def fit(data: Sequence[Observation]) -> Fit:
    """Fit by least squares with a prior; replace bounds by the values expected beyond them."""
    names = list(dict.fromkeys(name for seen in data for name in seen.features))
    tasks = list(dict.fromkeys(seen.task for seen in data))
    deviation = [DEVIATIONS.get(name, FAMILY_DEVIATION) for name in names]
    deviation = numbers(deviation + [TASK_DEVIATION] * len(tasks))
    x = numbers(
        [
            [seen.features.get(name, 0.0) for name in names] + [seen.task == task for task in tasks]
            for seen in data
        ]
    )
    measured = numbers([math.log(seen.ratio) for seen in data])
    weight = numbers([seen.weight for seen in data])
    bound = torch.tensor([seen.bound for seen in data])
    weighted, normal = x * weight[:, None], torch.distributions.Normal(0.0, 1.0)
    y, unsure, spread, solved = measured, torch.zeros_like(measured), 0.2, x[0]
    for _ in range(ROUNDS):
        prior = torch.diag((spread / deviation) ** 2)
        solved = torch.linalg.solve(weighted.T @ x + prior, weighted.T @ y)
        predicted = x @ solved
        variance = (weight * ((y - predicted) ** 2 + unsure)).sum() / weight.sum()
        spread = max(float(variance.sqrt()), LEAST_SPREAD)
        z = ((measured - predicted) / spread).clamp(-8, 5)
        hazard = normal.log_prob(z).exp() / (1 - normal.cdf(z)).clamp_min(1e-9)
        y = torch.where(bound, predicted + spread * hazard, measured)
        unsure = torch.where(bound, spread**2 * (1 + z * hazard - hazard**2), 0.0).clamp_min(0)
    return Fit(dict(zip(names, solved.tolist(), strict=False)), spread)


def left_out(data: Sequence[Observation]) -> list[tuple[Observation, float]]:
    """Return every observation with the log ratio that a fit to all other tasks predicts."""
    fits = {name: fit([s for s in data if s.task != name]) for name in {s.task for s in data}}
    return [(seen, fits[seen.task].log_ratio(seen)) for seen in data]


def likely(errors: Sequence[float]) -> float:
    """Return the factor that contains 8 of 10 errors of held-out tasks."""
    return math.exp(sorted(errors)[math.ceil(0.8 * len(errors)) - 1])


def written(data: Sequence[Observation], found: Fit) -> str:
    """Return the lines of the package's file, formatted as ruff would."""
    factor = likely(
        [abs(math.log(seen.ratio) - log) for seen, log in left_out(data) if not seen.bound]
    )
    return "\n".join(
        [
            "COEFFICIENTS: Final[Mapping[str, float]] = MappingProxyType(",
            "    {",
            *(f'        "{name}": {c:.{DIGITS}f},' for name, c in found.coefficients.items()),
            "    }",
            ")",
            f"LIKELY: Final = {factor:.2f}  # factor, either way",
            "",
        ]
    )


# ---- the report --------------------------------------------------------------------------------------


def shown(seen: Observation) -> str:
    """Format a ratio, or its bound."""
    return f"{'> ' if seen.bound else ''}{seen.ratio:.2f}"


def report(data: Sequence[Observation], found: Fit) -> str:
    """Return the page."""
    others = left_out(data)
    errors = {}
    for seen, predicted in others:
        if not seen.bound:
            errors.setdefault(seen.task, []).append(abs(math.log(seen.ratio) - predicted))
    every = [error for its in errors.values() for error in its]
    heads = ["task left out", "", "observations", "root mean square", "within 25 %"]
    rows = [
        [
            name,
            "",
            str(len(its)),
            f"{math.sqrt(fmean(e * e for e in its)):.2f}",
            f"{fmean(e <= math.log(1.25) for e in its):.0%}",
        ]
        for name, its in [*errors.items(), ("all", every)]
    ]
    places: dict[tuple[Any, ...], list[tuple[Observation, float]]] = {}
    for seen, predicted in others:
        key = (seen.task, seen.steps, seen.ranks, seen.batch, seen.method, seen.optimizer)
        places.setdefault(key, []).append((seen, predicted))
    cells = []
    for (task, steps, ranks, batch, method, kind), its in places.items():
        by_part = {seen.part: shown(seen) for seen, _ in its}
        cells.append(
            [
                f"{task}, {ranks} x {batch}, {steps} steps",
                f"{method}, {kind}",
                *(by_part.get(part, "-") for part in PARTS),
                f"{math.exp(found.log_ratio(its[0][0])):.2f}",
                f"{math.exp(its[0][1]):.2f}",
            ]
        )
    text = (__doc__ or "").split("\n\n", 2)[2].strip()
    lines = [
        "# Steps to a loss, relative to dense",
        "",
        f"`python benchmarks/steps.py`: {len(data)} observations, {sum(s.bound for s in data)} of them",
        f"bounds; spread of the logarithm around the fit {found.spread:.2f}.",
        "",
        text,
        "",
        "## The fit",
        "",
        *table(
            ["feature", "", "coefficient"],
            [[name, "", f"{value:+.3f}"] for name, value in found.coefficients.items()],
        ),
        "",
        "Families are at a period of 2 (30 with momentum), 4 ranks and 300 steps. The coefficient of",
        "the period is per unit of its square root (with momentum, per factor e), that of ranks per",
        "doubling, that of length per factor 10, and that of the matrix rank per halving.",
        "",
        "## Errors on held-out tasks",
        "",
        "Errors are those of the ratio's logarithm, without bounds.",
        "",
        *table(heads, rows),
        "",
        f"8 of 10 are within a factor {likely(every):.2f}, which `sparsync time-to-loss` prints.",
        "",
        "## Measured, fitted, and predicted with the task held out",
        "",
        *table(
            ["task", "method", "at 1/2", "at 2/3", "at its end", "fitted", "without"],
            cells,
        ),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Fit, report, and write the coefficients into the package."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    data = observations(Results(DATA).rows)
    found = fit(data)
    OUT.write_text(report(data, found), encoding="utf-8")
    head, rest = PACKAGE.read_text("utf-8").split(BEGIN)
    tail = rest.split(END)[1]
    PACKAGE.write_text(f"{head}{BEGIN}{written(data, found)}{END}{tail}", encoding="utf-8")
    Console().print(f"wrote {OUT} and {PACKAGE}", markup=False)


if __name__ == "__main__":
    main()
