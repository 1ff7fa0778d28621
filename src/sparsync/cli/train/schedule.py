"""Schedules of the learning rate after its warm-up: constant, linear, in steps, or on a plateau."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import final

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from sparsync.cli.values import check
from sparsync.errors import ConfigurationError

__all__ = ["Plateau", "Schedule", "parse_schedule"]

_KINDS = ("constant", "linear", "step", "plateau")
_EXPECTED = "constant, linear, step:FACTOR:AT+AT or plateau:FACTOR:PATIENCE:EVERY"


@final
@dataclass(frozen=True)
class Schedule:
    """The factor by which a schedule multiplies the learning rate.

    - "constant": 1.
    - "linear": falls to 0 after the last step.
    - "step": ``factor`` to the power of the number of milestones passed, like
      ``torch.optim.lr_scheduler.MultiStepLR``.  A milestone is a step, or a fraction of all steps.
    - "plateau": 1, because only ``Plateau`` knows the losses.
    """

    kind: str = "constant"
    factor: float = 1.0
    at: tuple[float, ...] = ()  # steps; below 1, fractions of all steps
    patience: int = 0  # for "plateau": accepted number of windows without a better loss
    every: int = 1  # for "plateau": number of steps in a window

    def __post_init__(self) -> None:
        check("lr_schedule", self.kind, self.kind in _KINDS, _EXPECTED)
        if self.kind in ("step", "plateau"):
            below = 0 < self.factor < 1
            check("lr_schedule: FACTOR", self.factor, below, "a number between 0 and 1")
        rising = list(self.at) == sorted(set(self.at)) and all(place > 0 for place in self.at)
        alike = all(place < 1 for place in self.at) or all(place >= 1 for place in self.at)
        expected = "rising steps > 0, or rising percentages below 100%"
        check("lr_schedule: AT", self.at, rising and alike, expected)
        check("lr_schedule: PATIENCE", self.patience, self.patience >= 0, "a number >= 0")
        check("lr_schedule: EVERY", self.every, self.every >= 1, "a number of steps >= 1")

    def milestones(self, steps: int) -> list[int]:
        """Return the 0-based steps at which the rate falls, in a run of this many steps."""
        return [round(place * steps) if place < 1 else int(place) for place in self.at]

    def at_step(self, step: int, *, steps: int, warmup: int = 0) -> float:
        """Return the factor of a 0-based step.

        Args:
            step: 0-based.
            steps: number of steps of the whole run.
            warmup: number of steps at the start over which the rate rises; "linear" falls only after
                them.

        Example:
            >>> schedule = parse_schedule("step:0.1:50%+75%")
            >>> [schedule.at_step(step, steps=160) for step in (79, 80, 119)]
            [1.0, 0.1, 0.1]
            >>> parse_schedule("linear").at_step(60, steps=100, warmup=20)
            0.5
        """
        if self.kind == "linear" and step >= warmup:
            return (steps - step) / max(steps - warmup, 1)
        return self.factor ** bisect_right(self.milestones(steps), step)


@final
class Plateau:
    """Multiplies the rate by a factor whenever the loss stops falling (``ReduceLROnPlateau``).

    The loss is the mean over a window of ``every`` steps.  Once more than ``patience`` windows in a row
    have not improved on the best one, the rate is multiplied by the schedule's factor.  Ranks with equal
    losses have equal rates.

    Attributes:
        factor: the present factor of the rate.

    Example:
        >>> plateau = Plateau(parse_schedule("plateau:0.5:1:2"))
        >>> for loss in (3.0, 3.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0):
        ...     if plateau.is_due(loss):
        ...         plateau.judge(plateau.mean)
        >>> plateau.factor
        0.5
    """

    def __init__(self, schedule: Schedule) -> None:
        self._every = schedule.every
        # a dummy optimizer with rate 1, because the scheduler needs one; its rate is the factor
        self._optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        self._scheduler = ReduceLROnPlateau(
            self._optimizer, factor=schedule.factor, patience=schedule.patience
        )
        self._window: list[float] = []
        self.mean = 0.0  # mean of the last complete window

    @property
    def factor(self) -> float:
        """The product of all reductions so far."""
        return float(self._optimizer.param_groups[0]["lr"])

    def is_due(self, loss: float) -> bool:
        """Record one step's loss; return whether this completes a window, whose mean is in ``mean``."""
        self._window.append(loss)
        if len(self._window) < self._every:
            return False
        self.mean = sum(self._window) / self._every
        self._window.clear()
        return True

    def judge(self, mean: float) -> None:
        """Compare a window's mean with the best one, and reduce the rate if necessary."""
        self._scheduler.step(mean)


def parse_schedule(text: str) -> Schedule:
    """Read "constant", "linear", "step:FACTOR:AT+AT" or "plateau:FACTOR:PATIENCE:EVERY".

    AT is a step or, with a percent sign, a percentage of the run.

    Raises:
        ConfigurationError: the text has none of these forms, a factor is outside (0, 1), or
            milestones do not rise.

    Example:
        >>> parse_schedule("step:0.1:80+120")
        Schedule(kind='step', factor=0.1, at=(80.0, 120.0), patience=0, every=1)
        >>> parse_schedule("plateau:0.5:2:100").patience
        2
    """
    kind, *parts = text.split(":")
    factor, places, patience, every = "1", "", "0", "1"
    try:
        if kind == "step":
            factor, places = parts
        elif kind == "plateau":
            factor, patience, every = parts
        else:
            () = parts
        numbers = float(factor), tuple(map(_place, filter(None, places.split("+"))))
        rest = int(patience), int(every)
    except ValueError:
        raise ConfigurationError(f"lr_schedule is {text!r}; give {_EXPECTED}") from None
    check("lr_schedule", text, kind != "step" or bool(places), _EXPECTED)
    return Schedule(kind, *numbers, *rest)


def _place(text: str) -> float:
    """Read a milestone: a fraction of the run, below 1, or a whole step."""
    if not text.endswith("%"):
        return float(int(text))
    part = float(text[:-1]) / 100
    if part >= 1:
        raise ValueError("a milestone after the last step")
    return part
