"""Threshold reuse: exact every ``threshold_period`` steps, one comparison per entry in between."""

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
from sparsync.sparse import SparseVector

__all__ = ["Reused", "ReusedState"]

_ROOM = 4  # times k: what a reused threshold may find before the pass that accumulates gives up


@dataclass(frozen=True)
class ReusedState:
    """What is carried from step to step.

    Attributes:
        threshold_key: magnitude of the k-th largest entry at the last exact step, as the integer
            of ``kernels.magnitude_keys``; None before the first exact step with a non-zero entry.
    """

    threshold_key: int | None = None


@final
class Reused(Selector):
    """Selects what is at least as large as the k-th largest was at the last exact step.

    On exact steps: exactly ``min(k, nnz)`` entries.  In between the count drifts, up where residuals
    pile up below the threshold, down where gradients shrink.  So at most ``cap * k`` are taken, the
    largest (the rest stays in the residual), and with ``floor`` a step that finds fewer than
    ``floor * k`` is made exact.

    Cost: n comparisons; a partial sort of n every ``threshold_period`` steps and below the floor.
    State: ``ReusedState``.
    Differs from the paper: cap and floor (``None`` is the paper); steps are 0-based.

    Example:
        >>> import torch
        >>> selector = Reused(threshold_period=32)
        >>> selector.select(torch.tensor([3.0, 2.0, 1.0]), k=2, step=0).nnz
        2
        >>> selector.select(torch.tensor([0.3, 0.2, 9.0]), k=2, step=1).indices.tolist()
        [2]

    References: Li & Hoefler, Ok-Topk, PPoPP 2022, section 3.1.3 and Algorithm 1, lines 2-4.
    """

    def __init__(
        self,
        threshold_period: int = 32,
        cap: float | None = 1.0,
        floor: float | None = None,
    ) -> None:
        """Set the period tau' in steps (paper: 32 for VGG and LSTM, 128 for BERT), cap and floor."""
        if threshold_period < 1:
            raise ConfigurationError(
                f"Reused: threshold_period is {threshold_period}; give at least 1 step"
            )
        if cap is not None and not cap > 0:
            raise ConfigurationError(f"Reused: cap is {cap}; give a factor > 0 of k, or None")
        if floor is not None and not 0 <= floor <= 1:
            raise ConfigurationError(
                f"Reused: floor is {floor}; give a factor of k in [0, 1], or None"
            )
        if cap is not None and floor is not None and cap < floor:
            raise ConfigurationError(
                f"Reused: cap {cap} is below floor {floor}, so every step would be exact; "
                "raise the cap or lower the floor"
            )
        self.threshold_period, self.cap, self.floor = threshold_period, cap, floor
        self.reuses = threshold_period > 1
        self.state = ReusedState()

    def watch(self, k: int, step: int, dtype: torch.dtype) -> Watch | None:
        """Watch what reaches the threshold, on the steps that reuse it."""
        known = self.state.threshold_key
        if known is None or step % self.threshold_period == 0:
            return None
        return Watch(known, _ROOM * k + 64)

    def select(
        self, accumulated: Tensor, k: int, step: int, found: Found | None = None
    ) -> SparseVector:
        """Return the entries above the threshold, which is renewed when the period opens."""
        known, size = self.state.threshold_key, accumulated.numel()
        if step % self.threshold_period and known is not None:
            limit = size if self.cap is None else max(math.floor(self.cap * k), 1)
            room = None if self.cap is None else max(limit, _ROOM * k + 64)
            found = found or kernels.find(accumulated, known, room)
            if found is None:  # more than there is room for reach it: the largest of them
                positions = kernels.top(accumulated, limit)
                return SparseVector(positions, accumulated[positions], size)
            reached = SparseVector(found.indices, found.values, size)
            if self.floor is None or reached.nnz >= min(k, self.floor * k):
                return reached.top(limit)
        positions = kernels.top(accumulated, k)
        selected = SparseVector(positions, accumulated[positions], size)
        self.state = ReusedState(_smallest_key(selected.values))
        return selected


def _smallest_key(values: Tensor) -> int | None:
    """Return the smallest magnitude as a key, None if there is no value."""
    return int(kernels.magnitude_keys(values).min()) if values.numel() else None
