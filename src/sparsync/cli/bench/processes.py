"""Measurement of a row on real ranks and a real clock, through a real ``Reducer``.

A row's steps: a warm-up; then timed steps by turns, one as a whole, one with its exchange timed alone,
after a fence where all ranks meet with their entries selected; then ``residual.add_``.

A full verification needs six vectors of every rank.  At n = 14.7 M and P = 8 these are 2.4 GB: 20 s on a
link of 1 Gbit/s, after every verified step.  Pages that the ranks of one machine map cost no link.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from sparsync.cli.bench.cases import (
    VECTORS,
    Case,
    Evidence,
    Verdict,
    Verification,
    WatchedReducer,
    digest,
)
from sparsync.cli.bench.measure import Measured, Outcome, Pace, verified_in_full
from sparsync.cli.launch import StartLine, gather
from sparsync.cli.network import Connection, link_bytes, transport_of
from sparsync.errors import ConfigurationError
from sparsync.sparse import SparseVector
from sparsync.transports.driver import run

__all__ = ["EvidenceRoom", "Team"]

_NANOSECONDS = 1e9
_ITEM_BYTES = 4  # float32
_IN_MEMORY = Path("/dev/shm")


@final
class Team:
    """The ranks of a bench, and a process group apart from the communicator that is measured.

    Args:
        ranks: the expected world size P.
        largest: the most elements n of any row.
        connection: carries the rows.
        verify: see ``verified_in_full``.

    State: that process group, for messages that are neither timed nor booked.
    """

    def __init__(
        self,
        ranks: int,
        largest: int,
        connection: Connection,
        verify: str = "auto",
    ) -> None:
        self.group = dist.new_group()
        self.rank, present = dist.get_rank(), dist.get_world_size()
        if present != ranks:
            raise ConfigurationError(
                f"the bench has {ranks} ranks, this job {present}; give --ranks {present}"
            )
        self.connection, self.verify = connection, verify
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
            slowest = torch.tensor(_seconds_of_add(case.size, self.line), dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=self.group)
            stages = {s: t / total for s, t in comm.ledger.stages.items()}
        adds = slowest.tolist()
        return Measured(transport_of(comm), outcomes, whole, alone, warmup, adds, stages)

    def _step(self, rank: WatchedReducer, *, in_full: bool, alone: bool = False) -> Outcome:
        """Do one step: as a whole, or with a fence before the exchange."""
        rank.keep, rank.fence = in_full, self.line.wait if alone else None
        mine = rank.feed()
        ledger, before = rank.reducer.comm.ledger, link_bytes() or (0, 0)
        start = self.line.wait()
        run(rank.reducer.reduce([mine]))
        end = time.perf_counter() - rank.copying
        dist.barrier(group=self.group)  # what was sent has arrived, when the kernel is asked
        after = link_bytes() or (0, 0)
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
            kernel=most[6] if self.connection.lab else None,
        )

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


def _seconds_of_add(size: int, line: StartLine, *, repetitions: int = 10) -> list[float]:
    """Time ``residual.add_(gradient)`` on this rank, while all ranks do it; float32.

    Args:
        size: number of elements n.
        line: where each repetition starts.
        repetitions: how often; one more before them is not timed.
    """
    residual, gradient = torch.zeros(size), torch.ones(size)
    seconds = []
    for _ in range(repetitions + 1):
        start = line.wait()
        residual.add_(gradient)
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


# ---- evidence --------------------------------------------------------------------------------------


@final
class EvidenceRoom:
    """Memory in which ranks leave their evidence for rank 0; every rank makes one, together.

    Args:
        group: of all ranks, not the one that is measured.
        size: the most elements n of any vector.

    Attributes:
        one_machine: all ranks map the same pages, and thus share a clock, too.

    State: the pages' files are deleted as soon as all have mapped them: nothing remains, however the
    ranks end.
    """

    def __init__(self, group: dist.ProcessGroup, size: int) -> None:
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)
        pages = self._map(size)
        self.one_machine, self.pages = pages is not None, pages or []

    def collect(self, mine: Evidence) -> Iterator[Evidence]:
        """Yield every rank's evidence, in rank order, on rank 0; nothing elsewhere; all call it."""
        size = mine.accumulated.numel()
        if not self.one_machine:
            yield from self._over_the_network(mine)
            return
        if self.rank != 0:
            mine.write_(_view(self.pages[self.rank], size))
        dist.barrier(group=self.group)
        if self.rank == 0:
            yield mine
            for page in self.pages[1:]:
                yield Evidence.unpack(_view(page, size))
        dist.barrier(group=self.group)  # the pages may be written again

    def _over_the_network(self, mine: Evidence) -> Iterator[Evidence]:
        packed = torch.empty(VECTORS, mine.accumulated.numel())
        if self.rank != 0:
            mine.write_(packed)
            dist.send(packed, dst=0, group=self.group)
            return
        yield mine
        for source in range(1, self.ranks):
            dist.recv(packed, src=source, group=self.group)
            yield Evidence.unpack(packed)

    def _map(self, size: int) -> list[Tensor] | None:
        """Map a file per rank, in memory where there is room; None where ranks share no folder."""
        made = ""
        if self.rank == 0:
            in_memory = _IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else None
            made = tempfile.mkdtemp(prefix="sparsync-bench-", dir=in_memory)
        folder, elements = Path(gather(made)[0]), VECTORS * size
        try:
            try:
                with (folder / str(self.rank)).open("xb") as file:
                    # reserved at once: a full disk must not end in SIGBUS
                    os.posix_fallocate(file.fileno(), 0, elements * _ITEM_BYTES)
                there = True
            except (OSError, AttributeError):  # no such folder here, no room, or another system
                there = False
            files = [folder / str(rank) for rank in range(self.ranks)]
            # a folder of that name may be on another machine
            mapped = self._all(there) and self._all(all(file.exists() for file in files))
            if not mapped:
                return None
            pages = [torch.from_file(str(f), shared=True, size=elements) for f in files]
            self._all(True)  # all have mapped them: the files may go
            return pages
        finally:
            if self.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)

    def _all(self, mine: bool) -> bool:
        """Tell whether it is true on all ranks."""
        everyone = torch.tensor([int(mine)])
        dist.all_reduce(everyone, op=dist.ReduceOp.MIN, group=self.group)
        return bool(everyone)


def _view(page: Tensor, size: int) -> Tensor:
    return page[: VECTORS * size].view(VECTORS, size)
