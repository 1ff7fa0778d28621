"""The interface of selectors, and two selectors without settings: everything, and exact top-k."""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.sparse import DenseVector, SparseVector, Vector
from sparsync.state import Stateful

__all__ = [
    "Everything",
    "Exact",
    "ExactState",
    "Selector",
    "largest",
    "mixed_seed",
    "reaching",
    "room",
    "smallest_key",
]

# The number of entries to collect, in units of k.  Error feedback accumulates entries right below the
# threshold: 1.4 k entries reach 99 % of it, 2 k about 95 %, 5.3 k 90 %.  So even a slightly stale
# threshold selects far too many or too few, and no fixed margin suits all steps.
_AIM = 2.0
_NARROWEST, _WIDEST = 1 / 256, 2.0  # limits of the gap, in octaves


class Selector(Stateful):
    """Chooses entries of the accumulated gradient; its memory (thresholds, counters) is ``state``."""

    # whether a step's threshold is reused on the next step, unless a rule says otherwise
    reuses: bool = False

    def for_layers(self, sizes: Sequence[int]) -> Selector:
        """Return the selector for a unit whose layers have these sizes; by default, this one."""
        return self

    def method(self, size_bytes: int) -> str:
        """Return the name of the method for a layer of this many bytes, for statistics."""
        return type(self).__name__

    @property
    def threshold_key(self) -> int | None:
        """The smallest magnitude that was selected, as a key; None if the state has none."""
        found: int | None = getattr(self.state, "threshold_key", None)
        return found

    def collect_from(self, k: int, step: int, dtype: torch.dtype) -> tuple[int, int] | None:
        """Choose the entries to collect in the accumulating pass, where collecting costs almost nothing.

        This is called before the step's gradients are accumulated.  It returns the smallest magnitude
        to collect, as a key (``kernels.magnitude_keys`` of ``dtype``), and a limit: if more entries
        reach this magnitude, none are collected.  If it returns None, no entries are collected.
        """
        return None

    @abstractmethod
    def select(
        self, accumulated: Tensor, k: int, step: int, collected: SparseVector | None = None
    ) -> Vector:
        """Return the chosen entries of ``accumulated``, which is not modified.

        Args:
            accumulated: `[n]`, residual + gradient; any n, including 0.
            k: the intended number of entries; more than n is legal.
            step: 0-based; a period of p steps starts when ``step % p == 0``.
            collected: all entries that ``collect_from`` asked for, or None if there were too many.
                They save time and do not change the result.

        Returns:
            Entries with the values of ``accumulated``; zeros are never selected, NaN always is.
        """


@final
class Everything(Selector):
    """Selects all n entries, as a dense vector, for the dense baseline.

    Cost: none.   State: none.   Differs from the paper: nothing.
    """

    def select(
        self, accumulated: Tensor, k: int, step: int, collected: SparseVector | None = None
    ) -> DenseVector:
        """Return the accumulated gradient itself (not a copy)."""
        return DenseVector(accumulated)


@dataclass(frozen=True)
class ExactState:
    """State carried from step to step."""

    threshold_key: int | None = None  # the last step's k-th largest magnitude; initially None
    drift: int = 0  # smoothed change of the threshold per step
    gap: float = 0.125  # distance below the expected threshold from which to collect, in octaves


