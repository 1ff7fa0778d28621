"""Step sizes over time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sparsync.errors import ConfigurationError

__all__ = ["SCHEDULES", "Schedule"]

SCHEDULES = ("constant", "1/t", "1/sqrt(t)", "step")


@dataclass(frozen=True)
class Schedule:
    """The learning rate of every step.

    With t = step / period, steps counted from 0: constant: ``lr``;  1/t: ``lr / (1 + t)``;  1/sqrt(t):
    ``lr / sqrt(1 + t)``;  step: ``lr * factor ** floor(t)``.

    Attributes:
        name: one of ``SCHEDULES``.
        lr: the first learning rate.
        period: in steps; None: an epoch's.
        factor: of "step", in (0, 1].

    Example:
        >>> schedule = Schedule("1/t", lr=1.0)
        >>> [schedule.rate(step, epoch_steps=10) for step in (0, 10, 30)]
        [1.0, 0.5, 0.25]
    """

    name: str = "constant"
    lr: float = 1.0
    period: int | None = None
    factor: float = 0.5

    def __post_init__(self) -> None:
        if self.name not in SCHEDULES:
            raise ConfigurationError(
                f"unknown schedule {self.name!r}; choose one of {', '.join(SCHEDULES)}"
            )
        if not 0 < self.lr < math.inf:
            raise ConfigurationError(f"lr is {self.lr}; give a number > 0")
        if self.period is not None and self.period < 1:
            raise ConfigurationError(f"period is {self.period}; give at least 1 step")
        if not 0 < self.factor <= 1:
            raise ConfigurationError(f"factor is {self.factor}; give a number in (0, 1]")

    def rate(self, step: int, epoch_steps: int) -> float:
        """Return the learning rate of a 0-based step."""
        time = step / (self.period or max(epoch_steps, 1))
        if self.name == "1/t":
            return self.lr / (1 + time)
        if self.name == "1/sqrt(t)":
            return self.lr / math.sqrt(1 + time)
        return self.lr * self.factor ** math.floor(time) if self.name == "step" else self.lr
