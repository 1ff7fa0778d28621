"""Threshold reuse: exact selection every ``threshold_period`` steps, and comparisons in between."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.errors import require
from sparsync.selection.selector import Selector, largest, reaching, room, smallest_key
from sparsync.sparse import SparseVector

__all__ = ["Reused", "ReusedState"]

_BAND = 0.11  # fraction of k; the paper's average deviation stays below it (section 5.2)
_MARGIN = 1 / 4  # octaves below the threshold from which "auto" collects entries (at 84 % of it)


@dataclass(frozen=True)
class ReusedState:
    """The state that is kept from step to step."""

    # the k-th largest magnitude in the last exact step; None before the first step, or if all entries
    # were zero
    threshold_key: int | None = None


@final
class Reused(Selector):
    """Selects the entries that are at least as large as the k-th largest one in the last exact step.

    Exact steps select exactly ``min(k, nnz)`` entries.  In the steps between them, the count drifts.
    So only the ``cap * k`` largest are selected, and a step with fewer than ``floor * k`` becomes exact.

    ``threshold_period="auto"`` has no fixed period: if fewer than 0.89 k or more than 1.11 k entries
    reach the threshold, a step selects exactly k and renews the threshold.  This usually costs almost
    nothing: if at least k entries are above 84 % of the threshold, the k largest are among them.  In the
    paper, 11 % is an average deviation; here, it is a bound (``benchmarks/threshold-period.md``).

    Args:
        threshold_period: tau' in steps (paper: 32 for VGG and LSTM, 128 for BERT), or "auto".
        cap: largest number of entries, as a multiple of k, in steps that reuse a threshold; None sets no
            bound, as published.
        floor: smallest number of entries, as a multiple of k, in these steps.

    Cost: n comparisons.  A partial sort of n elements is needed every ``threshold_period`` steps, and
    whenever the count is below the floor.  With "auto", the sort is needed if fewer than k entries are
    above 84 % of the threshold, or more than 4 k above the threshold itself.
    State: ``ReusedState``.
    Differs from the paper: cap, floor and "auto" are additions; steps are 0-based (the paper prints
    ``(t - 1) mod tau'``).

    Example:
        >>> selector = Reused(threshold_period=32)
        >>> selector.select(torch.tensor([3.0, 2.0, 1.0]), k=2, step=0).nnz
        2
        >>> selector.select(torch.tensor([0.3, 0.2, 9.0]), k=2, step=1).indices.tolist()
        [2]

    References: Li & Hoefler, Ok-Topk, PPoPP 2022, section 3.1.3 and Algorithm 1, lines 2-4.
    """

    def __init__(
        self,
        threshold_period: int | Literal["auto"] = 32,
        cap: float | None = 1.0,
        floor: float | None = None,
    ) -> None:
        require(
            threshold_period == "auto" or (type(threshold_period) is int and threshold_period > 0),
            f'Reused: threshold_period is {threshold_period}; give at least 1 step, or "auto"',
        )
        least, most = 0.0 if floor is None else floor, math.inf if cap is None else cap
        require(most > 0, f"Reused: cap is {cap}; give a factor > 0 of k, or None")
        require(0 <= least <= 1, f"Reused: floor is {floor}; give a factor of k in [0, 1], or None")
        require(
            least <= most,
            f"Reused: cap {cap} is below floor {floor}, so every step would be exact; "
            "raise the cap or lower the floor",
        )
        self.threshold_period, self.cap, self.floor = threshold_period, cap, floor
        self.reuses = threshold_period != 1
        self.state = ReusedState()

    def collect_from(self, k: int, step: int, dtype: torch.dtype) -> tuple[int, int] | None:
        """Return the key and the limit for collecting entries; None in steps that are exact."""
        known = self._known(step)
        if known is None:
            return None
        if self.threshold_period == "auto":
            return _lowest(known, dtype), 2 * room(k)
        return known, room(k)

    def select(
        self, accumulated: Tensor, k: int, step: int, collected: SparseVector | None = None
    ) -> SparseVector:
        """Return the entries above the threshold, which is renewed at the start of every period."""
        known = self._known(step)
        if known is None:
            return self._renew(largest(accumulated, k))
        limit = accumulated.numel() if self.cap is None else max(math.floor(self.cap * k), 1)
        if self.threshold_period == "auto":
            lowest = _lowest(known, accumulated.dtype)
            collected = collected or reaching(accumulated, lowest, 2 * room(k))
            collected = collected or reaching(accumulated, known, room(k))
            return self._within_band(accumulated, k, known, collected, limit)
        # allow more entries than the limit to a certain degree, because selecting the largest among
        # them is cheaper than selecting among all n
        most = None if self.cap is None else max(limit, room(k))
        reached = collected or reaching(accumulated, known, most)
        if reached is None:
            # Too many entries reach the threshold.  Select the largest and keep the threshold: the cap
            # bounds the volume, and the next exact step renews the threshold.
            return largest(accumulated, limit)
        if self.floor is None or reached.nnz >= min(k, self.floor * k):
            return reached.top(limit)
        return self._renew(largest(accumulated, k))

    def _known(self, step: int) -> int | None:
        """Return the threshold that a step reuses, or None if the step must be exact."""
        opens = self.threshold_period != "auto" and step % self.threshold_period == 0
        return None if opens else self.state.threshold_key

    def _within_band(
        self, accumulated: Tensor, k: int, known: int, collected: SparseVector | None, limit: int
    ) -> SparseVector:
        """Return the entries that reach the threshold if about k do; otherwise select exactly k."""
        # this decision is local: the global threshold is exact on every step, so ranks need not agree
        if collected is not None:
            reached = kernels.find(collected.values, known, None)
            if reached is not None and abs(reached[0].numel() - k) <= _BAND * k:
                return collected.keep(reached[0]).top(limit)
            if collected.nnz >= k:
                return self._renew(collected.top(k))
        return self._renew(largest(accumulated, k))

    def _renew(self, selected: SparseVector) -> SparseVector:
        """Use the smallest magnitude of an exact selection as the threshold (line 3)."""
        self.state = ReusedState(smallest_key(selected))
        return selected


def _lowest(known: int, dtype: torch.dtype) -> int:
    """Return the smallest key that "auto" collects."""
    _, octave = kernels.key_range(dtype)
    return max(known - round(_MARGIN * octave), 1)
