"""Losses, penalties, the model's weights, and one rank's share of a linear problem.

The objective over m rows ``x_i`` with labels ``y_i`` of -1 or +1, weights w and intercept b::

    1/m sum_i loss(y_i (x_i w + b))  +  l2/2 |w|^2  +  l1 |w|_1

The intercept is not penalised.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_matrix  # type: ignore[import-untyped, unused-ignore]
from scipy.special import expit  # type: ignore[import-untyped, unused-ignore]

from sparsync.errors import ConfigurationError
from sparsync.sparse import SparseVector, Vector
from sparsync.transports.agree import agree
from sparsync.transports.communicator import Communicator

__all__ = [
    "LOSSES",
    "Floats",
    "Integers",
    "LazyWeights",
    "Loss",
    "Penalty",
    "Problem",
    "loss_named",
    "soft",
    "suggested_lr",
    "sum_over_ranks",
]

Floats = NDArray[np.floating[Any]]
Integers = NDArray[np.integer[Any]]


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
        # log(1 + e^-m) and its derivative, neither of which overflows in these forms
        "logistic": Loss("logistic", lambda m: np.logaddexp(0, -m), lambda m: -expit(-m), 0.25),
        "svm": Loss("svm", lambda m: np.maximum(0, 1 - m), _hinge_slope, None),
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


@final
class LazyWeights:
    """Weights and an intercept under ``Penalty.step``, at a cost of what the gradients store.

    The weights are ``scale * soft(values, shrunk - seen)``: L2 shrinks ``scale`` alone, L1 adds to
    ``shrunk`` alone, and a weight takes its part when a gradient changes it (``soft`` of a after
    ``soft`` of b is ``soft`` of a + b, so nothing is lost by waiting).  What is only *read* is not
    written back: ranks read different weights, and all must hold the same bits.

    Args:
        size: number of weights n; vectors have one element more, the intercept's.
        penalty: of the weights; the intercept is free.
        dtype: of the weights; scale and thresholds are float64.
        intercept: without, its gradient is ignored.
        rescale_below: smallest scale; below it all weights are written once (a choice: float32 keeps
            7 digits, gradients are divided by the scale).

    Cost: O(nnz) per step, O(n) when the scale is renewed; memory n, with L1 8 n bytes more.

    Example:
        >>> weights = LazyWeights(3, Penalty(l2=0.5), np.dtype(np.float64))
        >>> gradient = SparseVector(torch.tensor([1]), torch.tensor([-1.0]), 4)
        >>> weights.apply_(gradient, lr=1.0); weights.apply_(gradient, lr=1.0)
        >>> weights.to_dense().tolist()
        [0.0, 1.5, 0.0]
    """

    def __init__(
        self,
        size: int,
        penalty: Penalty,
        dtype: np.dtype[Any],
        *,
        intercept: bool = True,
        rescale_below: float = 1e-3,
    ) -> None:
        self.size, self.penalty, self.dtype = size, penalty, dtype
        self.has_intercept, self.rescale_below = intercept, rescale_below
        self.intercept = 0.0
        self._values = np.zeros(size, dtype)
        self._scale, self._shrunk = 1.0, 0.0
        self._seen = np.zeros(size if penalty.l1 else 0)

    def at(self, indices: Integers | slice) -> Floats:
        """Return the weights of these indices, `[len(indices)]`."""
        weights: Floats = self._settled(indices) * self.dtype.type(self._scale)
        return weights

    def to_dense(self) -> Floats:
        """Return all weights, `[size]`."""
        return self.at(slice(None))

    def apply_(self, gradient: Vector, lr: float) -> None:
        """Take one step with a gradient of ``size + 1`` elements, sparse or dense."""
        where, slopes, slope = self._parts(gradient)
        decay = self.penalty.decay(lr)
        if decay == 0:
            self._values[:], self._scale = 0, 1.0
        else:
            self._scale *= decay
        self._values[where] = self._settled(where) - slopes * self.dtype.type(lr / self._scale)
        if self.penalty.l1:
            self._seen[where] = self._shrunk
            self._shrunk += lr * self.penalty.l1 / self._scale
        if self.has_intercept:
            self.intercept -= lr * slope
        if self._scale < self.rescale_below:
            self._values = self.to_dense()
            self._scale, self._shrunk = 1.0, 0.0
            self._seen[:] = 0

    def add_(self, delta: Vector) -> None:
        """Add to weights and intercept as they are, without decay."""
        where, values, value = self._parts(delta)
        self._values[where] += values
        self.intercept += value

    def _parts(self, vector: Vector) -> tuple[Integers | slice, Floats, float]:
        """Split into where the weights are touched, with what, and the intercept's element."""
        values: Floats = vector.values.numpy()
        if not isinstance(vector, SparseVector):
            return slice(None), values[:-1], float(values[-1])
        indices: Integers = vector.indices.numpy()
        if indices.size and indices[-1] == self.size:
            return indices[:-1], values[:-1], float(values[-1])
        return indices, values, 0.0

    def _settled(self, where: Integers | slice) -> Floats:
        """Return the values with the L1 that they have not taken yet."""
        values: Floats = self._values[where]
        if not self.penalty.l1:
            return values
        return soft(values, self._shrunk - self._seen[where]).astype(self.dtype)


