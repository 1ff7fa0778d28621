"""Trimmed top-k: a threshold between mean and maximum, then exact top-k among what reaches it."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.errors import ConfigurationError
from sparsync.kernels import Found
from sparsync.selection.base import Selector
from sparsync.sparse import SparseVector

__all__ = ["Trimmed", "key_at", "mean_and_max"]

# elements whose magnitudes stay in a CPU's cache: three times as fast as a copy of all
_BLOCK = 1 << 18


@final
class Trimmed(Selector):
    """Selects exactly ``min(k, nnz)`` entries, as ``Exact`` does; ties go to the lower index.

    The threshold ``mean + ratio (max - mean)`` of the magnitudes is the first of ``ratio`` = 1 - eps,
    1 - 2 eps, ..., 0 that at least k entries reach; the k largest of those are taken.  Where fewer than k
    reach the mean, or NaN or Inf leaves no mean, they are taken from all n.

    Args:
        eps: step of the ratio (Alg. 2: 0.2); at most 1 / eps thresholds are counted.

    Cost: mean and maximum of n elements, one pass that counts for all thresholds, one that collects;
        a selection among the survivors.
    State: none.
    Differs from the paper: the loop ends when at least k entries reach the threshold (printed: it goes
    on while more than k do, with a threshold that is not set yet); all thresholds are counted in one
    pass; the walk ends at the mean; deterministic under ties.

    Example:
        >>> accumulated = torch.tensor([1.0, -4.0, 0.0, 2.0])
        >>> Trimmed().select(accumulated, k=2, step=0).to_dense().tolist()
        [0.0, -4.0, 0.0, 2.0]

    References: Fang et al., RedSync, 2018, section 5.2.1 and Algorithm 2.
    """

    def __init__(self, eps: float = 0.2) -> None:
        if not 0.001 <= eps <= 1:
            raise ConfigurationError(
                f"Trimmed: eps is {eps}; give the step of the ratio, in [0.001, 1], as 0.2"
            )
        self.eps = eps

    def select(
        self, accumulated: Tensor, k: int, step: int, found: Found | None = None
    ) -> SparseVector:
        """Return the k largest."""
        size = accumulated.numel()
        if k <= 0 or size == 0:
            return SparseVector.empty(size, accumulated)
        mean, largest = mean_and_max(accumulated)
        ratios = [max(1 - i * self.eps, 0.0) for i in range(math.ceil(1 / self.eps), 0, -1)]
        keys = [key_at(ratio, mean, largest, accumulated.dtype) for ratio in ratios]
        counts = kernels.count_from(accumulated, torch.tensor(keys, device=accumulated.device))
        enough = [(key, n) for key, n in zip(keys, counts.tolist(), strict=True) if n >= k]
        if enough:  # keys ascend: the last is the first of the walk
            survivors = kernels.find(accumulated, *enough[-1])
            assert survivors is not None  # they were counted
            return SparseVector(survivors.indices, survivors.values, size).top(k)
        positions = kernels.top(accumulated, k)
        return SparseVector(positions, accumulated[positions], size)


def mean_and_max(accumulated: Tensor) -> tuple[float, float]:
    """Return mean and maximum of ``|accumulated|``, which has an element; NaN makes the mean NaN.

    Example:
        >>> mean_and_max(torch.tensor([1.0, -3.0]))
        (2.0, 3.0)
    """
    on_cpu = accumulated.device.type == "cpu"
    wide = torch.promote_types(accumulated.dtype, torch.float32)  # 16 bits would round the mean
    parts = []
    for block in torch.split(accumulated, _BLOCK) if on_cpu else [accumulated]:
        magnitudes = block.abs()
        parts.append(torch.stack([magnitudes.sum(dtype=wide), magnitudes.max().to(wide)]))
    sums, maxima = zip(*torch.stack(parts).tolist(), strict=True)
    mean, largest = sum(sums) / accumulated.numel(), max(maxima)
    return min(mean, largest), largest  # rounding lifts the mean of equal numbers above them


def key_at(ratio: float, mean: float, largest: float, dtype: torch.dtype) -> int:
    """Return the threshold ``mean + ratio (largest - mean)`` as a magnitude key of ``dtype``."""
    threshold = torch.tensor([mean + ratio * (largest - mean)], dtype=dtype, device="cpu")
    return int(kernels.magnitude_keys(threshold))