@final
class Exact(Selector):
    """Selects exactly ``min(k, nnz)`` entries; ties go to the lower index.

    The accumulating pass collects all entries above the expected threshold minus a gap, and the exact
    selection examines only these entries.  The gap adapts so that about 2 k entries are collected.  If
    too few or too many were collected, the step selects among all n; this costs more but is also exact.

    Cost: n comparisons in the accumulating pass, and a selection among about 2 k entries.
    State: ``ExactState``.
    Differs from the paper: deterministic under ties; no sort of n.

    Example:
        >>> Exact().select(torch.tensor([1.0, -4.0, 0.0, 2.0]), k=2, step=0).to_dense().tolist()
        [0.0, -4.0, 0.0, 2.0]

    References: the selection of TopkA, TopkDSA and gTopk in Ok-Topk, section 5.
    """

    def __init__(self) -> None:
        self.state = ExactState()

    def collect_from(self, k: int, step: int, dtype: torch.dtype) -> tuple[int, int] | None:
        """Collect from one gap below the expected threshold; allow about twice the intended number."""
        key = self._lowest(dtype)
        return None if key is None or k <= 0 else (key, round(2 * _aim(k)) + 64)

    def select(
        self, accumulated: Tensor, k: int, step: int, collected: SparseVector | None = None
    ) -> SparseVector:
        """Return the k largest entries."""
        # The k largest are among the collected entries if at least k were collected, or if all nonzero
        # entries were.
        everything = self._lowest(accumulated.dtype) == 1
        if collected is not None and (collected.nnz >= k or everything):
            selected = collected.top(k)
        else:
            selected = largest(accumulated, k)
        if k > 0:
            self._adapt(selected, None if collected is None else collected.nnz, k)
        return selected

    def _lowest(self, dtype: torch.dtype) -> int | None:
        """Return the key from which entries are collected: the expected threshold minus the gap."""
        state: ExactState = self.state
        if state.threshold_key is None:
            return None
        _, octave = kernels.key_range(dtype)
        return max(state.threshold_key + state.drift - round(state.gap * octave), 1)

    def _adapt(self, selected: SparseVector, collected: int | None, k: int) -> None:
        """Record the threshold; adapt the gap to collect the intended number of entries."""
        last, gap = self.state.threshold_key, self.state.gap
        if selected.nnz < k:  # fewer than k entries are nonzero: collect all of them next time
            self.state = ExactState(1, 0, gap)
            return
        threshold = int(kernels.magnitude_keys(selected.values).min())
        if last is not None:
            gap = min(max(gap * _factor(collected, k), _NARROWEST), _WIDEST)
        moved = threshold - last if last is not None and last > 1 else 0
        # halve a change, because part of it may be random; integer arithmetic gives the same state on
        # every platform
        drift = (self.state.drift + moved) // 2
        self.state = ExactState(threshold, drift, gap)


def _aim(k: int) -> float:
    """Return how many entries to collect: 2 k and a margin, because a small k has unsteady thresholds."""
    return _AIM * k + 8 * math.sqrt(k)


def _factor(collected: int | None, k: int) -> float:
    """Return the factor by which to change the gap; ``collected`` is None if there were too many."""
    if collected is None:
        return 0.5
    # assume that the number of entries in excess of k grows with the square of the gap
    excess = max(collected - k, 0) / (_aim(k) - k)
    return float(min(max(excess, 0.25) ** -0.5, 2.0) if excess < 1 else max(excess**-0.5, 0.5))


def largest(accumulated: Tensor, k: int) -> SparseVector:
    """Select the ``min(k, nnz)`` entries of largest magnitude; ties go to the lower index."""
    positions = kernels.top(accumulated, k)
    return SparseVector(positions, accumulated[positions], accumulated.numel())


def reaching(accumulated: Tensor, key: int, limit: int | None = None) -> SparseVector | None:
    """Select all entries with a magnitude of at least ``key``; return None if more than ``limit`` are."""
    found = kernels.find(accumulated, key, limit)
    return None if found is None else SparseVector(*found, accumulated.numel())


def smallest_key(selected: SparseVector) -> int | None:
    """Return the smallest magnitude, as a key, or None if there are no entries."""
    return int(kernels.magnitude_keys(selected.values).min()) if selected.nnz else None


def room(k: int) -> int:
    """Return the largest number of entries that the collecting pass keeps for a reused threshold."""
    return 4 * k + 64


def mixed_seed(seed: int, step: int) -> int:
    """Return the seed for a step's random numbers."""
    # with ``seed + step``, seeds 0 and 1 would draw the same sequence, one step apart
    digest = hashlib.blake2b(f"{seed} {step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