@dataclass(frozen=True, eq=False)
class Problem:
    """An objective, and this rank's rows of it (none is legal).

    Attributes:
        features: `[rows, dimensions]`, sparse rows.
        labels: `[rows]`, -1 or +1.
        loss: of the margins.
        penalty: of the weights.
        intercept: the model has one.
        dtype: of weights and gradients, float32 or float64; the features are converted.
    """

    features: csr_matrix
    labels: Floats
    loss: Loss
    penalty: Penalty = field(default_factory=Penalty)
    intercept: bool = True
    dtype: np.dtype[Any] = field(default_factory=lambda: np.dtype(np.float32))

    def __post_init__(self) -> None:
        if self.dtype not in (np.float32, np.float64):
            raise ConfigurationError(f"dtype is {self.dtype}; give float32 or float64")
        if len(self.labels) != self.features.shape[0]:
            raise ConfigurationError(
                f"{self.features.shape[0]} rows have {len(self.labels)} labels; give one per row"
            )
        if not np.isin(self.labels, (-1, 1)).all():
            raise ConfigurationError("labels must be -1 or +1; convert them first")
        converted = csr_matrix(self.features, dtype=self.dtype)  # copies only what must change
        object.__setattr__(self, "features", converted)
        object.__setattr__(self, "labels", np.asarray(self.labels, self.dtype))

    @property
    def rows(self) -> int:
        """Number of rows of this rank."""
        return len(self.labels)

    @property
    def dimensions(self) -> int:
        """Number of weights n."""
        return int(self.features.shape[1])

    def weights(self) -> LazyWeights:
        """Make a model of zeros."""
        return LazyWeights(self.dimensions, self.penalty, self.dtype, intercept=self.intercept)

    async def agree(self, comm: Communicator, **more: object) -> None:
        """Return when all ranks are about to solve the same problem.

        Raises:
            PeerError: names what differs.
        """
        own = {"dimensions": self.dimensions, "dtype": self.dtype, "model": self.loss.name}
        await agree(comm, {**own, "penalty": self.penalty, "intercept": self.intercept, **more})


async def sum_over_ranks(comm: Communicator, mine: list[float], phase: str) -> list[float]:
    """Sum a few numbers in rank order: equal to the last bit on all ranks and transports."""
    everyone = await comm.allgather(torch.tensor(mine, dtype=torch.float64), phase)
    return torch.stack(everyone).cumsum(0)[-1].tolist()


async def suggested_lr(comm: Communicator, problem: Problem) -> float:
    """Return a learning rate with which gradient descent surely descends: 1 / a bound of the curvature.

    The bound is ``c (mean |x_i|^2 + intercept) + l2``, c being the loss's curvature (1 for the hinge,
    which has none: a choice, not a bound).  Well-conditioned data bear more.
    """
    squares = float((problem.features.data.astype(np.float64) ** 2).sum())
    total, rows = await sum_over_ranks(comm, [squares, problem.rows], "lr")
    mean = total / max(rows, 1) + problem.intercept
    bound = (problem.loss.curvature or 1.0) * mean + problem.penalty.l2
    return 1 / bound if bound else 1.0
