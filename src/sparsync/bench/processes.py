"""Runs one collective for some steps through a real ``Reducer`` on real ranks and a real clock.

A row's steps: a warm-up; then timed steps by turns, one as a whole, one with its exchange timed
alone, behind a fence where all ranks meet with their entries selected; then ``residual.add_``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import final

import torch
import torch.distributed as dist

from sparsync.bench.cases import Case, WatchedReducer
from sparsync.bench.connection import Connection, transport_of
from sparsync.bench.evidence import EvidenceRoom
from sparsync.bench.measure import Measured, Outcome
from sparsync.bench.plan import Pace, Verify, verified_in_full
from sparsync.bench.shaped import link_bytes
from sparsync.bench.timing import StartLine, seconds_of_add
from sparsync.bench.verify import Verdict, Verification, digest
from sparsync.errors import ConfigurationError
from sparsync.sparse import SparseVector
from sparsync.transports.base import run

__all__ = ["Team"]

_NANOSECONDS = 1e9


@final
class Team:
    """The ranks of a bench, and what they share besides the communicator that is measured.

    Args:
        ranks: the expected world size P.
        largest: the most elements n of any row.
        connection: which transport carries the rows.
        verify: what is verified; see ``verified_in_full``.
        in_lab: every rank has a link of its own, whose bytes the kernel counts.

    State: a process group of its own, for what is neither timed nor booked.
    """

    def __init__(
        self,
        ranks: int,
        largest: int,
        connection: Connection,
        verify: Verify = "auto",
        *,
        in_lab: bool = False,
    ) -> None:
        self.group = dist.new_group()
        self.rank, present = dist.get_rank(), dist.get_world_size()
        if present != ranks:
            raise ConfigurationError(
                f"the bench has {ranks} ranks, this job {present}; give --ranks {present}"
            )
        self.connection, self.verify, self.in_lab = connection, verify, in_lab
        self.room = EvidenceRoom(self.group, largest)
        self.line = StartLine(self.group, one_machine=self.room.one_machine)

    def measure(self, case: Case, pace: Pace, advance: Callable[[int | None], None]) -> Measured:
        """Measure a row.

        Every rank calls it, and decides alike when to go on: by the slowest rank's clock.  Verdicts
        on the sum and the law are rank 0's; the other ranks' are on the equality of the totals.

        Args:
            case: the row.
            pace: how many steps.
            advance: called after every step with the number of steps, None while that is open.
        """
        every, ends = verified_in_full(self.verify, case.size, case.ranks)
        closing = ends and not every  # copies would disturb the clock: one more step, not timed
        outcomes: list[Outcome] = []
        durations: list[float] = []
        with self.connection.open(case.name) as comm:
            rank = WatchedReducer(case, comm)
            while not pace.warm(durations):
                outcomes.append(self._step(rank, in_full=every or (ends and not outcomes)))
                durations.append(outcomes[-1].seconds)
                advance(None)
            warmup, steps = len(outcomes), pace.timed(durations)
            total = warmup + 2 * steps + closing
            for turn in range(2 * steps):
                in_full = every or (ends and not outcomes)
                outcomes.append(self._step(rank, in_full=in_full, alone=turn % 2 == 1))
                advance(total)
            whole, alone = outcomes[warmup::2], outcomes[warmup + 1 :: 2]
            if closing:
                outcomes.append(self._step(rank, in_full=True))
                advance(total)
            slowest = torch.tensor(seconds_of_add(case.size, self.line), dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=self.group)
            stages = {s: t / total for s, t in comm.ledger.stages.items()}
        adds = slowest.tolist()
        return Measured(transport_of(comm), outcomes, whole, alone, warmup, adds, stages)

    def _step(self, rank: WatchedReducer, *, in_full: bool, alone: bool = False) -> Outcome:
        """Do one step: as a whole, or with a fence before the exchange."""
        rank.keep, rank.fence = in_full, self.line.wait if alone else None
        mine = rank.feed()
        ledger, before = rank.reducer.comm.ledger, self._traffic()
        start = self.line.wait()
        run(rank.reducer.reduce([mine]))
        end = time.perf_counter() - rank.copying
        dist.barrier(group=self.group)  # what was sent has arrived, when the kernel is asked
        after = self._traffic()
        counted = max(now - then for now, then in zip(after, before, strict=True))
        total, last = rank.reduced.total, ledger.last_step
        facts = self._gather(
            *(round(t * _NANOSECONDS) for t in (start, end)),
            *(round(t * _NANOSECONDS) for t in (rank.exchange_started, rank.exchanged)),
            last.sent,
            last.received,
            counted,
            rank.selected.nnz if isinstance(rank.selected, SparseVector) else rank.case.size,
            digest(total),
        )
        most = facts.amax(0).tolist()
        verdict = Verdict.of_totals(rank.case.k, most[7], total, set(facts[:, 8].tolist()))
        if in_full:
            verdict = self._verify(rank) or verdict
        return Outcome(
            seconds=self.line.elapsed(facts[:, 0], facts[:, 1]),
            exchange=self.line.elapsed(facts[:, 2], facts[:, 3]) if alone else None,
            sent=most[4],
            received=most[5],
            verdict=verdict,
            in_full=in_full,
            kernel=most[6] if self.in_lab else None,
        )

    def _traffic(self) -> tuple[int, int]:
        """Return what the kernel has counted on this rank's link: bytes sent, bytes received."""
        return (link_bytes() if self.in_lab else None) or (0, 0)

    def _gather(self, *facts: int) -> torch.Tensor:
        """Return `[P, facts]`: every rank's, on all ranks."""
        mine = torch.tensor(facts)
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine, group=self.group)
        return torch.stack(everyone)

    def _verify(self, rank: WatchedReducer) -> Verdict | None:
        """Judge the step on rank 0."""
        case = rank.case
        check = Verification(case.size, case.ranks, case.k) if self.rank == 0 else None
        for evidence in self.room.collect(rank.evidence()):
            assert check is not None
            check.add(evidence)
        return None if check is None else check.verdict()
