"""Predict how many more steps than dense a method needs to reach a loss, with a fit to loss curves.

    ratio = exp(sum of coefficient x feature)        1: as many steps as dense, same optimizer

``python benchmarks/steps.py`` fits the coefficients to the curves of
``benchmarks/frontier/results.jsonl`` and writes them here; ``benchmarks/steps.md`` shows the data
and the errors for held-out tasks. The curves cover small models (0.1 to 8.4 M parameters), 60 to
3,000 steps and mostly 4 ranks. Outside this range, predictions are guesses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from sparsync.errors import require

__all__ = [
    "COEFFICIENTS",
    "FARTHEST",
    "LIKELY",
    "Family",
    "Optimizer",
    "Ratio",
    "Recipe",
    "features",
    "steps_ratio",
]

Family = Literal["dense", "low-rank", "sparse gradients", "local", "updates", "outer momentum"]
Optimizer = Literal["sgd", "adamw", "muon"]

# the largest ratio that can be measured: at the end of its run, a method reaches the loss that dense has
# in the middle of an equally long run
FARTHEST: Final = 2.0
_SHORTEST, _LONGEST = 60, 3000  # steps of the measured runs of dense
_USUAL_RANKS, _USUAL_STEPS, _USUAL_RANK = 4, 300, 4
_USUAL_PERIOD, _MOMENTUM_PERIOD = 2, 30

# begin: fitted by benchmarks/steps.py
COEFFICIENTS: Final[Mapping[str, float]] = MappingProxyType(
    {
        "sparse gradients": 0.1383,
        "low-rank": 0.1664,
        "matrix rank": 0.2141,
        "updates": 0.0321,
        "period": 0.3494,
        "period of Muon": -0.1187,
        "period under momentum": 0.2247,
        "delay": -0.0705,
        "selection": -0.0408,
        "ranks": 0.3234,
        "ranks of updates": 0.0585,
        "length": -0.1499,
        "local": 0.0756,
        "outer momentum": 0.9133,
        "sparse gradients into moments": 0.8579,
        "low-rank into moments": 0.5180,
    }
)
LIKELY: Final = 1.33  # factor, in either direction
# end


@dataclass(frozen=True)
class Recipe:
    """The properties of a method that determine how many steps it needs.

    Attributes:
        family: "local" averages the changes of local steps; "updates" also makes these steps as
            long as steps with averaged gradients; "outer momentum" averages like "local", and also
            applies an outer momentum to the average.
        period: local steps between exchanges, H.
        delayed: whether an exchange is applied a step or more after it began.
        selects: whether only some of the entries are exchanged.
        matrix_rank: matrix rank of low-rank gradients.
    """

    family: Family
    period: int = 1
    delayed: bool = False
    selects: bool = False
    matrix_rank: int = _USUAL_RANK


@dataclass(frozen=True)
class Ratio:
    """A number of steps relative to dense; 8 in 10 held-out runs lie between ``low`` and ``high``.

    Example:
        >>> Ratio(1.1, 0.8, 1.4).reached, Ratio(4.0, 3.0, 5.0).reached
        (True, False)
    """

    mean: float
    low: float
    high: float

    @property
    def reached(self) -> bool:
        """Whether the ratio is small enough to be measurable; if not, the loss counts as not reached."""
        return self.mean <= FARTHEST

    @property
    def surely_reached(self) -> bool:
        """Whether even the upper end of the ratio is small enough to be measurable."""
        return self.high <= FARTHEST


def features(recipe: Recipe, optimizer: Optimizer, ranks: int, steps: float) -> dict[str, float]:
    """Return the features by name; dense has none.

    Args:
        recipe: the method's recipe.
        optimizer: the optimizer that takes the steps.
        ranks: world size.
        steps: steps of the complete dense run.

    Example:
        >>> features(Recipe("updates", period=4), "adamw", 4, 300)["period"]
        0.585...
    """
    family, moments = recipe.family, "" if optimizer == "sgd" else " into moments"
    if family == "dense":
        return {}
    if family == "low-rank":
        rank = math.log2(_USUAL_RANK / recipe.matrix_rank)
        return {family + moments: 1.0, "matrix rank": rank}
    if family == "sparse gradients":
        return {family + moments: 1.0}
    momentum, more = family == "outer momentum", math.log2(ranks / _USUAL_RANKS)
    period = math.sqrt(recipe.period) - math.sqrt(_USUAL_PERIOD)
    return {
        family: 1.0,
        "period": 0.0 if momentum else period,
        "period of Muon": period if optimizer == "muon" and not momentum else 0.0,
        "period under momentum": math.log(recipe.period / _MOMENTUM_PERIOD) if momentum else 0.0,
        "delay": float(recipe.delayed),
        "selection": float(recipe.selects),
        "ranks": 0.0 if family == "updates" else more,
        "ranks of updates": more if family == "updates" else 0.0,
        "length": math.log10(min(max(steps, _SHORTEST), _LONGEST) / _USUAL_STEPS),
    }


def steps_ratio(recipe: Recipe, optimizer: Optimizer, ranks: int, steps: float) -> Ratio:
    """Predict a method's number of steps relative to dense; see ``features`` for the arguments.

    Raises:
        ConfigurationError: a number is out of range.

    Example:
        >>> steps_ratio(Recipe("dense"), "adamw", 4, 1000)
        Ratio(mean=1.0, low=1.0, high=1.0)
    """
    for name, value in (("ranks", ranks), ("steps", steps)):
        good = 0 < value < math.inf
        require(good, f"steps to a loss: {name} is {value}; give more than 0")
    terms = features(recipe, optimizer, ranks, steps)
    if not terms:
        return Ratio(1.0, 1.0, 1.0)
    mean = math.exp(sum(COEFFICIENTS[name] * value for name, value in terms.items()))
    return Ratio(mean, mean / LIKELY, mean * LIKELY)
