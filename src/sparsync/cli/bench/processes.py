"""Steps of real ranks under a real clock, with a real ``Reducer``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, final

import torch
import torch.distributed as dist

from sparsync.cli.bench.measure import Measured, Outcome, Pace, measure
from sparsync.cli.bench.verified_row import (
    Case,
    Evidence,
    WatchedReducer,
    compare,
    digest,
    judge,
)
from sparsync.cli.lab import local_traffic
from sparsync.cli.launch import StartLine
from sparsync.cli.network_choice import Connection, transport_of
from sparsync.sparse import DenseVector, SparseVector
from sparsync.state import packed, unpacked
from sparsync.transports.driver import run
from sparsync.transports.rendezvous import store_of

__all__ = ["Team"]

_NANOSECONDS = 1e9
_PIECE = 4 << 20  # bytes of evidence per message, because a store takes at most 8 MiB


@final
class Team:
    """The ranks of a bench, and a process group for messages that are neither timed nor counted.

    Args:
        connection: carries the messages of the rows.
    """

    def __init__(self, connection: Connection) -> None:
        self.group, self.rank = dist.new_group(), dist.get_rank()
        self.connection, self.line = connection, StartLine(self.group)

    def measure(
        self,
        case: Case,
        pace: Pace,
        verified: tuple[bool, bool],
        advance: Callable[[int | None], None],
    ) -> Measured:
        """Measure a row; all ranks call this, and the slowest rank's times determine the number of steps.

        Rank 0 checks the sum and the law of conservation; the other ranks only check that totals are
        equal.
        """
        with self.connection.open(case.name) as comm:
            rank = WatchedReducer(case, comm)
            step = partial(self._step, rank)
            measured = measure(step, transport_of(comm), pace, verified, advance)
            seconds, processor = self._time_of_add(case.size)
            stages = dict(comm.ledger.stages)
            return replace(measured, stages=stages, add_seconds=seconds, add_processor=processor)

    def _step(self, rank: WatchedReducer, in_full: bool, alone: bool) -> Outcome:
        """Run one step; with ``alone``, wait for all ranks before the exchange, to time it alone."""
        seen, mine = rank.seen, rank.feed(keep=in_full, fence=self.line.wait if alone else None)
        ledger, before = rank.reducer.comm.ledger, local_traffic() or (0, 0)
        start = self.line.wait()
        run(rank.reducer.reduce([mine]))
        end = time.perf_counter() - seen.copying
        # after this barrier, all messages have arrived and the kernel has counted them
        dist.barrier(group=self.group)
        after = local_traffic() or (0, 0)
        counted = max(now - then for now, then in zip(after, before, strict=True))
        total, last = seen.reduced.total, ledger.last_step
        clocks = (start, end, seen.started, seen.ended, seen.processor)
        times = [round(t * _NANOSECONDS) for t in clocks]
        others = [last.sent, last.received, counted, seen.selected.nnz, digest(total)]
        mine = torch.tensor([*times, *others])
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine, group=self.group)
        facts = torch.stack(everyone)
        most = facts.amax(0).tolist()
        verdict = compare(rank.case.k, most[8], total, set(facts[:, 9].tolist()))
        if in_full:
            evidence = self._collect(rank.evidence())
            if self.rank == 0:
                verdict = judge(rank.case.k, evidence)
            else:
                list(evidence)  # sends this rank's evidence to rank 0
        return Outcome(
            seconds=self.line.elapsed(facts[:, 0], facts[:, 1]),
            exchange=self.line.elapsed(facts[:, 2], facts[:, 3]) if alone else None,
            processor=facts[:, 4].double().mean().item() / _NANOSECONDS if alone else None,
            sent=most[5],
            received=most[6],
            verdict=verdict,
            in_full=in_full,
            kernel=most[7] if self.connection.lab else None,
        )

    def _collect(self, mine: Evidence) -> Iterator[Evidence]:
        """On rank 0, yield every rank's evidence in rank order; on other ranks, send ``mine`` to rank 0.

        Evidence travels through the group's store, which bypasses the lab's links: with n = 14.7 M and
        P = 8, the residuals and accumulated gradients alone are 0.8 GB, which would keep a 1 Gbit/s link
        busy for 7 s.
        """
        store = store_of(self.group)
        if self.rank:
            raw = bytes(packed(mine))
            for number, start in enumerate(range(0, len(raw) + 1, _PIECE)):
                piece: Any = raw[start : start + _PIECE]  # Any, because torch's stubs declare str
                store.set(f"evidence {self.rank}/{number}", piece)
            return
        yield mine
        for rank in range(1, dist.get_world_size()):
            pieces = bytearray()
            for number in count():
                piece = store.get(key := f"evidence {rank}/{number}")
                store.delete_key(key)
                pieces += piece
                if len(piece) < _PIECE:
                    break
            yield unpacked(pieces, [Evidence, SparseVector, DenseVector])

    def _time_of_add(self, size: int, *, repetitions: int = 10) -> tuple[list[float], list[float]]:
        """Time repetitions of ``residual.add_(gradient)`` on all ranks in parallel.

        Return, per repetition, the slowest rank's seconds and the mean processor seconds.
        """
        residual, gradient = torch.zeros(size), torch.ones(size)
        times = []
        for _ in range(repetitions + 1):  # the first repetition is not timed
            start, before = self.line.wait(), time.process_time()
            residual.add_(gradient)
            times.append([time.perf_counter() - start, time.process_time() - before])
        slowest, mean = torch.tensor(times[1:], dtype=torch.float64).T.contiguous()
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=self.group)
        dist.all_reduce(mean, group=self.group)
        return slowest.tolist(), (mean / dist.get_world_size()).tolist()
