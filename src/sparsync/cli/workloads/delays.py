"""Injected delays: how long a rank waits before a step.  Any rank can compute the delays of all ranks."""

from __future__ import annotations

import random
from dataclasses import dataclass
from statistics import NormalDist
from typing import final

from sparsync.cli.values import check
from sparsync.errors import ConfigurationError

__all__ = ["Delay", "parse_delay"]

_A_DAY = 86_400.0
_SPREAD = 250.0  # "heavytail": (maximum - minimum) / (median - minimum)
_DRAWS = 5_000  # one draw in this many reaches the maximum; WAGMA's Figure 9 has as many iterations


@final
@dataclass(frozen=True)
class Delay:
    """A rule that determines how long each rank waits before each step.

    - "none": no rank waits.
    - "random": ``first`` distinct ranks (or all, if fewer), drawn uniformly on every step, wait
      ``second`` seconds (WAGMA, section 5.2: 2, 0.32 s).
    - "persistent": rank ``first`` waits ``second`` seconds on every step.
    - "heavytail": all ranks wait on all steps, usually briefly but sometimes very long.  The excess over
      ``first`` is lognormal.  With a standard normal z, drawn for each rank and step, and
      ``P(z > rarest) = 1 / 5000``::

          seconds = first + (second - first) min(1, 250^(z / rarest - 1))

      The median is ``first + (second - first) / 250``, and one in 5,000 draws reaches ``second``.  This
      fits everything that the paper says about the 5,000 iterations of WAGMA's Figure 9: 1.7 to 43.5 s,
      and a median below 2 s (this distribution: 1.87 s, with a mean of 2.3 s).  For comparison, 5,000
      draws of a bounded Pareto distribution with that range and a median below 2 s hardly exceed 13 s.
    """

    kind: str = "none"
    first: float = 0
    second: float = 0.0

    def __post_init__(self) -> None:
        if self.kind == "random":
            check("delay: COUNT", self.first, self.first >= 1, "at least 1 rank")
        if self.kind == "persistent":
            check("delay: RANK", self.first, self.first >= 0, "a rank >= 0")
        names = {"heavytail": {"MIN": self.first, "MAX": self.second}}
        for name, seconds in names.get(self.kind, {"SECONDS": self.second}).items():
            check(f"delay: {name}", seconds, 0 <= seconds <= _A_DAY, "seconds from 0 to a day's")
        ordered = self.kind != "heavytail" or self.first <= self.second
        check("delay: MAX", self.second, ordered, f"at least MIN, {self.first:g}")

    def seconds(self, step: int, rank: int, world_size: int, seed: int = 0) -> float:
        """Return the seconds that ``rank`` waits before a 0-based ``step``."""
        if self.kind == "heavytail":
            z = random.Random(f"{seed}/{step}/{rank}").normalvariate(0.0, 1.0)
            rarest = NormalDist().inv_cdf(1 - 1 / _DRAWS)
            excess: float = min(1.0, _SPREAD ** (z / rarest - 1))
            return self.first + (self.second - self.first) * excess
        late = [self.first]
        if self.kind == "random":
            count = min(int(self.first), world_size)
            late = random.Random(f"{seed}/{step}").sample(range(world_size), count)
        return self.second if rank in late else 0.0


def parse_delay(text: str) -> Delay:
    """Read "none", "random:COUNT:SECONDS", "persistent:RANK:SECONDS" or "heavytail:MIN:MAX".

    Raises:
        ConfigurationError: the text has none of these forms, a count is below 1, a rank is below 0, or
            a time is outside [0, one day].

    Example:
        >>> parse_delay("random:2:0.32")
        Delay(kind='random', first=2, second=0.32)
        >>> [parse_delay("persistent:1:0.5").seconds(step=0, rank=r, world_size=3) for r in range(3)]
        [0.0, 0.5, 0.0]
    """
    if text == "none":
        return Delay()
    kind, *numbers = text.split(":")
    try:
        number = {"random": int, "persistent": int, "heavytail": float}[kind]
        left, right = numbers
        first, second = number(left), float(right)
    except (ValueError, KeyError) as error:
        raise ConfigurationError(
            f"delay is {text!r}; give none, random:COUNT:SECONDS, persistent:RANK:SECONDS or "
            "heavytail:MIN:MAX, e.g. random:2:0.32"
        ) from error
    return Delay(kind, first, second)
