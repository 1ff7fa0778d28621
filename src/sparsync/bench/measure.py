"""Runs one collective for some steps through a real ``Reducer`` on virtual ranks and a virtual clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from sparsync.bench.cases import Case, WatchedReducer
from sparsync.bench.plan import Verify, verified_in_full
from sparsync.bench.verify import Evidence, Verdict, Verification, digest
from sparsync.transports.sim import SimCommunicator, Simulation, simulate
from sparsync.transports.solo import SoloCommunicator

__all__ = ["Case", "Measured", "Outcome", "SimulatedRanks", "measure_simulated"]


@dataclass(frozen=True)
class Outcome:
    """One step, over all ranks.

    Attributes:
        seconds: whole ``reduce()``, of the slowest rank.
        exchange: selected -> total, of the slowest rank; None where the step was not timed so.
        sent: most bytes that any rank sent.
        received: most bytes that any rank received.
        verdict: of the verification.
        in_full: the verdict is on the sum and the law; else on the equality of the totals alone.
        kernel: most bytes that the kernel counted on any rank's link, in one direction; None where
            there is no such link.
    """

    seconds: float
    exchange: float | None
    sent: int
    received: int
    verdict: Verdict
    in_full: bool = True
    kernel: int | None = None


@dataclass(frozen=True)
class Measured:
    """All steps of a row.

    Attributes:
        transport: what carried the bytes: "sim", "torch" or "zmq".
        outcomes: of all steps.
        whole: those that were timed as a whole.
        alone: those whose exchange was timed alone.
        warmup: number of steps before the timed ones.
        stages: seconds per step of every stage of ``ledger.STAGES``, on rank 0, over all steps.
        add_seconds: ``residual.add_(gradient)``, of the slowest rank, per repetition; may be empty.
    """

    transport: str
    outcomes: list[Outcome]
    whole: list[Outcome]
    alone: list[Outcome]
    warmup: int
    add_seconds: list[float]
    stages: dict[str, float] = field(default_factory=dict)


class SimulatedRanks:
    """P virtual ranks, each with its own reducer, that live from step to step.

    Every step runs on a fresh network: its clock starts at 0 and its ledgers hold this step alone.

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

    def step(self) -> Simulation[Evidence]:
        """Run the next step of all ranks; return the evidence."""
        simulation = self.run()
        return Simulation(
            [rank.evidence() for rank in self.ranks], simulation.seconds, simulation.ledgers
        )

    def run(self, *, keep: bool = True) -> Simulation[None]:
        """Run the next step of all ranks; keep the evidence if asked for."""

        async def program(comm: SimCommunicator) -> None:
            rank = self.ranks[comm.rank]
            rank.reducer.comm, rank.keep = comm, keep
            await rank.reducer.reduce([rank.feed()])

        return simulate(program, self.case.ranks, links=self.case.links)


def measure_simulated(
    case: Case,
    steps: int,
    warmup: int,
    verify: Verify = "auto",
    advance: Callable[[int], None] = lambda total: None,
) -> Measured:
    """Measure a row under the virtual clock, which charges communication alone.

    Args:
        case: the row.
        steps: timed steps.
        warmup: steps before them.
        verify: which steps are verified in full; see ``verified_in_full``.
        advance: called after every step with the number of steps.
    """
    ranks = SimulatedRanks(case)
    outcomes: list[Outcome] = []
    every, ends = verified_in_full(verify, case.size, case.ranks)
    total = warmup + steps
    stages = Counter[str]()
    for step in range(total):
        in_full = every or (ends and step in (0, total - 1))
        simulation = ranks.run(keep=in_full)
        traffic = [ledger.total() for ledger in simulation.ledgers]
        stages.update(simulation.ledgers[0].stages)
        outcomes.append(
            Outcome(
                simulation.seconds,
                simulation.seconds,
                max(t.sent for t in traffic),
                max(t.received for t in traffic),
                _full_verdict(ranks) if in_full else _brief_verdict(ranks),
                in_full,
            )
        )
        advance(total)
    timed = outcomes[warmup:]
    per_step = {stage: seconds / total for stage, seconds in stages.items()}
    return Measured("sim", outcomes, timed, timed, warmup, [], per_step)


def _full_verdict(ranks: SimulatedRanks) -> Verdict:
    check = Verification(ranks.case.size, ranks.case.ranks, ranks.case.k)
    for rank in ranks.ranks:
        check.add(rank.evidence())
    return check.verdict()


def _brief_verdict(ranks: SimulatedRanks) -> Verdict:
    totals = [rank.reduced.total for rank in ranks.ranks]
    selected = max(rank.selected.values.numel() for rank in ranks.ranks)
    return Verdict.of_totals(ranks.case.k, selected, totals[0], {digest(t) for t in totals})
