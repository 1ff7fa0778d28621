"""Periods between exchanges: growing during a warm-up, or adapted to the drift."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsync.errors import check_number_fields, require
from sparsync.feedback.reducer import Reducer

__all__ = ["AdaptivePeriod", "drift_of", "followed", "share_of", "warm_exchanges"]


@dataclass(frozen=True)
class AdaptivePeriod:
    """A rule that keeps the drift, i.e. how far ranks move apart relative to the weights, near a limit.

    ::

        measured = sqrt(mean over ranks of |moved|^2 / |shared weights|^2)     at every exchange

    The period is halved if the drift exceeds ``drift``, and doubled if the drift is below half of it.
    Because of the gap between the two limits, a doubling does not cause a halving.

    The drift is relative to the weights, not to the length of the average update.  Relative to the
    update, it would *fall* as the period grows, because common steps add up faster than noise.  A rule
    that bounded such a drift would drive the period to an extreme.  The length of a step is proportional
    to the learning rate, and noise grows with the root of the number of steps.  So a constant drift
    keeps ``lr^2 H`` constant: the period grows as the rate is lowered.

    Args:
        drift: the limit, > 0, e.g. 0.02; ``stats()["drift"]`` is the last measured drift.
        least: the first and shortest period.
        most: the longest period.

    Example:
        >>> rule = AdaptivePeriod(0.1, most=8)
        >>> [rule.next(4, far=d > 0.1, near=d < 0.05) for d in (0.2, 0.07, 0.01)]
        [2, 4, 8]

    References: Karimireddy et al., SCAFFOLD, ICML 2020 (drift: the distance from the shared model); Kamp
    et al., dynamic model averaging, ECML 2018; Gu et al., a quadratic synchronization rule, ICLR 2024.
    """

    drift: float
    least: int = 1
    most: int = 32

    def __post_init__(self) -> None:
        check_number_fields(self)
        require(
            0 < self.drift < math.inf,
            f"AdaptivePeriod: drift is {self.drift!r}; give a share of the weights > 0, e.g. 0.02",
        )
        require(
            1 <= self.least <= self.most,
            f"AdaptivePeriod: least {self.least!r}, most {self.most!r}; give whole numbers of steps, "
            "1 <= least <= most",
        )

    def next(self, period: int, *, far: bool, near: bool) -> int:
        """Return the next period, given whether the drift was above the limit, or below half of it."""
        # ``far`` is tested first, because the largest drift decides
        if far:
            return max(period // 2, self.least)
        return min(2 * period, self.most) if near else period


def followed(
    rule: AdaptivePeriod, period: int, drift: float, on_any_part: Callable[[bool], bool]
) -> int:
    """Return the period that follows an exchange with this drift, equal on all parts of a replica."""
    far, near = drift > rule.drift, drift < rule.drift / 2
    # A replica is far if any of its parts is far, and near if all parts are near.  Each call of
    # ``on_any_part`` sends a message, so it must be the first operand of ``or``: no part may skip a
    # message that the others send.
    far, near = on_any_part(far) or far, not (on_any_part(not near) or not near)
    return rule.next(period, far=far, near=near)


def warm_exchanges(steps: int, period: int) -> tuple[int, ...]:
    """Return the warm-up steps that end with an exchange; the period starts at 1 and doubles."""
    doublings, last, ends = math.ceil(math.log2(period)), -1, []
    for step in range(steps):
        # equal parts of the warm-up have the periods 1, 2, 4, ...
        part = step * (doublings + 1) // steps
        if step - last >= min(2**part, period):
            last = step
            ends.append(step)
    return tuple(ends)


def share_of(moved: Tensor, shared: Tensor) -> float:
    """Return ``|moved|^2 / |shared|^2``; the vectors may also consist of the norms of their parts."""
    far, whole = (float(torch.linalg.vector_norm(vector)) for vector in (moved, shared))
    share = far / max(whole, sys.float_info.min) if far else 0.0
    return share * share  # Inf if the weights are near zero, which exceeds any limit


async def drift_of(square: float, reducer: Reducer) -> float:
    """Return the root mean square of all ranks' distances, given the square of this rank's distance."""
    # Gather the values, and sum them in rank order on each rank.  The sum decides the next period, which
    # must be equal on all ranks, and a native allreduce guarantees equal sums only up to rounding.
    mine = torch.tensor([square], dtype=torch.float64, device="cpu")
    try:
        everyone = await reducer.channel("drift").allgather(mine, "drift")
    except BaseException:
        reducer.fail()
        raise
    return math.sqrt(sum(map(float, everyone)) / len(everyone))
