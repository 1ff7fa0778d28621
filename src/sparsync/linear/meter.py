"""Where the seconds of a training go: computing, or exchanging."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

__all__ = ["Exchanged", "Meter"]


@dataclass(frozen=True)
class Exchanged:
    """One exchange, as one rank saw it.

    Attributes:
        phase: what was exchanged.
        start: by the meter's clock, in seconds.
        end: likewise.
    """

    phase: str
    start: float
    end: float


@final
class Meter:
    """Measures one rank.  All ranks compute and exchange in one order: their lists compare.

    Args:
        fence: called before every exchange; waits for the slowest rank, so that nobody takes waiting
            for communication, and returns the start.  Default: nobody waits.
        clock: of the exchanges; the simulator has its own.

    Attributes:
        computed: seconds of every stretch of computation.
        exchanged: every exchange.

    Example:
        >>> meter = Meter()
        >>> with meter.computing(): _ = sum(range(10))
        >>> with meter.exchanging("gradient"): pass
        >>> len(meter.computed), meter.exchanged[0].phase
        (1, 'gradient')
    """

    def __init__(
        self,
        fence: Callable[[], float] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.fence, self.clock = fence or clock, clock
        self.computed: list[float] = []
        self.exchanged: list[Exchanged] = []

    def clear(self) -> None:
        """Begin new lists; the old ones stay as they are."""
        self.computed, self.exchanged = [], []

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Time a stretch of computation, which awaits nothing."""
        start = time.perf_counter()
        yield
        self.computed.append(time.perf_counter() - start)

    @contextmanager
    def exchanging(self, phase: str) -> Iterator[None]:
        """Time an exchange from the moment when all ranks are there."""
        start = self.fence()
        yield
        self.exchanged.append(Exchanged(phase, start, self.clock()))
