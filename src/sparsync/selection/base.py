"""The seam of selection: which entries of the accumulated gradient are worth sending."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from sparsync.sparse import Vector
from sparsync.state import Stateful

__all__ = ["Selector"]


class Selector(Stateful):
    """Chooses entries.  Its memory (thresholds, counters) is ``self.state``."""

    @abstractmethod
    def select(self, accumulated: Tensor, k: int, step: int) -> Vector:
        """Return the chosen entries of ``accumulated``, which is not modified.

        Args:
            accumulated: `[n]`, residual + gradient; any n, 0 included.
            k: number of entries asked for; more than n is legal.
            step: 0-based; a period p opens when ``step % p == 0``.

        Returns:
            Entries with the values of ``accumulated``; zeros are never among them, NaN always is.
        """
