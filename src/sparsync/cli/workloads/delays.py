"""Injected delays: how long a rank waits before a step.  Pure: every rank, and a simulator, knows all."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, final

from sparsync.cli.options import check
from sparsync.errors import ConfigurationError

__all__ = ["Delay", "HeavyTail", "Persistent", "RandomRanks", "parse_delay"]

_A_DAY = 86_400.0


@dataclass(frozen=True)
class Delay:
    """The wait of each rank, as a function of its arguments and nothing else; here none."""

    def seconds(self, step: int, rank: int, world_size: int, seed: int = 0) -> float:
        """Return the seconds that ``rank`` waits before a 0-based ``step``."""
        return 0.0


@final
@dataclass(frozen=True)
class RandomRanks(Delay):
    """Other ranks on every step: distinct ones, drawn evenly (WAGMA, section 5.2: 2, 0.32 s)."""

    count: int  # ranks that wait; all, where there are no more
    each: float  # seconds

    def __post_init__(self) -> None:
        check("delay: COUNT", self.count, self.count >= 1, "at least 1 rank")
        _check_seconds("SECONDS", self.each)

    def seconds(self, step: int, rank: int, world_size: int, seed: int = 0) -> float:
        """See ``Delay``."""
        everybody = range(world_size)
        drawn = random.Random(f"{seed}/{step}").sample(everybody, min(self.count, world_size))
        return self.each if rank in drawn else 0.0


@final
@dataclass(frozen=True)
class Persistent(Delay):
    """The same rank on every step; nobody, where there is no such rank."""

    rank: int
    each: float  # seconds

    def __post_init__(self) -> None:
        check("delay: RANK", self.rank, self.rank >= 0, "one from 0 on")
        _check_seconds("SECONDS", self.each)

    def seconds(self, step: int, rank: int, world_size: int, seed: int = 0) -> float:
        """See ``Delay``."""
        return self.each if rank == self.rank else 0.0


@final
@dataclass(frozen=True)
class HeavyTail(Delay):
    """All ranks on all steps, mostly shortly, rarely for very long: lognormal above ``least``.

    With z standard normal, drawn for each rank and step, and ``P(z > rarest) = 1 / draws``::

        seconds = least + (most - least) min(1, spread^(z / rarest - 1))

    So the median is ``least + (most - least) / spread``, and one of ``draws`` reaches ``most``.  That
    is what is known of the 5,000 iterations of WAGMA's Figure 9: 1.7 to 43.5 s, a median below 2 s (here
    1.87 s, and a mean of 2.3 s).  As many draws of a bounded Pareto of that range whose median is below
    2 s hardly exceed 13 s.
    """

    least: float  # seconds
    most: float  # seconds
    spread: float = 250.0  # the largest excess over ``least``, over the median one
    draws: int = 5_000  # of which one reaches ``most`` (Figure 9's iterations)

    def __post_init__(self) -> None:
        _check_seconds("MIN", self.least)
        _check_seconds("MAX", self.most)
        check("delay: MAX", self.most, self.least <= self.most, f"at least MIN, {self.least:g}")

    def seconds(self, step: int, rank: int, world_size: int, seed: int = 0) -> float:
        """See ``Delay``."""
        z = random.Random(f"{seed}/{step}/{rank}").normalvariate(0.0, 1.0)
        rarest = NormalDist().inv_cdf(1 - 1 / self.draws)
        excess: float = min(1.0, self.spread ** (z / rarest - 1))
        return self.least + (self.most - self.least) * excess


def parse_delay(text: str) -> Delay:
    """Read "none", "random:COUNT:SECONDS", "persistent:RANK:SECONDS" or "heavytail:MIN:MAX".

    Raises:
        ConfigurationError: anything else; counts below 1, ranks below 0, times not in [0, one day].

    Example:
        >>> parse_delay("random:2:0.32")
        RandomRanks(count=2, each=0.32)
        >>> [parse_delay("persistent:1:0.5").seconds(step=0, rank=r, world_size=3) for r in range(3)]
        [0.0, 0.5, 0.0]
    """
    if text == "none":
        return Delay()
    makers: dict[str, tuple[Callable[[Any, float], Delay], type[int] | type[float]]] = {
        "random": (RandomRanks, int),
        "persistent": (Persistent, int),
        "heavytail": (HeavyTail, float),
    }
    kind, *numbers = text.split(":")
    try:
        make, number = makers[kind]
        left, right = numbers
        first, second = number(left), float(right)
    except (ValueError, KeyError) as error:
        raise ConfigurationError(
            f"delay is {text!r}; give none, random:COUNT:SECONDS, persistent:RANK:SECONDS or "
            "heavytail:MIN:MAX, e.g. random:2:0.32"
        ) from error
    return make(first, second)


def _check_seconds(name: str, seconds: float) -> None:
    check(f"delay: {name}", seconds, 0 <= seconds <= _A_DAY, "seconds from 0 to a day's")
