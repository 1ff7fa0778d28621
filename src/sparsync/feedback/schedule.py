"""Schedules of the density: a warm-up, and a rule that follows the progress of training."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sparsync.errors import require
from sparsync.monitoring import Measured

__all__ = ["DGC_RAMP", "AdaptiveDensity", "Warmup"]

DGC_RAMP = (0.25, 0.0625, 0.015625, 0.004, 0.001)


@dataclass(frozen=True)
class AdaptiveDensity:
    """A density that follows the progress of training: ``k / n = at_equal * signal / noise``.

    The mean gradient of P batches is a signal and noise of the batches, which no exchange can remove.
    What error feedback adds to the rate of SGD is ``1 / (density T)`` times the signal's part; it is
    hidden by the noise's part while the density is at least some constant times signal / noise (both as
    square norms).  Many entries are worth their bytes while the batches agree, and few when the
    mean is mostly noise.  Where the measured xi is above P, the density rises all the same: below P
    it is harmless (Ok-Topk, section 5.1).

    Both are measured every ``period`` steps (``sparsync.monitoring.XiProbe``), on all ranks alike, and
    the density goes a quarter of the way, on a logarithmic scale, at most by the factor ``pace``: one
    measurement tells little more than the order of magnitude.  It stays within ``low`` and ``high``, and
    begins as ``at_equal``, its value where signal and noise are equal.

    The rule and its constants are not from a paper; ``benchmarks/adaptive-density.md`` measures them.

    Example:
        >>> rule = AdaptiveDensity(0.01, high=0.05)
        >>> [round(rule.next(0.01, Measured(xi=1.0, signal_to_noise=s), 4), 4) for s in (0.5, 1, 9)]
        [0.0084, 0.01, 0.015]

    References: Stich & Karimireddy, The Error-Feedback Framework, JMLR 2020 (the rate).
    """

    at_equal: float = 0.01
    low: float = 0.001
    high: float = 0.1
    period: int = 50
    pace: float = 1.5

    def __post_init__(self) -> None:
        require(
            0 < self.low <= self.at_equal <= self.high <= 1,
            f"AdaptiveDensity: low {self.low}, at_equal {self.at_equal}, high {self.high}; give "
            "fractions in (0, 1] that ascend in this order",
        )
        require(
            type(self.period) is int and self.period >= 1,
            f"AdaptiveDensity: period is {self.period!r}; give a whole number of steps >= 1",
        )
        require(self.pace >= 1, f"AdaptiveDensity: pace is {self.pace}; give a factor >= 1")

    def next(self, density: float, measured: Measured, ranks: int) -> float:
        """Return the density after a measurement on P ranks that had this one; of one: the same."""
        if ranks == 1:  # shows no noise
            return density
        wanted = self.at_equal * measured.signal_to_noise
        if measured.xi > ranks:
            wanted = max(wanted, density * measured.xi / ranks)
        wanted = min(max(wanted, self.low), self.high)
        # a quarter of the way on a logarithmic scale; roots are correctly rounded everywhere, powers not
        step = min(max(math.sqrt(math.sqrt(wanted / density)), 1 / self.pace), self.pace)
        return min(max(density * step, self.low), self.high)


@dataclass(frozen=True)
class Warmup:
    """How densely the first steps are exchanged.

    Attributes:
        steps: how many steps the warm-up takes.
        densities: of equally long parts of the warm-up (DGC: ``DGC_RAMP``, one epoch each); none: all of
            it is dense, as in RedSync: at 64 ranks and 1.5625 % an allgather already takes as many
            bytes as the dense exchange.

    Example:
        >>> warmup = Warmup(10, DGC_RAMP)
        >>> [warmup.density(step, final=0.001) for step in (0, 1, 2, 10)]
        [0.25, 0.25, 0.0625, 0.001]
        >>> Warmup(10).density(9, final=0.001) is None
        True

    References: Fang et al., RedSync, section 5.6; Lin et al., Deep Gradient Compression, ICLR 2018.
    """

    steps: int = 0
    densities: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        whole = type(self.steps) is int and self.steps >= 0
        require(whole, f"warmup_steps is {self.steps!r}; give a whole number >= 0")
        require(
            all(0 < density <= 1 for density in self.densities),
            f"warmup_densities are {self.densities}; give fractions in (0, 1], e.g. {DGC_RAMP}",
        )
        require(
            not self.densities or self.steps > 0,
            f"warmup_densities {self.densities} need warmup_steps > 0: how long they take",
        )

    def density(self, step: int, final: float) -> float | None:
        """Return the density of a step, at least the final one; None: dense."""
        if step >= self.steps:
            return final
        if not self.densities:
            return None
        # never below the final density, which may lie inside the ramp
        return max(self.densities[step * len(self.densities) // self.steps], final)
