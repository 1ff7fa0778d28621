"""Losses, penalties, the model's weights, and one rank's rows of a linear problem.

The objective over m rows ``x_i`` with labels ``y_i`` of -1 or +1, weights w and intercept b::

    1/m sum_i loss(y_i (x_i w + b))  +  l2/2 |w|^2  +  l1 |w|_1

The intercept is not penalised.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any, TypeVar, final

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_matrix  # type: ignore[import-untyped, unused-ignore]
from scipy.special import expit  # type: ignore[import-untyped, unused-ignore]

from sparsync.errors import require
from sparsync.sparse import SparseVector, Vector, even_boundaries

__all__ = [
    "LOSSES",
    "AdaptiveWeights",
    "Floats",
    "Integers",
    "LazyWeights",
    "Loss",
    "Problem",
    "Products",
    "Weights",
    "soft",
]

Floats = NDArray[np.floating[Any]]
Integers = NDArray[np.integer[Any]]
T = TypeVar("T")

# A scale that becomes smaller is multiplied into the weights, because gradients are divided by the scale,
# and float32 has only 7 digits.
_SMALLEST_SCALE = 1e-3
_COMPACT = 30  # columns per stored element above which sorting is faster than dense sums


@dataclass(frozen=True)
class Loss:
    """A convex loss as a function of the margin ``y f(x)``, from `[m]` margins to `[m]` numbers.

    Example:
        >>> logistic, hinge = LOSSES["logistic"], LOSSES["svm"]
        >>> margins = np.array([-1000.0, 0.0, 1000.0])
        >>> logistic.value(margins).round(3).tolist(), logistic.slope(margins).tolist()
        ([1000.0, 0.693, 0.0], [-1.0, -0.5, -0.0])
        >>> hinge.value(margins).tolist(), hinge.slope(margins).tolist()
        ([1001.0, 1.0, 0.0], [-1.0, -1.0, -0.0])
    """

    value: Callable[[Floats], Floats]  # exact for margins of any size
    slope: Callable[[Floats], Floats]  # the derivative; at a corner, a subgradient
    curvature: float | None  # a bound on the second derivative; None if there is none


LOSSES: MappingProxyType[str, Loss] = MappingProxyType(
    {
        # log(1 + e^-m) and its derivative, in forms that do not overflow
        "logistic": Loss(lambda m: np.logaddexp(0, -m), lambda m: -expit(-m), 0.25),
        "svm": Loss(lambda m: np.maximum(0, 1 - m), lambda m: -(m < 1).astype(m.dtype), None),
    }
)


def soft(values: Floats, threshold: Floats | float) -> Floats:
    """Shrink values towards zero by ``threshold``; values that would cross zero become exactly zero.

    Example:
        >>> soft(np.array([3.0, -0.5, -2.0]), 1.0).tolist()
        [2.0, 0.0, -1.0]
    """
    pulled: Floats = np.maximum(values - threshold, 0) + np.minimum(values + threshold, 0)
    return pulled


class Weights(ABC):
    """Weights and an intercept; a proximal step's cost is linear in the gradient's number of entries.

    A step is ``w = soft(max(1 - rate l2, 0) w - rate gradient, rate l1)``.  Pending penalties are applied
    to a weight when a gradient changes it.  When a weight is only *read*, the result is not stored: ranks
    read different weights, but must hold the same bits.

    Gradients have n + 1 elements for n weights; the last element is for the intercept, which is not
    penalised.
    """

    def __init__(
        self,
        size: int,
        dtype: np.dtype[Any],
        *,
        l1: float = 0.0,
        l2: float = 0.0,
        intercept: bool = True,
    ) -> None:
        self.size, self.dtype, self.l1, self.l2 = size, dtype, l1, l2
        self.has_intercept = intercept
        self.intercept = 0.0
        self._values = np.zeros(size, dtype)

    @abstractmethod
    def at(self, indices: Integers | slice) -> Floats:
        """Return the weights at these indices, `[len(indices)]`."""

    @abstractmethod
    def apply_(self, gradient: Vector, lr: float) -> None:
        """Take one step with a gradient of ``size + 1`` elements, sparse or dense."""

    def to_dense(self) -> Floats:
        """Return all weights, `[size]`."""
        return self.at(slice(None))

    def add_(self, delta: Vector) -> None:
        """Add a vector to the weights and the intercept, without decay."""
        where, values, value = self._parts(delta)
        self._values[where] += values
        self.intercept += value

    def _parts(self, vector: Vector) -> tuple[Integers | slice, Floats, float]:
        """Split a vector into the weights' indices, their elements, and the intercept's element."""
        values: Floats = vector.values.numpy()
        if not isinstance(vector, SparseVector):
            return slice(None), values[:-1], float(values[-1])
        indices: Integers = vector.indices.numpy()
        if indices.size and indices[-1] == self.size:
            return indices[:-1], values[:-1], float(values[-1])
        return indices, values, 0.0


@final
class LazyWeights(Weights):
    """Weights that share one learning rate.

    The weights are stored as ``scale * soft(values, shrunk - seen)``: an L2 step only shrinks ``scale``,
    and an L1 step only adds to ``shrunk``.  Penalties can be deferred exactly, because ``soft`` by a
    after ``soft`` by b equals ``soft`` by a + b.

    Cost: O(nnz) per step, and O(n) when the scale is renewed.  Memory: n weights; with L1, another 8 n
    bytes.

    Example:
        >>> weights = LazyWeights(3, np.dtype(np.float64), l2=0.5)
        >>> gradient = SparseVector(torch.tensor([1]), torch.tensor([-1.0]), 4)
        >>> weights.apply_(gradient, lr=1.0); weights.apply_(gradient, lr=1.0)
        >>> weights.to_dense().tolist()
        [0.0, 1.5, 0.0]
    """

    def __init__(self, size: int, dtype: np.dtype[Any], **penalties: Any) -> None:
        super().__init__(size, dtype, **penalties)
        self._scale, self._shrunk = 1.0, 0.0
        self._seen = np.zeros(size if self.l1 else 0)

    def at(self, indices: Integers | slice) -> Floats:
        """Return the weights at these indices, `[len(indices)]`."""
        weights: Floats = self._settled(indices) * self.dtype.type(self._scale)
        return weights

    def apply_(self, gradient: Vector, lr: float) -> None:
        """Take one step with a gradient of ``size + 1`` elements, sparse or dense."""
        where, slopes, slope = self._parts(gradient)
        decay = max(1 - lr * self.l2, 0.0)
        if decay == 0:
            self._values[:], self._scale = 0, 1.0
        else:
            self._scale *= decay
        self._values[where] = self._settled(where) - slopes * self.dtype.type(lr / self._scale)
        if self.l1:
            self._seen[where] = self._shrunk
            self._shrunk += lr * self.l1 / self._scale
        if self.has_intercept:
            self.intercept -= lr * slope
        if self._scale < _SMALLEST_SCALE:
            self._values = self.to_dense()
            self._scale, self._shrunk = 1.0, 0.0
            self._seen[:] = 0

    def _settled(self, where: Integers | slice) -> Floats:
        """Return the values with their pending L1 steps applied."""
        values: Floats = self._values[where]
        if not self.l1:
            return values
        return soft(values, self._shrunk - self._seen[where]).astype(self.dtype)


@final
class AdaptiveWeights(Weights):
    """Weights with individual rates, which decrease as the weights' gradients add up.

    A weight's rate is ``lr / (length sqrt(sum of squares))``.  The intercept's rate is ``lr / sqrt(sum of
    squares)``, because its column has length 1.  So scores do not depend on the units of the features.
    A weight's rate is constant while its gradient is zero.  The m steps that it has missed then have a
    closed form: with ``a = 1 - rate l2``, ``soft(a^m w, rate l1 (1 + a + ... + a^(m - 1)))``.

    Attributes:
        length: the length of a row of features, as the root mean square over all rows.

    Cost: O(nnz) per step.  Memory: 2 n weights; with a penalty, another 8 n bytes.

    Example:
        >>> weights = AdaptiveWeights(3, np.dtype(np.float64))
        >>> gradient = SparseVector(torch.tensor([1]), torch.tensor([-3.0]), 4)
        >>> weights.apply_(gradient, lr=0.5); weights.to_dense().tolist()
        [0.0, 0.5, 0.0]

    References: Duchi, Hazan and Singer, "Adaptive subgradient methods for online learning and stochastic
    optimization", JMLR 12, 2011: the diagonal, proximal version.
    """

    def __init__(self, size: int, dtype: np.dtype[Any], **penalties: Any) -> None:
        super().__init__(size, dtype, **penalties)
        self.length = 1.0
        # sums of squared gradients, for the weights and for the intercept
        self._squares, self._square = np.zeros(size, dtype), 0.0
        self._steps, self._lr = 0, 0.0
        self._seen = np.zeros(size if self.l1 or self.l2 else 0, np.int64)  # steps taken

    def measure_by(self, length: float) -> None:
        """Use ``length`` as the length of a row, starting with the next step."""
        self.length = length

    def at(self, indices: Integers | slice) -> Floats:
        """Return the weights at these indices, `[len(indices)]`."""
        values: Floats = self._values[indices]
        if not self._seen.size:
            return values
        rates, missed = self._rates(indices), self._steps - self._seen[indices]
        decay = np.maximum(1 - rates * self.l2, 0)
        left = decay**missed
        with np.errstate(invalid="ignore", divide="ignore"):
            pulls = np.where(decay < 1, (1 - left) / (1 - decay), missed)
        settled = soft(values * left, rates * self.l1 * pulls)
        return settled.astype(self.dtype)

    def apply_(self, gradient: Vector, lr: float) -> None:
        """Take one step with a gradient of ``size + 1`` elements, sparse or dense."""
        where, slopes, slope = self._parts(gradient)
        before, self._lr = self.at(where), lr / self.length
        self._squares[where] += slopes * slopes
        rates = self._rates(where)
        moved = np.maximum(1 - rates * self.l2, 0) * before - rates * slopes
        self._values[where] = soft(moved, rates * self.l1) if self.l1 else moved
        self._steps += 1
        if self._seen.size:
            self._seen[where] = self._steps
        self._square += slope * slope
        if self.has_intercept and slope:
            self.intercept -= lr * slope / math.sqrt(self._square)

    def _rates(self, where: Integers | slice) -> Floats:
        """Return the current rates; 0 for weights without any gradient so far."""
        roots = np.sqrt(self._squares[where])
        rates: Floats = np.divide(self._lr, roots, out=np.zeros_like(roots), where=roots > 0)
        return rates


@dataclass(frozen=True, eq=False)
class Problem:
    """An objective, and this rank's rows; a rank may have no rows."""

    features: csr_matrix  # `[rows, dimensions]`
    labels: Floats  # `[rows]`, -1 or +1
    model: str = "logistic"  # or "svm"
    l1: float = 0.0  # factor of the sum of the weights' magnitudes; makes weights exactly zero
    l2: float = 0.0  # factor of half the sum of their squares
    intercept: bool = True
    dtype: np.dtype[Any] = np.dtype(np.float32)  # noqa: RUF009  # of weights; or float64

    def __post_init__(self) -> None:
        known, rows = ", ".join(LOSSES), self.features.shape[0]
        require(self.model in LOSSES, f"unknown model {self.model!r}; choose one of {known}")
        for name, factor in (("l1", self.l1), ("l2", self.l2)):
            require(0 <= factor < math.inf, f"{name} is {factor}; give a number >= 0")
        wide = self.dtype in (np.float32, np.float64)
        require(wide, f"dtype is {self.dtype}; give float32 or float64")
        count = len(self.labels)
        require(count == rows, f"{rows} rows have {count} labels; give one per row")
        signs = bool(np.isin(self.labels, (-1, 1)).all())
        require(signs, "labels must be -1 or +1; convert them first")
        converted = csr_matrix(self.features, dtype=self.dtype)  # no copy if nothing has to change
        object.__setattr__(self, "features", converted)
        object.__setattr__(self, "labels", np.asarray(self.labels, self.dtype))

    @property
    def loss(self) -> Loss:
        """The loss function of the model."""
        return LOSSES[self.model]

    @property
    def rows(self) -> int:
        """The number of this rank's rows."""
        return len(self.labels)

    @property
    def dimensions(self) -> int:
        """The number of weights n."""
        return int(self.features.shape[1])

    def weights(self, kind: type[Weights] = LazyWeights) -> Weights:
        """Return new weights, all of them zero."""
        return kind(self.dimensions, self.dtype, l1=self.l1, l2=self.l2, intercept=self.intercept)

    def penalty(self, weights: Floats) -> float:
        """Return the penalty for these weights, summed in float64."""
        exact = weights.astype(np.float64, copy=False)
        return float(self.l1 * np.abs(exact).sum() + self.l2 / 2 * (exact @ exact))


