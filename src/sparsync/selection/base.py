"""The seam of selection: which entries of the accumulated gradient are worth sending."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.kernels import Found
from sparsync.sparse import Vector
from sparsync.state import Stateful

__all__ = ["Selector", "Watch", "within"]


class Watch(NamedTuple):
    """What to collect in the pass that accumulates: it costs next to nothing there.

    Attributes:
        key: collect entries of at least this magnitude (an integer of ``kernels.magnitude_keys``).
        limit: give up when there are more than this.
    """

    key: int
    limit: int


def within(found: Found | None, watch: Watch | None) -> Found | None:
    """Return those of the found entries that ``watch`` asked for; None where it would be."""
    if found is None or watch is None:
        return None
    reaching = kernels.find(found.values, watch.key, watch.limit)
    if reaching is None or reaching.indices.numel() == found.indices.numel():
        return found if reaching else None
    return Found(found.indices[reaching.indices], reaching.values)


class Selector(Stateful):
    """Chooses entries.  Its memory (thresholds, counters) is ``self.state``.

    ``reuses`` says that thresholds of one step serve the next: of what was selected by another rule
    in between they know nothing.
    """

    reuses: bool = False

    def for_layers(self, sizes: Sequence[int]) -> Selector:
        """Return the selector for a unit of layers of these sizes: itself, unless layers matter."""
        return self

    def methods(self, sizes: Sequence[int]) -> list[str]:
        """Name the method that is used on every layer of a unit, for statistics."""
        return [type(self).__name__] * len(sizes)

    def watch(self, k: int, step: int, dtype: torch.dtype) -> Watch | None:
        """Return what ``select`` would like to have collected; None: nothing.

        Asked before the step's gradients are accumulated, with the state of the last step; ``dtype`` is
        that of the residual.
        """
        return None

    @abstractmethod
    def select(self, accumulated: Tensor, k: int, step: int, found: Found | None = None) -> Vector:
        """Return the chosen entries of ``accumulated``, which is not modified.

        Args:
            accumulated: `[n]`, residual + gradient; any n, 0 included.
            k: number of entries asked for; more than n is legal.
            step: 0-based; a period p opens when ``step % p == 0``.
            found: all entries that ``watch`` asked for, if they were collected.  It saves time and
                changes nothing else.

        Returns:
            Entries with the values of ``accumulated``; zeros are never among them, NaN always is.
        """
