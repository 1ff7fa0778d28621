"""Exact top-k: the k entries of largest magnitude, found by ``torch.topk`` on every step."""

from __future__ import annotations

from typing import final

from torch import Tensor

from sparsync import kernels
from sparsync.selection.base import Selector
from sparsync.sparse import SparseVector

__all__ = ["Exact"]


@final
class Exact(Selector):
    """Selects exactly ``min(k, nnz)`` entries; ties go to the lower index.

    Cost: a partial sort of n on every step.   State: none.
    Differs from the paper: deterministic under ties.

    Example:
        >>> import torch
        >>> Exact().select(torch.tensor([1.0, -4.0, 0.0, 2.0]), k=2, step=0).to_dense().tolist()
        [0.0, -4.0, 0.0, 2.0]

    References: the selection of TopkA, TopkDSA and gTopk in Ok-Topk, section 5.
    """

    def select(self, accumulated: Tensor, k: int, step: int) -> SparseVector:
        """Return the k largest."""
        positions = kernels.top(accumulated, k)
        return SparseVector(positions, accumulated[positions], accumulated.numel())
