"""What a linear model minimises: a loss of the margins, and penalties on the weights.

The objective over m rows ``x_i`` with labels ``y_i`` of -1 or +1, weights w and intercept b::

    1/m sum_i loss(y_i (x_i w + b))  +  l2/2 |w|^2  +  l1 |w|_1

The intercept is not penalised.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit  # type: ignore[import-untyped, unused-ignore]

from sparsync.errors import ConfigurationError

__all__ = ["LOSSES", "Floats", "Loss", "Penalty", "loss_named", "soft"]

Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Loss:
    """A convex loss of the margin ``y f(x)``.

    Attributes:
        name: as on the command line.
        value: `[m]` margins to `[m]` losses; exact for margins of any size.
        slope: `[m]` margins to `[m]` derivatives of the loss (a subgradient where it has a corner).
        curvature: a bound of the second derivative; None where there is none.

    Example:
        >>> logistic, hinge = LOSSES["logistic"], LOSSES["svm"]
        >>> margins = np.array([-1000.0, 0.0, 1000.0])
        >>> logistic.value(margins).round(3).tolist(), logistic.slope(margins).tolist()
        ([1000.0, 0.693, 0.0], [-1.0, -0.5, -0.0])
        >>> hinge.value(margins).tolist(), hinge.slope(margins).tolist()
        ([1001.0, 1.0, 0.0], [-1.0, -1.0, -0.0])
    """

    name: str
    value: Callable[[Floats], Floats]
    slope: Callable[[Floats], Floats]
    curvature: float | None


def _hinge_slope(margins: Floats) -> Floats:
    return -(margins < 1).astype(margins.dtype)


LOSSES: MappingProxyType[str, Loss] = MappingProxyType(
    {
        loss.name: loss
        for loss in (
            # log(1 + e^-m) and its derivative, neither of which overflows in these forms
            Loss("logistic", lambda m: np.logaddexp(0, -m), lambda m: -expit(-m), curvature=0.25),
            Loss("svm", lambda m: np.maximum(0, 1 - m), _hinge_slope, curvature=None),
        )
    }
)


def loss_named(name: str) -> Loss:
    """Return the loss of a model's name.

    Raises:
        ConfigurationError: unknown name (lists the known ones).
    """
    if name not in LOSSES:
        raise ConfigurationError(f"unknown model {name!r}; choose one of {', '.join(LOSSES)}")
    return LOSSES[name]


def soft(values: Floats, threshold: Floats | float) -> Floats:
    """Pull values towards zero by ``threshold``; what would cross zero is exactly zero.

    Example:
        >>> soft(np.array([3.0, -0.5, -2.0]), 1.0).tolist()
        [2.0, 0.0, -1.0]
    """
    pulled: Floats = np.maximum(values - threshold, 0) + np.minimum(values + threshold, 0)
    return pulled


@dataclass(frozen=True)
class Penalty:
    """L1 and L2 penalties of the weights.

    Attributes:
        l1: factor of the sum of magnitudes; makes weights exactly zero.
        l2: factor of half the sum of squares.

    Example:
        >>> Penalty(l1=1.0, l2=0.5).value(np.array([2.0, -1.0]))
        4.25
        >>> Penalty(l1=1.0).step(np.array([2.0, -1.0]), np.array([0.0, -5.0]), 0.5).tolist()
        [1.5, 1.0]
    """

    l1: float = 0.0
    l2: float = 0.0

    def __post_init__(self) -> None:
        for name, factor in (("l1", self.l1), ("l2", self.l2)):
            if not 0 <= factor < math.inf:
                raise ConfigurationError(f"{name} is {factor}; give a number >= 0")

    def value(self, weights: Floats) -> float:
        """Return the penalty, summed in float64."""
        exact = weights.astype(np.float64, copy=False)
        return float(self.l1 * np.abs(exact).sum() + self.l2 / 2 * (exact @ exact))

    def decay(self, lr: float) -> float:
        """Return the factor by which a step shrinks all weights; a step longer than 1/l2 stops at 0."""
        return max(1 - lr * self.l2, 0.0)

    def step(self, weights: Floats, gradient: Floats, lr: float) -> Floats:
        """Return all weights after one step: gradient and L2, then the proximal step of L1.

        This is the specification; ``LazyWeights`` does the same to the entries of a sparse gradient.
        """
        return soft(self.decay(lr) * weights - lr * gradient, lr * self.l1)
