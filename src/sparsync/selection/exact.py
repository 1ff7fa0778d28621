"""Exact top-k: the k entries of largest magnitude, on every step, without sorting n."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

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
        watch_key: the magnitude from which candidates are collected, as a key; None at first.
        gap: how far that lies below the last threshold, in octaves.
    """

    watch_key: int | None = None
    gap: float = 0.125


@final
class Exact(Selector):
    """Selects exactly ``min(k, nnz)`` entries; ties go to the lower index.

    Candidates are collected in the pass that accumulates: all entries above the last threshold less
    a gap.  The gap adapts so that they number about ``candidates * k``; exact selection runs on them
    alone.  Where the gradient shrank by more than the gap, or grew so much that the candidates
    overflow, the step selects among all n, which costs more and is as exact.

    Args:
        candidates: how many to aim at, as a multiple of k (ours: error feedback piles entries up
            just below the threshold; 5 % lower there are twice as many).

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

    def watch(self, k: int, step: int) -> Watch | None:
        """Watch what reaches the last threshold less the gap."""
        key = self.state.watch_key
        return None if key is None or k <= 0 else Watch(key, _limit(k, self.candidates))

    def select(
        self, accumulated: Tensor, k: int, step: int, found: Found | None = None
    ) -> SparseVector:
        """Return the k largest."""
        size, watched = accumulated.numel(), self.state.watch_key
        candidates = None if found is None else found.indices.numel()
        if found is not None and (found.indices.numel() >= k or watched == 1):
            selected = SparseVector(found.indices, found.values, size).top(k)
        else:
            positions = kernels.top(accumulated, k)
            selected = SparseVector(positions, accumulated[positions], size)
        self._adapt(selected, candidates, k)
        return selected

    def _adapt(self, selected: SparseVector, candidates: int | None, k: int) -> None:
        """Move the gap towards ``self.candidates * k`` candidates, at most by a factor of 2."""
        if k <= 0:
            return
        if selected.nnz < k:  # fewer than k non-zero entries: watch them all
            self.state = ExactState(1, self.state.gap)
            return
        gap = self.state.gap
        if candidates is None:  # too many, or none were collected: nothing is known
            factor = 1.0
        else:
            excess = max(candidates - k, 0) / ((self.candidates - 1) * k)
            factor = min(max(excess, 0.01) ** -0.5, 2.0) if excess < 1 else max(excess**-0.5, 0.5)
        gap = min(max(gap * factor, _NARROWEST), _WIDEST)
        _, octave = kernels.key_range(selected.values.dtype)
        threshold = int(kernels.magnitude_keys(selected.values).min())
        self.state = ExactState(max(threshold - round(gap * octave), 1), gap)


def _limit(k: int, candidates: float) -> int:
    """Return how many candidates are room for: twice the aim, and some for very small k."""
    return round(2 * candidates * k) + 64
