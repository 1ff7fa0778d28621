"""Measure what this group's links and ranks take, on the group itself.

All ranks work at the same time, so more ranks than cores are seen as slow as they are while they train.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch

from sparsync import kernels
from sparsync.algorithm import Algorithm
from sparsync.collectives.budgeted import Budgeted
from sparsync.collectives.costs import Job
from sparsync.cost.links import (
    Clock,
    Interval,
    Link,
    MeasuredLinks,
    Probe,
    fit_pace,
    measure_links,
)
from sparsync.cost.machine import Machine
from sparsync.cost.predict import predict
from sparsync.selection.exact import Exact
from sparsync.sparse import SparseVector
from sparsync.transports.communicator import Communicator, check_timeout
from sparsync.wire.packed import Packed

__all__ = ["Bench", "Calibration", "calibrate"]

_PHASE = "calibrate"
_ITEM_BYTES = 4  # float32
_DENSITY = 0.01  # k / n of what is selected
_REGIONS = 4  # of the vector; messages of as many ranks are merged in one
_BATCHES, _AT_LEAST = 8, 3  # per kind of work, and if the time is over; one more is not counted
_SETTLED = 12  # steps until the selector's threshold follows a residual that began as zero
_REHEARSAL = 0.2  # of the time, for whole exchanges
_REHEARSED = Algorithm("budgeted", Exact, Budgeted)  # two turns, and little else
_LEAST, _MOST = 8, 50  # exchanges
_AHEAD = (
    0.03  # seconds from the last arrival to the start: 10 x what agreeing takes 8 ranks on 2 cores
)
_SMALLER = 4  # than what is worked on, so that turns are more than the rest

_Task = Callable[[], Awaitable[tuple[float, int]]]
"""Does some work; returns the seconds that it took and the number of units that were done."""

_Pace = tuple[float, Interval]
"""Seconds per unit of one kind of work, on the slowest rank, and their interval at 95 %."""


@dataclass(frozen=True)
class Bench:
    """The work that is timed.

    Attributes:
        elements: n of the vectors: 16 MB, more than most second-level caches.
        most: calls in a batch, which else ends with its time.
    """

    elements: int = 1 << 22
    most: int = 1000


@dataclass(frozen=True)
class Calibration:
    """A measured machine, and how sure it is; bit-identical on all ranks.

    Attributes:
        machine: what the planner takes.
        intervals: of each of its numbers, at 95 %; one rank has no alpha and beta.
        links: every direction between two ranks that was measured.
        clocks: of every rank against rank 0's.
        sizes: bytes of the messages that were sent.
    """

    machine: Machine
    intervals: dict[str, Interval]
    links: tuple[Link, ...] = ()
    clocks: tuple[Clock, ...] = ()
    sizes: tuple[int, ...] = ()

    def slow_links(self, *, factor: float = 1.5) -> list[Link]:
        """Return the links that take this many times the median's seconds per byte, slowest first.

        Args:
            factor: between 1 and the 2 of a link that is half as fast.
        """
        if not self.links:
            return []
        limit = factor * median(link.beta for link in self.links)
        return sorted((k for k in self.links if k.beta > limit), key=lambda k: -k.beta)

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers, as JSON takes them."""
        return asdict(self)


