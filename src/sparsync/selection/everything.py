"""No selection: every entry, as a dense vector."""

from __future__ import annotations

from typing import final

from torch import Tensor

from sparsync.selection.base import Selector
from sparsync.sparse import DenseVector, SparseVector

__all__ = ["Everything"]


@final
class Everything(Selector):
    """Selects all n entries: what the dense baseline sends.

    Cost: none.   State: none.   Differs from the paper: nothing.
    """

    def select(
        self, accumulated: Tensor, k: int, step: int, collected: SparseVector | None = None
    ) -> DenseVector:
        """Return the accumulated gradient itself (not a copy)."""
        return DenseVector(accumulated)
