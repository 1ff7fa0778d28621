"""How many steps a row takes, and which of them are verified in full."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from sparsync.errors import ConfigurationError

__all__ = ["Pace", "Verify", "check_verify", "verified_in_full"]

Verify = Literal["auto", "every", "ends", "digest"]


def check_verify(mode: str) -> Verify:
    """Return the mode, or refuse an unknown one."""
    for known in get_args(Verify):
        if mode == known:
            return known  # type: ignore[no-any-return]
    raise ConfigurationError(f"unknown verification {mode!r}; choose {', '.join(get_args(Verify))}")


def verified_in_full(
    mode: Verify, size: int, ranks: int, *, every_up_to: int = 2**24
) -> tuple[bool, bool]:
    """Tell whether every step is verified in full, and whether the first and the last one are.

    The totals' digests are compared between ranks on every step, whatever this says.

    Args:
        mode: "every" step; its "ends", the first and the last; "digest": none; "auto": the first of
            these that is cheap.
        size: number of elements n.
        ranks: world size P.
        every_up_to: elements n P up to which "auto" means every step: 0.4 s of work on one core
            (ours, measured).

    Example:
        >>> verified_in_full("auto", 1_000_000, 8), verified_in_full("auto", 14_728_266, 8)
        ((True, True), (False, True))
    """
    every = mode == "every" or (mode == "auto" and size * ranks <= every_up_to)
    return every, every or mode in ("auto", "ends")


@dataclass(frozen=True)
class Pace:
    """How long a row goes on, where the wall clock counts.

    What is not given is chosen by the row's own speed, so that a dense step of ten seconds and a
    sparse one of ten milliseconds both end in reasonable time with a median that means something.

    Attributes:
        steps: timed steps; None: as many as fit.
        warmup: steps before; None: as many as fit.
        most: timed steps at most, where they are not given.
        least: and at least: a median needs three.
        row_seconds: what "fit" means for the timed steps.
        most_warmup: error feedback and thresholds have settled by then (ours).
        warmup_seconds: a warm-up ends here, even if shorter.

    Example:
        >>> pace = Pace(steps=None, warmup=None)
        >>> pace.warm([0.01] * 4), pace.warm([0.01] * 5), pace.warm([9.3])
        (False, True, True)
        >>> pace.timed([0.01]), pace.timed([1.0]), pace.timed([9.3])
        (20, 10, 3)
    """

    steps: int | None
    warmup: int | None
    most: int = 20
    least: int = 3
    row_seconds: float = 20.0
    most_warmup: int = 5
    warmup_seconds: float = 5.0

    def warm(self, durations: Sequence[float]) -> bool:
        """Tell whether the warm-up is over, given the seconds of its steps so far."""
        if self.warmup is not None:
            return len(durations) >= self.warmup
        return len(durations) >= self.most_warmup or sum(durations) >= self.warmup_seconds

    def timed(self, durations: Sequence[float]) -> int:
        """Return how many steps to time, given the seconds of the warm-up's steps.

        Each is done twice: once as a whole, once with its exchange timed alone.
        """
        if self.steps is not None:
            return self.steps
        if not durations:
            return self.most
        fit = math.floor(self.row_seconds / (2 * max(min(durations), 1e-9)))
        return max(self.least, min(self.most, fit))
