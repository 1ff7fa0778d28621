"""The base of the solvers: learning rates over time, where their time goes, evaluations."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import numpy as np

from sparsync.errors import ConfigurationError
from sparsync.linear.problem import Problem, sum_over_ranks
from sparsync.linear.products import Products
from sparsync.transports.communicator import Communicator

__all__ = ["SCHEDULES", "Evaluation", "Exchanged", "Meter", "Schedule", "Solver"]

SCHEDULES = ("constant", "1/t", "1/sqrt(t)", "step")


@dataclass(frozen=True)
class Schedule:
    """The learning rate of every step.

    With t in epochs, counted from 0: constant: ``lr``;  1/t: ``lr / (1 + t)``;  1/sqrt(t):
    ``lr / sqrt(1 + t)``;  step: ``lr / 2 ** floor(t)``.

    Attributes:
        name: one of ``SCHEDULES``.
        lr: the first learning rate.

    Example:
        >>> schedule = Schedule("1/t", lr=1.0)
        >>> [schedule.rate(step, epoch_steps=10) for step in (0, 10, 30)]
        [1.0, 0.5, 0.25]
    """

    name: str = "constant"
    lr: float = 1.0

    def __post_init__(self) -> None:
        if self.name not in SCHEDULES:
            raise ConfigurationError(
                f"unknown schedule {self.name!r}; choose one of {', '.join(SCHEDULES)}"
            )
        if not 0 < self.lr < math.inf:
            raise ConfigurationError(f"lr is {self.lr}; give a number > 0")

    def rate(self, step: int, epoch_steps: int) -> float:
        """Return the learning rate of a 0-based step."""
        time = step / max(epoch_steps, 1)
        if self.name == "1/t":
            return self.lr / (1 + time)
        if self.name == "1/sqrt(t)":
            return self.lr / math.sqrt(1 + time)
        return self.lr / 2 ** math.floor(time) if self.name == "step" else self.lr


@dataclass(frozen=True)
class Exchanged:
    """One exchange, as one rank saw it; start and end in seconds by the meter's clock."""

    phase: str
    start: float
    end: float


@final
class Meter:
    """Measures where a rank's seconds go.  All ranks exchange in one order: their lists compare.

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


@dataclass(frozen=True)
class Evaluation:
    """A model on the rows of all ranks.

    Attributes:
        objective: mean loss plus penalties.
        accuracy: fraction of rows whose sign is right (a score of 0 counts as +1).
        rows: number of rows.
    """

    objective: float
    accuracy: float
    rows: int


class Solver(ABC):
    """Trains one linear model on the rows of all ranks; every rank makes every call.

    Attributes:
        weights: the model, the same bits on all ranks.
    """

    def __init__(
        self,
        comm: Communicator,
        problem: Problem,
        products: Products | None,
        meter: Meter | None,
    ) -> None:
        self.comm, self.problem = comm, problem
        self.products, self.meter = products or Products(), meter or Meter()
        self.weights = problem.weights()

    @abstractmethod
    async def start(self) -> None:
        """Agree with the other ranks on what is solved; called once, before anything else.

        Raises:
            PeerError: ranks disagree; names what and who.
        """

    @property
    @abstractmethod
    def epoch_steps(self) -> int:
        """Steps of an epoch, equal on all ranks; known when started."""

    @abstractmethod
    async def epoch(self, epoch: int, advance: Callable[[int], None]) -> None:
        """Do the steps of a 0-based epoch; ``advance`` is called after each with their number."""

    async def evaluate(self, problem: Problem | None = None) -> Evaluation:
        """Evaluate the weights on every rank's rows of another problem, or of the training.

        Cost: one pass over the rows, an allgather of 24 bytes; 0 rows in all give NaN.
        """
        problem = problem or self.problem
        scores = self.products.scores(problem.features, self.weights)
        margins = (scores * problem.labels).astype(np.float64)
        right = (scores >= 0) == (problem.labels > 0)
        mine = [problem.loss.value(margins).sum(), right.sum(), problem.rows]
        loss, correct, rows = await sum_over_ranks(self.comm, mine, "evaluation")
        if rows == 0:
            return Evaluation(np.nan, np.nan, 0)
        penalty = problem.penalty.value(self.weights.to_dense())
        return Evaluation(loss / rows + penalty, correct / rows, int(rows))
