"""A model whose steps cost what their gradients store: decay and L1 wait until a weight is looked at."""

from __future__ import annotations

from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from sparsync.linear.losses import Floats, Penalty, soft
from sparsync.sparse import SparseVector, Vector

__all__ = ["Integers", "LazyWeights"]

Integers = NDArray[np.integer[Any]]


@final
class LazyWeights:
    """Weights and an intercept under ``Penalty.step``, one sparse gradient after the other.

    The weights are ``scale * soft(values, shrunk - seen)``: L2 shrinks ``scale`` alone, L1 adds to
    ``shrunk`` alone, and a weight takes its part when a gradient changes it (``soft`` of a after
    ``soft`` of b is ``soft`` of a + b, so nothing is lost by waiting).  What is only *read* is not
    written back: ranks read different weights, and all must hold the same bits.

    Args:
        size: number of weights n; vectors have one element more, the intercept's.
        penalty: of the weights; the intercept is free.
        dtype: of the weights; scale and thresholds are float64.
        intercept: without, its gradient is ignored.
        rescale_below: smallest scale; below it all weights are written once (ours: float32 keeps
            7 digits, gradients are divided by the scale).

    Cost: O(nnz) per step, O(n) when the scale is renewed; memory n, with L1 8 n bytes more.

    Example:
        >>> import torch
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

    def at(self, indices: Integers) -> Floats:
        """Return the weights of these indices, `[len(indices)]`."""
        weights: Floats = self._settled(indices) * self.dtype.type(self._scale)
        return weights

    def to_dense(self) -> Floats:
        """Return all weights, `[size]`."""
        weights: Floats = self._settled(slice(None)) * self.dtype.type(self._scale)
        return weights

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
            self._renew()

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

    def _renew(self) -> None:
        """Write all weights, so that scale and thresholds start anew."""
        self._values = self.to_dense()
        self._scale, self._shrunk = 1.0, 0.0
        self._seen[:] = 0
