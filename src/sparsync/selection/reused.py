"""Threshold reuse: exact every ``threshold_period`` steps, one comparison per entry in between.

Or exact when it has to be: "auto" renews the threshold when the count leaves a band around k.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.errors import ConfigurationError
from sparsync.kernels import Found
from sparsync.selection.base import Selector, Watch
from sparsync.sparse import SparseVector

__all__ = ["Reused", "ReusedState"]

_BAND = 0.11  # of k: the paper's average deviation stays below it (section 5.1)
_MARGIN = 1 / 4  # octaves below the threshold from which "auto" collects: 84 % of it
_ROOM = 4  # times k: what a reused threshold may find before the pass that accumulates gives up


@dataclass(frozen=True)
class ReusedState:
    """What is carried from step to step.

    Attributes:
        threshold_key: magnitude of the k-th largest entry at the last exact step, as the integer
            of ``kernels.magnitude_keys``; None before the first exact step with a non-zero entry.
    """

    threshold_key: int | None = None


@final
class Reused(Selector):
    """Selects what is at least as large as the k-th largest was at the last exact step.

    On exact steps: exactly ``min(k, nnz)`` entries.  In between the count drifts, up where residuals
    pile up below the threshold, down where gradients shrink.  So at most ``cap * k`` are taken, the
    largest (the rest stays in the residual), and with ``floor`` a step that finds fewer than
    ``floor * k`` is made exact.

    ``threshold_period="auto"`` knows no period: a step that finds fewer than ``(1 - band) k`` or more
    than ``(1 + band) k`` takes exactly k and renews the threshold.  That mostly costs next to nothing:
    if k entries or more lie above 84 % of the threshold, the k largest are among them.  So no step
    deviates by more than the band, and the paper's 11 %, an average there, is a bound here.

    Cost: n comparisons; a partial sort of n every ``threshold_period`` steps and below the floor, with
    "auto" where fewer than k entries lie above 84 % of the threshold, or more than 4 k above it.
    State: ``ReusedState``.
    Differs from the paper: cap and floor (``None`` is the paper), "auto"; steps are 0-based.

    Example:
        >>> import torch
        >>> selector = Reused(threshold_period=32)
        >>> selector.select(torch.tensor([3.0, 2.0, 1.0]), k=2, step=0).nnz
        2
        >>> selector.select(torch.tensor([0.3, 0.2, 9.0]), k=2, step=1).indices.tolist()
        [2]

    References: Li & Hoefler, Ok-Topk, PPoPP 2022, section 3.1.3 and Algorithm 1, lines 2-4.
    """

    def __init__(
        self,
        threshold_period: int | Literal["auto"] = 32,
        cap: float | None = 1.0,
        floor: float | None = None,
        *,
        band: float = _BAND,
    ) -> None:
        """Set the period tau' in steps (paper: 32 for VGG and LSTM, 128 for BERT), cap, floor, band."""
        if threshold_period != "auto" and not (
            _is_number(threshold_period) and threshold_period >= 1
        ):
            raise ConfigurationError(
                f'Reused: threshold_period is {threshold_period}; give at least 1 step, or "auto"'
            )
        if not 0 <= band < 1:
            raise ConfigurationError(f"Reused: band is {band}; give a fraction of k in [0, 1)")
        if cap is not None and not cap > 0:
            raise ConfigurationError(f"Reused: cap is {cap}; give a factor > 0 of k, or None")
        if floor is not None and not 0 <= floor <= 1:
            raise ConfigurationError(
                f"Reused: floor is {floor}; give a factor of k in [0, 1], or None"
            )
        if cap is not None and floor is not None and cap < floor:
            raise ConfigurationError(
                f"Reused: cap {cap} is below floor {floor}, so every step would be exact; "
                "raise the cap or lower the floor"
            )
        self.threshold_period, self.cap, self.floor, self.band = threshold_period, cap, floor, band
        self.reuses = threshold_period != 1
        self.state = ReusedState()

    def watch(self, k: int, step: int, dtype: torch.dtype) -> Watch | None:
        """Watch what reaches the threshold, on the steps that reuse it."""
        known = self.state.threshold_key
        if known is None or self._opens(step):
            return None
        room = _ROOM * k + 64
        return Watch(self._lowest(known, dtype), 2 * room if self._adapts else room)

    def select(
        self, accumulated: Tensor, k: int, step: int, found: Found | None = None
    ) -> SparseVector:
        """Return the entries above the threshold, which is renewed when the period opens."""
        known, size = self.state.threshold_key, accumulated.numel()
        if known is not None and not self._opens(step):
            limit = size if self.cap is None else max(math.floor(self.cap * k), 1)
            if self._adapts:
                lowest = self._lowest(known, accumulated.dtype)
                most = _ROOM * k + 64
                found = found or kernels.find(accumulated, lowest, 2 * most)
                found = found or kernels.find(accumulated, known, most)
                return self._within_band(accumulated, k, found, limit)
            room = None if self.cap is None else max(limit, _ROOM * k + 64)
            found = found or kernels.find(accumulated, known, room)
            if found is None:  # more than there is room for reach it: the largest of them
                positions = kernels.top(accumulated, limit)
                return SparseVector(positions, accumulated[positions], size)
            reached = SparseVector(found.indices, found.values, size)
            if self.floor is None or reached.nnz >= min(k, self.floor * k):
                return reached.top(limit)
        return self._exactly(accumulated, k)

    @property
    def _adapts(self) -> bool:
        """Thresholds are renewed when it is time, not every so many steps."""
        return self.threshold_period == "auto"

    def _opens(self, step: int) -> bool:
        """Tell whether a step opens a period."""
        return self.threshold_period != "auto" and step % self.threshold_period == 0

    def _lowest(self, known: int, dtype: torch.dtype) -> int:
        """Return from which magnitude on entries are looked at."""
        _, octave = kernels.key_range(dtype)
        return max(known - round(_MARGIN * octave), 1) if self._adapts else known

    def _within_band(
        self, accumulated: Tensor, k: int, found: Found | None, limit: int
    ) -> SparseVector:
        """Return what reaches the threshold, if it numbers about k; else exactly k."""
        known = self.state.threshold_key
        if found is not None and known is not None:
            candidates = SparseVector(found.indices, found.values, accumulated.numel())
            reaching = kernels.find(found.values, known, None)
            assert reaching is not None, "without a limit there is always room"
            if abs(reaching.indices.numel() - k) <= self.band * k:
                return candidates.keep(reaching.indices).top(limit)
            if candidates.nnz >= k:
                return self._renewed(candidates.top(k))
        return self._exactly(accumulated, k)

    def _exactly(self, accumulated: Tensor, k: int) -> SparseVector:
        """Return the k largest of all."""
        positions = kernels.top(accumulated, k)
        return self._renewed(SparseVector(positions, accumulated[positions], accumulated.numel()))

    def _renewed(self, selected: SparseVector) -> SparseVector:
        """Take the smallest magnitude of an exact selection as the threshold."""
        self.state = ReusedState(_smallest_key(selected.values))
        return selected


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _smallest_key(values: Tensor) -> int | None:
    """Return the smallest magnitude as a key, None if there is no value."""
    return int(kernels.magnitude_keys(values).min()) if values.numel() else None