@final
class Products:
    """Multiplies sparse rows on several threads, which helps because SciPy releases the GIL.

    Rows are cut into one block per thread, and the blocks' sums are added in order.  So rounding depends
    on the number of threads, but never on the order in which threads finish.

    Example:
        >>> rows = csr_matrix(np.array([[1.0, 0.0, 2.0], [0.0, 0.0, 3.0]]))
        >>> Products(threads=2).transposed(rows, np.array([1.0, 10.0])).to_dense().tolist()
        [1.0, 0.0, 32.0, 11.0]
    """

    def __init__(self, threads: int = 1) -> None:
        require(threads >= 1, f"threads is {threads}; give at least 1")
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def scores(self, rows: csr_matrix, weights: Weights) -> Floats:
        """Return ``rows w + intercept``, `[rows]`; only weights of stored columns are read."""

        def block(start: int, stop: int) -> Floats:
            part = rows[start:stop]
            stored = np.arange(part.nnz, dtype=part.indices.dtype)
            # every stored element gets its own column, so that the product reads only the weights needed
            gathered = csr_matrix((part.data, stored, part.indptr), (stop - start, part.nnz))
            result: Floats = gathered @ weights.at(part.indices)
            return result

        products = np.concatenate(self._blocks(block, rows.shape[0]))
        scores: Floats = products + weights.dtype.type(weights.intercept)
        return scores

    def transposed(self, rows: csr_matrix, coefficients: Floats) -> SparseVector:
        """Return ``rows^T coefficients`` and, as the last element, the sum of the coefficients.

        A column is not stored if no row has an element in it.

        Cost: O(nnz + columns), with sums in dense vectors; O(nnz log nnz) if the rows store far fewer
        elements than there are columns.  Both ways give the same bits.
        """
        size, stored = rows.shape[1], None
        if rows.nnz * _COMPACT < size:
            stored, places = np.unique(rows.indices, return_inverse=True)
            rows = csr_matrix((rows.data, places, rows.indptr), (rows.shape[0], len(stored)))

        def block(start: int, stop: int) -> Floats:
            product: Floats = rows[start:stop].T @ coefficients[start:stop]
            return product

        first, *others = self._blocks(block, rows.shape[0])
        total = sum(others, start=first)
        at = np.flatnonzero(total)
        indices = np.append(at if stored is None else stored[at], size).astype(np.int64)
        values = np.append(total[at], coefficients.sum(dtype=total.dtype))
        return SparseVector(torch.from_numpy(indices), torch.from_numpy(values), size + 1)

    def _blocks(self, function: Callable[[int, int], T], rows: int) -> list[T]:
        """Call ``function(start, stop)`` for every block of rows."""
        cuts = even_boundaries(rows, self.threads)
        if self._pool is None:
            return [function(start, stop) for start, stop in pairwise(cuts)]
        return list(self._pool.map(function, cuts[:-1], cuts[1:]))
