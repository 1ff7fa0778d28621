"""Time what a rank does itself: sums, selection, packing, unpacking; all ranks at the same time.

So more ranks than cores are seen as slow as they are while they train.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import torch

from sparsync import kernels
from sparsync.cost.fitting import Interval, fit_pace
from sparsync.selection.exact import Exact
from sparsync.sparse import SparseVector
from sparsync.transports.communicator import Communicator
from sparsync.wire.packed import Packed

__all__ = ["Bench", "Pace", "Workshop", "measure_work", "stands_still"]

_PHASE = "calibrate"
_ITEM_BYTES = 4  # float32

Task = Callable[[], Awaitable[tuple[float, int]]]
"""Does some work; returns the seconds that it took and the number of units that were done."""


@dataclass(frozen=True)
class Pace:
    """Seconds per unit of one kind of work, on the slowest rank.

    Attributes:
        seconds: over all batches.
        interval: of it, at 95 %.
    """

    seconds: float
    interval: Interval


@dataclass(frozen=True)
class Bench:
    """Sizes and repetitions of the work that is timed.

    Attributes:
        elements: n of the vectors: 16 MB, more than most second-level caches.
        density: k / n of what is selected.
        regions: of the vector; messages of as many ranks are merged in one.
        batches: measured per kind of work; one more before them is not counted.
        least: batches that are measured even if the time is over.
        most: calls in a batch, which else ends with its time.
        settled: steps until the selector's threshold follows a residual that began as zero.
    """

    elements: int = 1 << 22
    density: float = 0.01
    regions: int = 4
    batches: int = 8
    least: int = 3
    most: int = 1000
    settled: int = 12


async def measure_work(
    comm: Communicator, *, seconds: float, clock: Callable[[], float], bench: Bench
) -> dict[str, Pace]:
    """Return the paces of "gamma", "select", "encode", "decode", as ``Machine`` counts them.

    All ranks call it together.  The slowest rank's count: the others wait for it.

    Cost: about ``seconds`` of work; 5 n floats of memory.
    """
    if stands_still(
        clock
    ):  # the simulator's: it charges for bytes that are summed, if for anything
        bench = replace(bench, elements=min(bench.elements, 1 << 10), most=1)
    shop = Workshop(comm, clock, bench)
    tasks: dict[str, Task] = {
        "gamma": shop.sum,
        "select": shop.select,
        "encode": shop.encode,
        "decode": shop.decode,
    }
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in tasks}
    length = seconds / len(tasks) / (bench.batches + 1)
    await comm.barrier()
    end = clock() + seconds
    for batch in range(bench.batches + 1):  # by turns, so that a busy moment hits all of them
        if batch > bench.least and clock() >= end:
            break
        for name, task in tasks.items():
            samples[name].append(await _batch(task, length, clock, bench.most))
    fits = [fit_pace(batches[1:]) for batches in samples.values()]
    mine = [[pace, *interval] for pace, interval in fits]
    gathered = await comm.allgather(torch.tensor(mine, dtype=torch.float64), _PHASE)
    everyone = [rank.tolist() for rank in gathered]
    slowest = [max(rank[i] for rank in everyone) for i in range(len(tasks))]
    return {
        name: Pace(pace, (low, high))
        for name, (pace, low, high) in zip(tasks, slowest, strict=True)
    }


def stands_still(clock: Callable[[], float]) -> bool:
    """Tell whether a clock sees no work."""
    start = clock()
    torch.ones(1 << 16).sum()
    return clock() == start


async def _batch(
    task: Task, seconds: float, clock: Callable[[], float], most: int
) -> tuple[float, float]:
    """Return the seconds and the units of some calls."""
    until, taken, units = clock() + seconds, 0.0, 0
    for _ in range(most):
        more, done = await task()
        taken, units = taken + more, units + done
        if clock() >= until:
            break
    return taken, units


class Workshop:
    """A rank's vectors, and the work on them."""

    def __init__(self, comm: Communicator, clock: Callable[[], float], bench: Bench) -> None:
        self.comm, self.clock = comm, clock
        generator = torch.Generator().manual_seed(comm.rank)
        size = max(bench.elements // bench.regions, 1) * bench.regions
        self.gradient = torch.randn(size, generator=generator)
        self.incoming, self.residual = self.gradient.clone(), torch.zeros(size)
        self.selector, self.codec = Exact(), Packed()
        self.k = max(int(bench.density * size), 1)
        positions = kernels.top(self.gradient, self.k)
        vector = SparseVector(positions, self.gradient[positions], size)
        cuts = [i * (size // bench.regions) for i in range(bench.regions + 1)]
        self.pieces = vector.split(cuts)
        self.messages = [self.codec.encode(piece).payload for piece in self.pieces]
        self.step, self.settled = 0, bench.settled

    async def sum(self) -> tuple[float, int]:
        """Add one dense vector to another; the simulator charges what it charges for it."""
        nbytes = self.gradient.numel() * _ITEM_BYTES
        start = self.clock()
        self.incoming.add_(self.gradient)
        await self.comm.work(nbytes)
        return self.clock() - start, nbytes

    async def select(self) -> tuple[float, int]:
        """Accumulate, select, retain; from the first time on as if training had gone on for long."""
        while self.step < self.settled:
            self._select()
        return self._select(), self.residual.numel()

    def _select(self) -> float:
        self.incoming.copy_(self.gradient)  # accumulating takes its memory over
        start = self.clock()
        collect = self.selector.collect_from(self.k, self.step, self.residual.dtype)
        found = kernels.accumulate_(self.residual, self.incoming, *collect or ())
        collected = found and SparseVector(*found, self.residual.numel())
        selected = self.selector.select(self.residual, self.k, self.step, collected)
        kernels.subtract_(self.residual, selected.indices, selected.values)
        self.step += 1
        return self.clock() - start

    async def encode(self) -> tuple[float, int]:
        """Pack the entries of each region."""
        start = self.clock()
        for piece in self.pieces:
            self.codec.encode(piece)
        return self.clock() - start, sum(piece.nnz for piece in self.pieces)

    async def decode(self) -> tuple[float, int]:
        """Unpack and merge as many messages."""
        start, size = self.clock(), self.pieces[0].size
        SparseVector.merge([self.codec.decode(message, size) for message in self.messages])
        return self.clock() - start, sum(piece.nnz for piece in self.pieces)
