"""Fit robust lines to measured times, and say how sure they are.

Pure: floats in, floats out, the same on every rank that is given the same.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from sparsync.errors import ConfigurationError

__all__ = ["Interval", "Line", "fit_line", "fit_pace", "fit_with_intervals"]

Interval = tuple[float, float]
"""Lowest and highest value that the measurement is compatible with."""

_SHORTEST = 1e-12  # seconds; below, a time is no time, and its ratio would be no number


@dataclass(frozen=True)
class Line:
    """``seconds = alpha + beta * nbytes``, neither of them negative.

    Attributes:
        alpha: seconds per message.
        beta: seconds per byte.
        alpha_interval: of alpha, at the confidence that was asked for.
        beta_interval: of beta, likewise.
    """

    alpha: float
    beta: float
    alpha_interval: Interval = (0.0, math.inf)
    beta_interval: Interval = (0.0, math.inf)

    def seconds(self, nbytes: float) -> float:
        """Return what a message takes."""
        return self.alpha + self.beta * nbytes


def fit_line(seconds_of: Mapping[int, float]) -> Line:
    """Fit a line through the largest size that deviates least from the others, relatively.

    What a large message takes is nearly beta alone and is known best, so it is met exactly; the small
    ones decide alpha.  Deviations count as ratios, since times span orders of magnitude, and are not
    squared: one size that a buffer or a protocol makes faster or slower pulls little.  The line goes
    through another of the points, or has alpha or beta zero.

    Args:
        seconds_of: by message size in bytes; at least two sizes.

    Raises:
        ConfigurationError: fewer than two sizes.

    Example:
        >>> line = fit_line({100: 2e-6, 1_000: 11e-6, 10_000: 5e-6, 100_000: 1001e-6})
        >>> round(line.alpha * 1e6, 6), round(line.beta * 1e6, 6)
        (1.0, 0.01)
    """
    if len(seconds_of) < 2:
        raise ConfigurationError(
            f"fit_line: got {len(seconds_of)} sizes; a latency and a bandwidth need two or more"
        )
    *others, (large, most) = sorted(seconds_of.items())
    slopes = [(most - t) / (large - size) for size, t in others]
    betas = [0.0, most / large, *(slope for slope in slopes if 0 <= slope * large <= most)]

    def deviation(beta: float) -> float:
        ratios = [(t + _SHORTEST) / (most - beta * (large - n) + _SHORTEST) for n, t in others]
        return sum(abs(math.log(ratio)) for ratio in ratios)

    beta = min(betas, key=deviation)
    return Line(max(most - beta * large, 0.0), beta)


def fit_with_intervals(
    samples: Mapping[int, Sequence[float]],
    *,
    confidence: float = 0.95,
    resamples: int = 200,
    seed: int = 0,
) -> Line:
    """Fit a line to the median time of every size; intervals by the bootstrap.

    Args:
        samples: per size in bytes, independent times in seconds; at least two sizes, none empty.
        confidence: of the intervals.
        resamples: how often the samples are drawn again (the 2.5 % ends rest on 5 of 200).
        seed: of these draws.

    Example:
        >>> line = fit_with_intervals({0: [1.0, 1.1, 0.9], 10: [2.0, 2.1, 1.9]})
        >>> line.alpha, line.beta, line.alpha_interval[0] < 1 < line.alpha_interval[1]
        (1.0, 0.1, True)
    """
    best = fit_line({size: median(times) for size, times in samples.items()})
    draw = random.Random(seed)
    lines = [
        fit_line({n: median(draw.choices(times, k=len(times))) for n, times in samples.items()})
        for _ in range(resamples)
    ]
    return Line(
        best.alpha,
        best.beta,
        _middle([line.alpha for line in lines], confidence),
        _middle([line.beta for line in lines], confidence),
    )


def _middle(numbers: Sequence[float], confidence: float) -> Interval:
    """Return the ends of the middle part of the numbers."""
    ordered = sorted(numbers)
    beyond = math.floor(len(ordered) * (1 - confidence) / 2)
    return ordered[beyond], ordered[-1 - beyond]


def fit_pace(
    batches: Sequence[tuple[float, float]],
    *,
    confidence: float = 0.95,
    resamples: int = 200,
    seed: int = 0,
) -> tuple[float, Interval]:
    """Return seconds per unit over all batches, and its interval by the bootstrap.

    All seconds over all units, no median: where processes share cores, most calls run undisturbed
    and few wait long, and the few are what makes them slow.

    Args:
        batches: seconds that each took, and the units that were done in it.
        confidence: of the interval.
        resamples: how often the batches are drawn again.
        seed: of these draws.

    Example:
        >>> fit_pace([(1.0, 10), (3.0, 10)])
        (0.2, (0.1, 0.3))
    """

    def pace(drawn: Sequence[tuple[float, float]]) -> float:
        return sum(seconds for seconds, _ in drawn) / sum(units for _, units in drawn)

    draw = random.Random(seed)
    paces = [pace(draw.choices(batches, k=len(batches))) for _ in range(resamples)]
    return pace(batches), _middle(paces, confidence)
