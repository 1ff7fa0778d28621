"""The seam of selection: choose the entries of the accumulated gradient that are worth sending."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.sparse import SparseVector, Vector
from sparsync.state import Stateful

__all__ = ["Selector", "largest", "mixed_seed", "reaching", "room", "smallest_key"]


class Selector(Stateful):
    """Chooses entries.  Its memory (thresholds, counters) is ``self.state``.

    Attributes:
        reuses: thresholds of one step serve the next.  They say nothing about what another rule selected
            in between.
    """

    reuses: bool = False

    def for_layers(self, sizes: Sequence[int]) -> Selector:
        """Return the selector for a unit of layers of these sizes: itself, unless layers matter."""
        return self

    def methods(self, sizes: Sequence[int]) -> list[str]:
        """Name the method that is used on every layer of a unit, for statistics."""
        return [type(self).__name__] * len(sizes)

    def collect_from(self, k: int, step: int, dtype: torch.dtype) -> tuple[int, int] | None:
        """Return which entries to collect in the pass that accumulates, where it costs next to nothing.

        Asked for the ``select`` of this k and step, before the step's gradients are accumulated.

        Returns:
            The smallest magnitude, as a key (``kernels.magnitude_keys`` of ``dtype``), and the largest
            number of entries: if more reach it, nothing is collected.  None: nothing is needed.
        """
        return None

    @abstractmethod
    def select(
        self, accumulated: Tensor, k: int, step: int, collected: SparseVector | None = None
    ) -> Vector:
        """Return the chosen entries of ``accumulated``, which is not modified.

        Args:
            accumulated: `[n]`, residual + gradient; any n, 0 included.
            k: number of entries asked for; more than n is legal.
            step: 0-based; a period p opens when ``step % p == 0``.
            collected: all entries that ``collect_from`` asked for.  They save time and change nothing
                else; None: nothing was collected.

        Returns:
            Entries with the values of ``accumulated``; zeros are never among them, NaN always is.
        """


def largest(accumulated: Tensor, k: int) -> SparseVector:
    """Select the ``min(k, nnz)`` entries of largest magnitude; ties go to the lower index."""
    positions = kernels.top(accumulated, k)
    return SparseVector(positions, accumulated[positions], accumulated.numel())


def reaching(accumulated: Tensor, key: int, limit: int | None = None) -> SparseVector | None:
    """Select all entries of at least a magnitude; None if they are more than ``limit``."""
    found = kernels.find(accumulated, key, limit)
    return None if found is None else SparseVector(*found, accumulated.numel())


def smallest_key(selected: SparseVector) -> int | None:
    """Return the smallest magnitude, as a key; None of no entries."""
    return int(kernels.magnitude_keys(selected.values).min()) if selected.nnz else None


def room(k: int) -> int:
    """Return how many entries may reach a reused threshold before the collecting pass gives up."""
    return 4 * k + 64


def mixed_seed(seed: int, step: int) -> int:
    """Return the seed of a step's draws; ``seed + step`` would shift one sequence from run to run.

    Example:
        >>> mixed_seed(0, 1) == mixed_seed(1, 0)
        False
    """
    digest = hashlib.blake2b(f"{seed} {step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
