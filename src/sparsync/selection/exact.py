"""Exact top-k: the k entries of largest magnitude, on every step, without sorting n."""

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

__all__ = ["Exact", "ExactState"]

_NARROWEST, _WIDEST = 1 / 256, 2.0  # of the gap, in octaves


@dataclass(frozen=True)
class ExactState:
    """What is carried from step to step.

    Attributes:
        threshold_key: the k-th largest magnitude of the last step, as a key; None at first.
        drift: by how much that moves per step, smoothed: the next is expected as far on.
        gap: how far below the expected one candidates are collected, in octaves.
    """

    threshold_key: int | None = None
    drift: int = 0
    gap: float = 0.125

    def watch_key(self, octave: int) -> int | None:
        """Return the magnitude from which candidates are collected."""
        if self.threshold_key is None:
            return None
        return max(self.threshold_key + self.drift - round(self.gap * octave), 1)


@final
class Exact(Selector):
    """Selects exactly ``min(k, nnz)`` entries; ties go to the lower index.

    Candidates are collected in the pass that accumulates: all entries above the expected threshold
    less a gap.  The gap adapts so that they number about ``candidates * k``; exact selection runs on them
    alone.  Where the gradient shrank by more than the gap, or grew so much that the candidates
    overflow, the step selects among all n, which costs more and is as exact.

    Args:
        candidates: how many to aim at, as a multiple of k and 8 sqrt(k) more (ours: error feedback
            piles entries up just below the threshold; 5 % lower there are twice as many).

    Cost: n comparisons inside the pass that accumulates; a selection among about 2 k.
    State: ``ExactState``.
    Differs from the paper: deterministic under ties; no sort of n.

    Example:
        >>> import torch
        >>> Exact().select(torch.tensor([1.0, -4.0, 0.0, 2.0]), k=2, step=0).to_dense().tolist()
        [0.0, -4.0, 0.0, 2.0]

    References: the selection of TopkA, TopkDSA and gTopk in Ok-Topk, section 5.
    """

    def __init__(self, candidates: float = 2.0) -> None:
        if not candidates > 1:
            raise ConfigurationError(
                f"Exact: candidates is {candidates}; give a multiple > 1 of k, as 2"
            )
        self.candidates = candidates
        self.state = ExactState()

    def watch(self, k: int, step: int, dtype: torch.dtype) -> Watch | None:
        """Watch what reaches the expected threshold less the gap."""
        _, octave = kernels.key_range(dtype)
        key = self.state.watch_key(octave)
        return None if key is None or k <= 0 else Watch(key, _limit(k, self.candidates))

    def select(
        self, accumulated: Tensor, k: int, step: int, found: Found | None = None
    ) -> SparseVector:
        """Return the k largest."""
        size = accumulated.numel()
        candidates = None if found is None else found.indices.numel()
        _, octave = kernels.key_range(accumulated.dtype)
        everything = self.state.watch_key(octave) == 1  # all that is not zero was collected
        if found is not None and (found.indices.numel() >= k or everything):
            selected = SparseVector(found.indices, found.values, size).top(k)
        else:
            positions = kernels.top(accumulated, k)
            selected = SparseVector(positions, accumulated[positions], size)
        if k > 0:
            self._adapt(selected, candidates, k)
        return selected

    def _adapt(self, selected: SparseVector, candidates: int | None, k: int) -> None:
        """Note the threshold; move the gap towards ``self.candidates * k`` candidates."""
        last, gap = self.state.threshold_key, self.state.gap
        if selected.nnz < k:  # fewer than k non-zero entries: collect them all
            self.state = ExactState(1, 0, gap)
            return
        threshold = int(kernels.magnitude_keys(selected.values).min())
        if last is not None:
            gap = min(max(gap * self._factor(candidates, k), _NARROWEST), _WIDEST)
        moved = threshold - last if last is not None and last > 1 else 0
        drift = (self.state.drift + moved) // 2  # smoothed: half of a move may be chance
        self.state = ExactState(threshold, drift, gap)

    def _factor(self, candidates: int | None, k: int) -> float:
        """Return by what the gap changes: at most 2 up or down; too many candidates: None."""
        if candidates is None:
            return 0.5
        excess = max(candidates - k, 0) / (_aim(k, self.candidates) - k)
        return float(min(max(excess, 0.25) ** -0.5, 2.0) if excess < 1 else max(excess**-0.5, 0.5))


def _aim(k: int, candidates: float) -> float:
    """Return how many candidates to aim at: where k is small, chance moves the threshold more."""
    return candidates * k + 8 * math.sqrt(k)


def _limit(k: int, candidates: float) -> int:
    """Return how many candidates there is room for."""
    return round(2 * _aim(k, candidates)) + 64