async def calibrate(
    comm: Communicator,
    *,
    seconds: float = 3.0,
    clock: Callable[[], float] | None = None,
    probe: Probe = Probe(),  # noqa: B008 (frozen)
    bench: Bench = Bench(),
) -> Calibration:
    """Measure the links and the work of a group's ranks; all of them call it together.

    Alpha and beta are what a message takes where every rank sends and receives at once; they are
    fitted to medians over rounds of several sizes, as large as the time allows.  In the simulator
    they are those of its ``Links``, and work takes no time.  At last whole exchanges are rehearsed.

    Args:
        comm: the group, of any size, otherwise idle; the bytes are booked in its ledger.
        seconds: about how long it may take.
        clock: of this rank; None: ``comm.now``.
        probe: how the links are probed.
        bench: what is worked on.

    Returns:
        The same on all ranks.  One rank alone has no links: alpha and beta are ``Machine``'s own.

    Raises:
        ConfigurationError: the links are too slow for the time; says how long to give.

    Example:
        >>> from sparsync.transports.sim import Links, simulate
        >>> async def program(comm):
        ...     return await calibrate(comm, probe=Probe(largest=1 << 16))
        >>> machine = simulate(program, 3, links=Links(alpha=1e-4, beta=1e-8)).results[0].machine
        >>> round(machine.alpha * 1e6, 3), round(machine.beta * 1e9, 3), machine.select
        (100.0, 10.0, 0.0)
    """
    seconds, now = check_timeout(seconds), clock or (lambda: comm.now)
    found: MeasuredLinks | None = None
    if comm.world_size > 1:
        found = await measure_links(comm, seconds=seconds, clock=now, probe=probe)
    left = max(1 - probe.budget - _REHEARSAL, _REHEARSAL) * seconds
    paces = await _measure_work(comm, seconds=left, clock=now, bench=bench)
    machine = replace(Machine(), **{name: pace for name, (pace, _) in paces.items()})
    intervals = {name: interval for name, (_, interval) in paces.items()}
    if found is None:
        return Calibration(machine, intervals, clocks=(Clock(),))
    line = found.line
    machine = replace(machine, alpha=line.alpha, beta=line.beta)
    turn, turn_interval = await _measure_turn(
        comm, machine, found.clocks, seconds=_REHEARSAL * seconds, clock=now, bench=bench
    )
    machine = replace(machine, turn=turn)
    ends = {"alpha": line.alpha_interval, "beta": line.beta_interval}
    intervals = {**ends, **intervals, "turn": turn_interval}
    return Calibration(machine, intervals, found.links, found.clocks, found.sizes)


# ---- work -------------------------------------------------------------------------------------------


async def _measure_work(
    comm: Communicator, *, seconds: float, clock: Callable[[], float], bench: Bench
) -> dict[str, _Pace]:
    """Return the paces of "gamma", "select", "encode", "decode", as ``Machine`` counts them.

    All ranks call it together.  The slowest rank's count: the others wait for it.

    Cost: about ``seconds`` of work; 5 n floats of memory.
    """
    if _stands_still(
        clock
    ):  # the simulator's: it charges for bytes that are summed, if for anything
        bench = replace(bench, elements=min(bench.elements, 1 << 10), most=1)
    shop = _Workshop(comm, clock, bench)
    tasks: dict[str, _Task] = {
        "gamma": shop.sum,
        "select": shop.select,
        "encode": shop.encode,
        "decode": shop.decode,
    }
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in tasks}
    length = seconds / len(tasks) / (_BATCHES + 1)
    await comm.barrier()
    end = clock() + seconds
    for batch in range(_BATCHES + 1):  # by turns, so that a busy moment hits all of them
        if batch > _AT_LEAST and clock() >= end:
            break
        for name, task in tasks.items():
            samples[name].append(await _batch(task, length, clock, bench.most))
    fits = [fit_pace(batches[1:]) for batches in samples.values()]
    mine = [[pace, *interval] for pace, interval in fits]
    gathered = await comm.allgather(torch.tensor(mine, dtype=torch.float64), _PHASE)
    everyone = [rank.tolist() for rank in gathered]
    slowest = [max(rank[i] for rank in everyone) for i in range(len(tasks))]
    return {
        name: (pace, (low, high)) for name, (pace, low, high) in zip(tasks, slowest, strict=True)
    }


def _stands_still(clock: Callable[[], float]) -> bool:
    """Tell whether a clock sees no work."""
    start = clock()
    torch.ones(1 << 16).sum()
    return clock() == start


async def _batch(
    task: _Task, seconds: float, clock: Callable[[], float], most: int
) -> tuple[float, float]:
    """Return the seconds and the units of some calls."""
    until, taken, units = clock() + seconds, 0.0, 0
    for _ in range(most):
        more, done = await task()
        taken, units = taken + more, units + done
        if clock() >= until:
            break
    return taken, units


