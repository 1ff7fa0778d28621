"""Gaussian-k: a threshold estimated from the mean and the standard deviation."""

from __future__ import annotations

from statistics import NormalDist
from typing import final

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.errors import require
from sparsync.selection.selector import Selector, largest, reaching
from sparsync.sparse import SparseVector

__all__ = ["GaussianK"]


@final
class GaussianK(Selector):
    """Selects the entries above a threshold that k of n normally distributed entries would exceed.

    Real gradients have shorter tails than a normal distribution with the same mean and deviation
    (Ok-Topk, Figure 4), so too few entries reach this threshold.  It is multiplied by ``scaling`` until
    more than ``enough * k`` entries, or all nonzero entries, reach it.  After ``trials`` attempts, the k
    largest are selected instead.  **So between ``min(enough * k, nnz)`` and n entries are selected**: the
    published method has no upper bound on their number, so the collective must cap it.  NaN and Inf are
    always selected and do not affect the threshold.

    Args:
        enough: more entries than this fraction of k must be selected (Ok-Topk, section 5.4: "more than
            3k/4").
        scaling: factor by which each trial multiplies the threshold.  Ok-Topk only says "gradually".  The
            default is 0.9, because under error feedback, about 5 times as many entries reach a threshold
            that is 10 % lower.
        trials: largest number of passes over the elements; with 32 factors of 0.9, the last threshold is
            3 % of the first.

    Cost: computing the mean and deviation of n elements, and n comparisons per trial.   State: none.
    Differs from the paper: the number of trials is bounded.  The absolute value of the mean is used, so
    the sign of the gradient does not matter.  Mean and deviation are computed in float64, from finite
    elements only.

    Example:
        >>> accumulated = torch.tensor([0.1, -0.2, 5.0, 0.1, 0.0, -0.1])
        >>> GaussianK().select(accumulated, k=1, step=0).to_dense().tolist()
        [0.0, 0.0, 5.0, 0.0, 0.0, 0.0]

    References: Shi et al., "Understanding top-k sparsification in distributed deep learning", 2019;
    Li & Hoefler, Ok-Topk, PPoPP 2022, sections 2 and 5.4 ("Gaussiank").
    """

    def __init__(self, enough: float = 0.75, scaling: float = 0.9, trials: int = 32) -> None:
        part, factor = "a fraction of k in [0, 1), e.g. 0.75", "a factor in (0, 1), e.g. 0.9"
        require(0 <= enough < 1, f"GaussianK: enough is {enough}; give {part}")
        require(0 < scaling < 1, f"GaussianK: scaling is {scaling}; give {factor}")
        require(trials >= 1, f"GaussianK: trials is {trials}; give at least 1")
        self.enough, self.scaling, self.trials = enough, scaling, trials

    def select(
        self, accumulated: Tensor, k: int, step: int, collected: SparseVector | None = None
    ) -> SparseVector:
        """Return the entries that reach the threshold."""
        size = accumulated.numel()
        if k <= 0 or size == 0:
            return SparseVector.empty(size, accumulated)
        nnz = int(accumulated.count_nonzero())
        threshold = _threshold(accumulated, min(k, size))
        for _ in range(self.trials):
            key = int(kernels.magnitude_keys(accumulated.new_tensor([threshold], device="cpu")))
            reached = reaching(accumulated, key)
            # once all nonzero entries are selected, a lower threshold finds no more
            if reached is not None and (reached.nnz > self.enough * k or reached.nnz == nnz):
                return reached
            threshold *= self.scaling
        return largest(accumulated, k)


def _threshold(accumulated: Tensor, k: int) -> float:
    """Return ``|mean| + deviation * ppf(1 - k / 2n)`` of finite elements, at most the largest |x|."""
    finite = accumulated[accumulated.isfinite()].double()
    peak = float(finite.abs().max()) if finite.numel() else 0.0
    if peak == 0:
        return 0.0
    # divide magnitudes by the largest one, so that no square overflows or underflows
    variance, mean = torch.var_mean(finite / peak, correction=0)
    # the two tails together contain k / n of the entries
    tail = -NormalDist().inv_cdf(k / accumulated.numel() / 2)
    return peak * min(abs(float(mean)) + float(variance.sqrt()) * tail, 1.0)
