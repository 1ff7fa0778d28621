"""Threshold binary search: k to 2k entries without a selection of the k-th; the threshold is reused."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.errors import ConfigurationError
from sparsync.kernels import Found
from sparsync.selection.base import Selector, Watch
from sparsync.selection.trimmed import key_at, mean_and_max
from sparsync.sparse import SparseVector

__all__ = ["BinarySearch", "BinarySearchState"]

_ROOM = 4  # times k: what a reused threshold may find before the pass that accumulates gives up


@dataclass(frozen=True)
class BinarySearchState:
    """What is carried from step to step.

    Attributes:
        threshold_key: the magnitude that the last search ended at, as the integer of
            ``kernels.magnitude_keys``; None before a search with a non-zero entry.
        served: calls that it has served, the search itself included.
    """

    threshold_key: int | None = None
    served: int = 0


@final
class BinarySearch(Selector):
    """Selects what reaches a threshold that k to 2k entries reach, found by bisection.

    The threshold is ``mean + ratio (max - mean)`` of the magnitudes, the ratio bisected in [0, 1].  **A
    search returns k to 2k entries, or all that are not zero if those are fewer than k.**  Where it
    narrows to ``eps`` without such a threshold (ties, a few huge entries), the k largest are taken.

    With ``reuse_period`` p the threshold serves the next p - 1 calls as well (the paper's "sampled
    threshold binary search"): then any number may reach it, of which at most ``cap * k`` are taken, the
    largest; the rest stays in the residual.  When none does, it searches again.

    Args:
        eps: width of the bracket of ratios at which a search gives up (ours: the paper names no value;
            0.001 is at most 10 trials).
        reuse_period: calls per search (1: search always; section 5.2.2: 5).
        cap: of k, on calls that reuse; None: no cap, as published.

    Cost: a search: mean and maximum of n elements, and at most n comparisons in each of
        ``ceil(log2(1 / eps))`` trials (one of more than 2k entries stops there); a call that reuses: n
        comparisons, inside the pass that accumulates.
    State: ``BinarySearchState``.
    Differs from the paper: the bounds are ratios (printed: they are assigned thresholds), and fewer than
    k entries lower the upper one (printed: fewer than k/2); exact where ``eps`` ends the search; the cap.

    Example:
        >>> selector = BinarySearch(reuse_period=5)
        >>> selector.select(torch.tensor([3.0, 2.9, 0.1, 0.0]), k=1, step=0).indices.tolist()
        [0, 1]
        >>> selector.select(torch.tensor([0.1, 0.2, 0.3, 9.0]), k=1, step=1).indices.tolist()
        [3]

    References: Fang et al., RedSync, 2018, section 5.2.2 and Algorithm 3.
    """

    def __init__(self, eps: float = 1e-3, reuse_period: int = 1, cap: float | None = 2.0) -> None:
        if not 1e-9 <= eps < 1:
            raise ConfigurationError(
                f"BinarySearch: eps is {eps}; give a width in [1e-9, 1), as 0.001"
            )
        if reuse_period < 1:
            raise ConfigurationError(
                f"BinarySearch: reuse_period is {reuse_period}; give at least 1 call"
            )
        if cap is not None and not 1 <= cap < math.inf:
            raise ConfigurationError(
                f"BinarySearch: cap is {cap}; give a factor >= 1 of k, or None"
            )
        self.eps, self.reuse_period, self.cap = eps, reuse_period, cap
        self.reuses = reuse_period > 1
        self.state = BinarySearchState()

    def watch(self, k: int, step: int, dtype: torch.dtype) -> Watch | None:
        """Watch what reaches the threshold, on the calls that reuse it."""
        known, served = self.state.threshold_key, self.state.served
        if known is None or served >= self.reuse_period or k <= 0:
            return None
        return Watch(known, _ROOM * k + 64)

    def select(
        self, accumulated: Tensor, k: int, step: int, found: Found | None = None
    ) -> SparseVector:
        """Return what reaches the threshold, which is searched for once per period."""
        known, served = self.state.threshold_key, self.state.served
        if k <= 0 or accumulated.numel() == 0:
            return SparseVector.empty(accumulated.numel(), accumulated)
        if known is not None and served < self.reuse_period:
            selected = self._reaching(known, accumulated, k, found)
            if selected.nnz:
                self.state = BinarySearchState(known, served + 1)
                return selected
        threshold_key, selected = self._search(accumulated, k)
        self.state = BinarySearchState(threshold_key, 1)
        return selected

    def _reaching(self, key: int, accumulated: Tensor, k: int, found: Found | None) -> SparseVector:
        """Return what reaches ``key``, at most ``cap * k`` of it."""
        limit = accumulated.numel() if self.cap is None else math.floor(self.cap * k)
        found = found or kernels.find(accumulated, key, None if self.cap is None else limit)
        if found is None:
            return _top(accumulated, limit)
        return SparseVector(found.indices, found.values, accumulated.numel()).top(limit)

    def _search(self, accumulated: Tensor, k: int) -> tuple[int | None, SparseVector]:
        """Return a threshold, None if all is zero, and what reaches it."""
        mean, largest = mean_and_max(accumulated)
        low, high = 0.0, 1.0  # more than 2k entries reach the one, fewer than k the other
        while high - low > self.eps:
            ratio = (low + high) / 2
            key = key_at(ratio, mean, largest, accumulated.dtype)
            found = kernels.find(accumulated, key, 2 * k)
            if found is None:
                low = ratio
            elif found.indices.numel() < k:
                high = ratio
            else:
                return key, SparseVector(found.indices, found.values, accumulated.numel())
        selected = _top(accumulated, k)
        keys = kernels.magnitude_keys(selected.values)
        return int(keys.min()) if selected.nnz else None, selected


def _top(accumulated: Tensor, k: int) -> SparseVector:
    """Return the k largest."""
    positions = kernels.top(accumulated, k)
    return SparseVector(positions, accumulated[positions], accumulated.numel())