class _Workshop:
    """A rank's vectors, and the work on them."""

    def __init__(self, comm: Communicator, clock: Callable[[], float], bench: Bench) -> None:
        self.comm, self.clock = comm, clock
        generator = torch.Generator().manual_seed(comm.rank)
        size = max(bench.elements // _REGIONS, 1) * _REGIONS
        self.gradient = torch.randn(size, generator=generator)
        self.incoming, self.residual = self.gradient.clone(), torch.zeros(size)
        self.selector, self.codec = Exact(), Packed()
        self.k = max(int(_DENSITY * size), 1)
        positions = kernels.top(self.gradient, self.k)
        vector = SparseVector(positions, self.gradient[positions], size)
        cuts = [i * (size // _REGIONS) for i in range(_REGIONS + 1)]
        self.pieces = vector.split(cuts)
        self.messages = [self.codec.encode(piece).payload for piece in self.pieces]
        self.step = 0

    async def sum(self) -> tuple[float, int]:
        """Add one dense vector to another; the simulator charges what it charges for it."""
        nbytes = self.gradient.numel() * _ITEM_BYTES
        start = self.clock()
        self.incoming.add_(self.gradient)
        await self.comm.work(nbytes)
        return self.clock() - start, nbytes

    async def select(self) -> tuple[float, int]:
        """Accumulate, select, retain; from the first time on as if training had gone on for long."""
        while self.step < _SETTLED:
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


# ---- turns ------------------------------------------------------------------------------------------


async def _measure_turn(
    comm: Communicator,
    machine: Machine,
    clocks: Sequence[Clock],
    *,
    seconds: float,
    clock: Callable[[], float],
    bench: Bench,
) -> _Pace:
    """Return the seconds lost per turn (``Machine.turn``): bit-identical on all ranks.

    All ranks rehearse an exchange of ``budgeted``; what it takes longer than its messages, bytes and
    entries do, by the machine as measured so far, is divided by its turns.  Where ranks share cores,
    one that waits for entries while others work gets its core back a time slice later.  As in a
    training step, every exchange follows a selection: one right after the other, with warm caches, they
    take half as long (measured).
    """
    size, ranks = max(bench.elements // _SMALLER, 1), comm.world_size
    k = max(int(_DENSITY * size), 1)
    job: dict[str, Any] = {"size": size, "world_size": ranks, "machine": machine}
    while (_LEAST + 2) * predict(_REHEARSED, k=k, **job).seconds_exchange > seconds:
        k //= 2  # on slow links, fewer entries
        if not k:
            return 0.0, (0.0, 0.0)
    generator = torch.Generator().manual_seed(comm.rank)
    stride = max(size // k, 1)  # one entry per cell: ascending, at random places
    indices = torch.arange(k) * stride + torch.randint(stride, (k,), generator=generator)
    vector = SparseVector(indices, torch.randn(k, generator=generator), size)
    ahead, still = clocks[comm.rank].ahead, _stands_still(clock)
    shop = None if still else _Workshop(comm, clock, bench)
    times: list[tuple[float, float]] = []  # by rank 0's clock
    collective, end = Budgeted(), clock() + seconds
    for step in range(_MOST + 1):
        if shop is not None:
            await shop.select()  # as a training step does, which leaves caches cold
        # an agreed time: a barrier would release the ranks one by one
        mine = torch.tensor([clock() - ahead + (0.0 if still else _AHEAD)], dtype=torch.float64)
        agreed = float(await comm.allreduce(mine, _PHASE, op="max"))
        start = max(agreed, clock() - ahead)
        if not still:
            time.sleep(max(start - (clock() - ahead), 0.0))
        await collective.reduce(comm, vector, k, step)
        times.append((start, clock() - ahead))
        late = torch.tensor([float(clock() >= end)])
        if step >= _LEAST and float(await comm.allreduce(late, _PHASE, op="max")) > 0:
            break
    everyone = await comm.allgather(torch.tensor(times, dtype=torch.float64), _PHASE)
    last = torch.stack(everyone).amax(0)  # from the last rank's start to the last rank's end
    lasted = last[1:, 1] - last[1:, 0]
    quarters = lasted.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64))
    whole = predict(_REHEARSED, k=k, **job)
    turns = _REHEARSED.cost(Job(size, k, ranks)).turns
    low, middle, high = (max(q - whole.seconds_exchange, 0.0) / turns for q in quarters.tolist())
    return middle, (low, high)
