"""Sampled: a threshold estimated from a random sample."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.errors import require
from sparsync.selection.selector import Selector, largest, mixed_seed, reaching
from sparsync.sparse import SparseVector

__all__ = ["Sampled", "SampledState"]


@dataclass(frozen=True)
class SampledState:
    """State carried from step to step."""

    calls: int = 0  # number of calls of ``select``, which with the seed determines the next sample


@final
class Sampled(Selector):
    """Selects the k largest of the entries that reach a threshold estimated from a random sample.

    The threshold is the smallest magnitude in a top-k of the sample, with k scaled to the sample's size.
    If more than k entries reach it, a second top-k among them leaves exactly k.  If fewer than ``enough
    * k`` entries reach it, lower thresholds from the same sample are tried (for 2 k, 4 k, ... entries).
    The last resort is a selection among all n.  **Between ``min(enough * k, nnz)`` and k entries are
    selected, always the largest**; ties go to the lower index.

    Args:
        fraction: fraction of the n elements to sample, with replacement (the paper: 0.001 to 0.01).
        enough: fraction of k entries that must reach the threshold (Ok-Topk, section 5.4, uses 3/4).
        least: on average, the sample contains at least this many of the k largest entries (not in the
            paper).  With 16, the number of entries that reach the threshold differs from k by at most a
            quarter in two cases out of three.  If the sample would need all n elements, the selection is
            exact.
        seed: seed of the samples, which are the same on every device.

    Cost: a sort of ``max(fraction, least / k) * n`` elements, one or two passes over all n, and a top-k
    among about k entries.   State: ``SampledState``.
    Differs from the paper: the paper runs the second top-k only if far more than k entries reach the
    threshold, and has neither lower thresholds nor ``least``.

    Example:
        >>> accumulated = torch.arange(1000.0)
        >>> Sampled().select(accumulated, k=100, step=0).nnz in range(75, 101)
        True

    References: Lin et al., `Deep Gradient Compression <https://arxiv.org/abs/1712.01887>`_, ICLR 2018;
    RedSync, section 5.2, which argues against sampling.
    """

    def __init__(
        self, fraction: float = 0.01, enough: float = 0.75, least: int = 16, seed: int = 0
    ) -> None:
        sampled, part = (
            "a fraction of the elements in (0, 1], e.g. 0.01",
            "a fraction of k in [0, 1], e.g. 0.75",
        )
        require(0 < fraction <= 1, f"Sampled: fraction is {fraction}; give {sampled}")
        require(0 <= enough <= 1, f"Sampled: enough is {enough}; give {part}")
        require(least >= 1, f"Sampled: least is {least}; give at least 1 element")
        self.fraction, self.enough, self.least, self.seed = fraction, enough, least, seed
        self.state = SampledState()

    def select(
        self, accumulated: Tensor, k: int, step: int, collected: SparseVector | None = None
    ) -> SparseVector:
        """Return the k largest of the entries that reach the threshold."""
        # the count belongs to the state, so that a retried step or a resumed run draws the same samples
        size, calls = accumulated.numel(), self.state.calls
        self.state = SampledState(calls + 1)
        if k <= 0 or size == 0:
            return SparseVector.empty(size, accumulated)
        for key in self._thresholds(accumulated, k, calls):
            reached = reaching(accumulated, key)
            if reached is not None and reached.nnz >= self.enough * k:
                return reached.top(k)
        return largest(accumulated, k)

    def _thresholds(self, accumulated: Tensor, k: int, calls: int) -> Iterator[int]:
        """Yield keys that about k, 2 k, 4 k, ... entries reach; yield none if all n must be sampled."""
        size = accumulated.numel()
        count = math.ceil(max(self.fraction, self.least / k) * size)
        if count >= size:
            return
        # draw on the CPU, so that every device samples the same positions
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, calls))
        positions = torch.randint(size, (count,), generator=generator, device="cpu").to(
            accumulated.device
        )
        sample = kernels.magnitude_keys(accumulated[positions]).sort(descending=True).values
        rank = max(round(k * count / size), 1)
        while rank <= count and (key := int(sample[rank - 1])) > 0:
            yield key
            rank *= 2
