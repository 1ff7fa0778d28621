"""A rank's share of a linear problem, and what all ranks together know about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_matrix  # type: ignore[import-untyped, unused-ignore]

from sparsync.collectives.agreement import agree
from sparsync.errors import ConfigurationError
from sparsync.linear.losses import Floats, Loss, Penalty
from sparsync.linear.products import Products
from sparsync.linear.weights import LazyWeights
from sparsync.transports.base import Communicator

__all__ = ["Evaluation", "Problem", "evaluate", "suggested_lr", "sum_over_ranks"]


@dataclass(frozen=True, eq=False)
class Problem:
    """What to minimise, and this rank's rows of it (none is legal).

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


@dataclass(frozen=True)
class Evaluation:
    """A model on the rows of all ranks.

    Attributes:
        objective: mean loss plus penalties.
        accuracy: fraction of rows whose sign is right (a score of 0 counts as +1).
        rows: how many they are.
    """

    objective: float
    accuracy: float
    rows: int


async def evaluate(
    comm: Communicator, problem: Problem, weights: LazyWeights, products: Products
) -> Evaluation:
    """Evaluate the same weights on every rank's rows; every rank calls it.

    Cost: one pass over the rows, an allgather of 24 bytes; 0 rows in all give NaN.
    """
    scores = products.scores(problem.features, weights)
    margins = (scores * problem.labels).astype(np.float64)
    right = (scores >= 0) == (problem.labels > 0)
    mine = [problem.loss.value(margins).sum(), right.sum(), problem.rows]
    loss, correct, rows = await sum_over_ranks(comm, mine, "evaluation")
    penalty = problem.penalty.value(weights.to_dense())
    if rows == 0:
        return Evaluation(np.nan, np.nan, 0)
    return Evaluation(loss / rows + penalty, correct / rows, int(rows))


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
