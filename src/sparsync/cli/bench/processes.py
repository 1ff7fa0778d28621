"""Steps of real ranks on a real clock, through a real ``Reducer``.

A full verification needs six vectors of every rank.  At n = 14.7 M and P = 8 these are 2.4 GB: 20 s on a
link of 1 Gbit/s, after every verified step.  Memory that the ranks of one machine map costs no link.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from sparsync.cli.bench.cases import (
    VECTORS,
    Case,
    Evidence,
    WatchedReducer,
    compare,
    digest,
    judge,
)
from sparsync.cli.bench.measure import Measured, Outcome, Pace, measure
from sparsync.cli.lab import local_traffic
from sparsync.cli.launch import StartLine, gather
from sparsync.cli.network import Connection, transport_of
from sparsync.transports.driver import run

__all__ = ["EvidenceRoom", "Team"]

_NANOSECONDS = 1e9
_ITEM_BYTES = 4  # float32


@final
class Team:
    """The ranks of a bench, and a process group for messages that are neither timed nor booked.

    Args:
        largest: the most elements n of any row.
        connection: carries the rows.
    """

    def __init__(self, largest: int, connection: Connection) -> None:
        self.group, self.rank = dist.new_group(), dist.get_rank()
        self.connection, self.room = connection, EvidenceRoom(self.group, largest)
        self.line = StartLine(self.group)

    def measure(
        self,
        case: Case,
        pace: Pace,
        verified: tuple[bool, bool],
        advance: Callable[[int | None], None],
    ) -> Measured:
        """Measure a row; every rank calls it, and decides alike, by the slowest rank's clock.

        Verdicts on the sum and the law are rank 0's; the other ranks' are on the equality of the totals.
        """
        with self.connection.open(case.name) as comm:
            rank = WatchedReducer(case, comm)
            step = partial(self._step, rank)
            measured = measure(step, transport_of(comm), pace, verified, advance)
            measured.stages = dict(comm.ledger.stages)
            measured.add_seconds = self._seconds_of_add(case.size)
        return measured

    def _step(self, rank: WatchedReducer, in_full: bool, alone: bool) -> Outcome:
        """Do one step: as a whole, or with a fence before the exchange."""
        seen = rank.seen
        seen.fence = self.line.wait if alone else None
        mine = rank.feed(keep=in_full)
        ledger, before = rank.reducer.comm.ledger, local_traffic() or (0, 0)
        start = self.line.wait()
        run(rank.reducer.reduce([mine]))
        end = time.perf_counter() - seen.copying
        dist.barrier(group=self.group)  # what was sent has arrived, when the kernel is asked
        after = local_traffic() or (0, 0)
        counted = max(now - then for now, then in zip(after, before, strict=True))
        total, last = seen.reduced.total, ledger.last_step
        times = [round(t * _NANOSECONDS) for t in (start, end, seen.started, seen.ended)]
        others = [last.sent, last.received, counted, seen.selected.nnz, digest(total)]
        mine = torch.tensor([*times, *others])
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine, group=self.group)
        facts = torch.stack(everyone)
        most = facts.amax(0).tolist()
        verdict = compare(rank.case.k, most[7], total, set(facts[:, 8].tolist()))
        if in_full:
            evidence = self.room.collect(rank.evidence())
            if self.rank == 0:
                verdict = judge(rank.case.k, evidence)
            else:
                list(evidence)  # leaves this rank's
        return Outcome(
            seconds=self.line.elapsed(facts[:, 0], facts[:, 1]),
            exchange=self.line.elapsed(facts[:, 2], facts[:, 3]) if alone else None,
            sent=most[4],
            received=most[5],
            verdict=verdict,
            in_full=in_full,
            kernel=most[6] if self.connection.lab else None,
        )

    def _seconds_of_add(self, size: int, *, repetitions: int = 10) -> list[float]:
        """Time ``residual.add_(gradient)`` while all ranks do it: the slowest's, per repetition."""
        residual, gradient = torch.zeros(size), torch.ones(size)
        seconds = []
        for _ in range(repetitions + 1):  # the first is not timed
            start = self.line.wait()
            residual.add_(gradient)
            seconds.append(time.perf_counter() - start)
        slowest = torch.tensor(seconds[1:], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=self.group)
        return list(slowest.tolist())


@final
class EvidenceRoom:
    """Memory in which ranks leave their evidence for rank 0; every rank makes one, together.

    It has no name, and is held by those who map it: nothing remains, however the ranks end.
    """

    def __init__(self, group: dist.ProcessGroup, size: int) -> None:
        self.group, self.rank = group, dist.get_rank(group)
        self.pages = self._map(VECTORS * size)  # none where ranks cannot map each other's

    def collect(self, mine: Evidence) -> Iterator[Evidence]:
        """Yield every rank's evidence, in rank order, on rank 0; nothing elsewhere; all call it."""
        shape = VECTORS, mine.accumulated.numel()
        if self.rank == 0:
            yield mine
        if self.pages:
            pages = [page[: shape[0] * shape[1]].view(shape) for page in self.pages]
            if self.rank != 0:
                mine.write_(pages[self.rank])
            dist.barrier(group=self.group)
            if self.rank == 0:
                yield from map(Evidence.unpack, pages[1:])
            dist.barrier(group=self.group)  # the pages may be written again
            return
        packed = torch.empty(shape)
        if self.rank != 0:
            mine.write_(packed)
            dist.send(packed, dst=0, group=self.group)
            return
        for source in range(1, dist.get_world_size()):
            dist.recv(packed, src=source, group=self.group)
            yield Evidence.unpack(packed)

    def _map(self, elements: int) -> list[Tensor]:
        """Map unnamed memory of every rank; an empty list where ranks cannot map each other's."""
        file, mine = -1, ("", "")
        if hasattr(os, "memfd_create"):  # Linux
            name = f"sparsync-bench-{secrets.token_hex(8)}"
            file = os.memfd_create(name)
            os.ftruncate(file, elements * _ITEM_BYTES)
            mine = (name, f"/proc/{os.getpid()}/fd/{file}")
        pages = []
        try:
            for name, path in gather(mine):
                # on another machine that path may be anybody's
                if not name or name not in str(Path(path).readlink()):
                    raise FileNotFoundError(path)
                pages.append(torch.from_file(path, shared=True, size=elements))
            there = torch.tensor([1])
        except (OSError, RuntimeError):
            there = torch.tensor([0])
        dist.all_reduce(there, op=dist.ReduceOp.MIN, group=self.group)  # all have mapped them
        if file >= 0:
            os.close(file)
        return pages if bool(there) else []
