"""Measures a row: how many steps it runs, which of them are verified, and how virtual ranks run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

from sparsync.cli.bench.verified_row import (
    Case,
    Evidence,
    Verdict,
    WatchedReducer,
    compare,
    digest,
    judge,
)
from sparsync.transports.groups import SoloCommunicator
from sparsync.transports.sim import SimCommunicator, Simulation, simulate

__all__ = [
    "LEAST_STEPS",
    "MOST_STEPS",
    "ROW_SECONDS",
    "VERIFY",
    "Measured",
    "Outcome",
    "Pace",
    "SimulatedRanks",
    "measure",
    "measure_simulated",
    "verified_in_full",
]

LEAST_STEPS, MOST_STEPS = 3, 20  # limits on the number of timed steps; a median needs three
ROW_SECONDS = 20.0  # time limit for all timed steps of a row
VERIFY = ("auto", "every", "ends", "digest")


def verified_in_full(mode: str, size: int, ranks: int) -> tuple[bool, bool]:
    """Return whether all steps are verified in full, and whether the first and the last step are.

    The mode "every" verifies every step, "ends" the first and the last one, and "digest" none.  "auto"
    means "every" as long as that is cheap, up to 16 M elements over all ranks (0.4 s of work on one
    core), and otherwise "ends".  On every step, the ranks compare the digests of their totals.

    Example:
        >>> verified_in_full("auto", 1_000_000, 8), verified_in_full("auto", 14_728_266, 8)
        ((True, True), (False, True))
    """
    every = mode == "every" or (mode == "auto" and size * ranks <= 2**24)
    return every, every or mode in ("auto", "ends")


@dataclass(frozen=True)
class Pace:
    """Decides how many warm-up and timed steps a row gets.

    If ``steps`` or ``warmup`` is None, that number depends on how fast the row's steps are, so that
    ten-second dense steps and ten-millisecond sparse steps both finish in reasonable time and yield a
    meaningful median.

    Example:
        >>> pace = Pace(steps=None, warmup=None)
        >>> pace.warm([0.01] * 4), pace.warm([0.01] * 5), pace.warm([9.3])
        (False, True, True)
        >>> pace.timed([0.01]), pace.timed([1.0]), pace.timed([9.3])
        (20, 10, 3)
    """

    steps: int | None  # number of timed steps
    warmup: int | None

    def warm(self, durations: Sequence[float]) -> bool:
        """Return whether the warm-up is over, given the seconds that its steps so far have taken."""
        if self.warmup is not None:
            return len(durations) >= self.warmup
        # five steps are enough for error feedback and thresholds to settle; long steps get only 5 s
        return len(durations) >= 5 or sum(durations) >= 5.0

    def timed(self, durations: Sequence[float]) -> int:
        """Return how many steps to time, given the seconds that the warm-up steps took."""
        if self.steps is not None:
            return self.steps
        if not durations:
            return MOST_STEPS
        fit = math.floor(ROW_SECONDS / (2 * max(min(durations), 1e-9)))
        return max(LEAST_STEPS, min(MOST_STEPS, fit))


# ---- steps -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """The outcome of one step over all ranks."""

    seconds: float  # the whole ``reduce()`` on the slowest rank
    exchange: float | None  # seconds from selection to total on the slowest rank; None: not timed
    sent: int  # largest number of bytes that a rank sent
    received: int
    verdict: Verdict
    # whether the sum and the law of conservation were verified, or only the equality of the totals
    in_full: bool = True
    # bytes in one direction on the lab's busiest link, as counted by the kernel
    kernel: int | None = None
    # processor seconds of the exchange over all threads, mean over ranks
    processor: float | None = None


@dataclass(frozen=True)
class Measured:
    """The measurements of all steps of a row."""

    transport: str  # what carries the bytes: "sim", "torch", "zmq" or "mpi"
    outcomes: list[Outcome]  # outcomes of all steps
    whole: list[Outcome]  # outcomes of the steps timed as a whole
    alone: list[Outcome]  # outcomes of the steps whose exchange was timed alone
    warmup: int  # number of steps before the timed ones
    # seconds of rank 0 by stage, over all steps
    stages: Mapping[str, float] = field(default_factory=dict)
    add_seconds: Sequence[float] = ()  # seconds of ``residual.add_(gradient)`` on the slowest rank
    add_processor: Sequence[float] = ()  # processor seconds of the same addition, mean over ranks


def measure(
    step: Callable[[bool, bool], Outcome],
    transport: str,
    pace: Pace,
    verified: tuple[bool, bool],
    advance: Callable[[int | None], None],
) -> Measured:
    """Measure a row: a warm-up, then steps timed alternately as a whole and with the exchange alone.

    Under the virtual clock, every step gives both times.

    Args:
        step: runs one step on all ranks; its arguments are whether to verify the step in full, and
            whether to time its exchange alone, from a common start.
        transport: with "sim", the clock is virtual.
        pace: chooses the number of steps.
        verified: see ``verified_in_full``.
        advance: called after every step with the total number of steps, or with None until that
            number is decided.
    """
    every, ends = verified
    turns = (False,) if transport == "sim" else (False, True)
    outcomes: list[Outcome] = []

    def do(total: int | None, *, alone: bool = False, last: bool = False) -> Outcome:
        in_full = every or (ends and (last or not outcomes))
        outcomes.append(step(in_full, alone))
        advance(total)
        return outcomes[-1]

    while not pace.warm([outcome.seconds for outcome in outcomes]):
        do(None)
    warmup, steps = len(outcomes), pace.timed([outcome.seconds for outcome in outcomes])
    closing = ends and not every  # verify an extra, untimed step: copies would distort times
    total = warmup + len(turns) * steps + closing
    timed = [do(total, alone=alone) for _ in range(steps) for alone in turns]
    if closing:
        do(total, last=True)
    whole, alone = timed[:: len(turns)], timed[len(turns) - 1 :: len(turns)]
    return Measured(transport, outcomes, whole, alone, warmup)


@final
class SimulatedRanks:
    """P virtual ranks, whose reducers persist from step to step.

    Every step runs on a fresh network, whose clock starts at 0 and charges only communication, and
    whose ledgers contain only this step.

    Example:
        >>> ranks = SimulatedRanks(Case("oktopk", ranks=4, size=1000, density=0.01))
        >>> simulation = ranks.step()
        >>> simulation.results[0].total.nnz, simulation.ledgers[0].total().messages_sent > 0
        (10, True)
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.ranks = [WatchedReducer(case, SoloCommunicator()) for _ in range(case.ranks)]
        self.reducers = [rank.reducer for rank in self.ranks]
        self.stages = Counter[str]()  # seconds of rank 0

    def step(self, *, keep: bool = True) -> Simulation[Evidence]:
        """Run the next step of all ranks; with ``keep``, the simulation's results are their evidence."""

        async def program(comm: SimCommunicator) -> None:
            rank = self.ranks[comm.rank]
            rank.reducer.move_to(comm)
            await rank.reducer.reduce([rank.feed(keep=keep)])

        simulation: Simulation[Any] = simulate(program, self.case.ranks, links=self.case.links)
        kept = self.ranks if keep else []
        return replace(simulation, results=[rank.evidence() for rank in kept])

    def outcome(self, in_full: bool, alone: bool) -> Outcome:
        """Run and verify the next step of all ranks; the exchange is always timed separately."""
        simulation, k = self.step(keep=in_full), self.case.k
        if in_full:
            verdict = judge(k, simulation.results)
        else:
            totals = [rank.seen.reduced.total for rank in self.ranks]
            selected = max(rank.seen.selected.nnz for rank in self.ranks)
            verdict = compare(k, selected, totals[0], {digest(total) for total in totals})
        self.stages.update(simulation.ledgers[0].stages)
        traffic = [ledger.total() for ledger in simulation.ledgers]
        return Outcome(
            simulation.seconds,
            simulation.seconds,
            max(t.sent for t in traffic),
            max(t.received for t in traffic),
            verdict,
            in_full,
        )


def measure_simulated(
    case: Case, pace: Pace, verified: tuple[bool, bool], advance: Callable[[int | None], None]
) -> Measured:
    """Measure a row under the virtual clock; see ``measure``."""
    ranks = SimulatedRanks(case)
    measured = measure(ranks.outcome, "sim", pace, verified, advance)
    return replace(measured, stages=ranks.stages)
