"""Bins: of every block of consecutive elements those within a factor of its largest."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError
from sparsync.kernels import Found
from sparsync.selection.base import Selector
from sparsync.sparse import SparseVector

__all__ = ["Bins"]


@final
class Bins(Selector):
    """Selects what, ``scale`` times as large, would reach the largest magnitude of its bin.

    So every bin that is not zero gives at least its largest entry, and as many more as come near it:
    the number of entries adapts itself to the values and not to k.  NaN is always among them, and
    nothing else of its bin is.

    Args:
        bin_size: elements per bin; the last may be shorter (AdaComp: 50 for convolutions, 500 for
            fully connected and recurrent layers).
        scale: the factor, at least 1 (AdaComp: 2.0).  Of normally distributed entries in bins of 500,
            2.0 selects one in 9 and 1.2 one in 110: where the last gradient is not known (below), 2.0
            selects far more than AdaComp does.
        cap: at most ``cap * k`` entries (but one at least), the largest; None: any number (as
            published).  A k of 0 selects nothing either way.

    Cost: a maximum and a comparison per element, with a copy of all n.   State: none.
    Differs from the paper: there, old residual + ``scale`` times the new gradient must reach the largest
    sum of the two in the bin.  A selector sees their sum alone, so all of it is scaled: the same rule
    where the old residual is zero, another where it is not.  Values are not quantised.

    Example:
        >>> accumulated = torch.tensor([1.0, -4.0, 2.0, 0.0, 0.5, 0.1])
        >>> Bins(bin_size=3).select(accumulated, k=2, step=0).indices.tolist()
        [1, 2, 4]

    References: Chen et al., `AdaComp <https://arxiv.org/abs/1712.02679>`_, AAAI 2018; RedSync, section
    5.2, argues against it.
    """

    def __init__(self, bin_size: int = 500, scale: float = 2.0, cap: float | None = None) -> None:
        if bin_size < 1:
            raise ConfigurationError(f"Bins: bin_size is {bin_size}; give at least 1 element")
        if not 1 <= scale < math.inf:
            raise ConfigurationError(f"Bins: scale is {scale}; give a factor of at least 1, as 2.0")
        if cap is not None and not cap > 0:
            raise ConfigurationError(f"Bins: cap is {cap}; give a factor > 0 of k, or None")
        self.bin_size, self.scale, self.cap = bin_size, scale, cap

    def select(
        self, accumulated: Tensor, k: int, step: int, found: Found | None = None
    ) -> SparseVector:
        """Return what comes near the largest of its bin."""
        size = accumulated.numel()
        if k <= 0 or size == 0:
            return SparseVector.empty(size, accumulated)
        bin_size = min(self.bin_size, size)
        # the zeros that fill up the last bin are never selected
        padded = torch.nn.functional.pad(accumulated.abs(), (0, -size % bin_size))
        bins = padded.view(-1, bin_size)
        near = (bins >= bins.amax(1, keepdim=True) / self.scale) & (bins > 0)  # NaN is not
        indices = (near | bins.isnan()).flatten().nonzero().flatten()
        selected = SparseVector(indices, accumulated[indices], size)
        return selected if self.cap is None else selected.top(max(math.floor(self.cap * k), 1))
