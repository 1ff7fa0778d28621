"""Measure the speed of a group's links and ranks by exercising the group itself.

All ranks work at the same time, so if there are more ranks than cores, they are as slow as in training.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from sparsync import kernels
from sparsync.algorithm import Algorithm
from sparsync.collectives.budgeted import Budgeted
from sparsync.collectives.costs import Job
from sparsync.cost.links import (
    Clock,
    Interval,
    Link,
    Measured,
    Probe,
    fit_pace,
    measure_links,
)
from sparsync.cost.machine import Machine
from sparsync.cost.planner import predict
from sparsync.selection.selector import Exact
from sparsync.sparse import SparseVector
from sparsync.transports.communicator import Communicator, check_timeout
from sparsync.wire.packed import Packed

__all__ = ["Calibration", "calibrate"]

_PHASE = "calibrate"
_ITEM_BYTES = 4  # float32
_DENSITY = 0.01  # k / n of the selections
_REGIONS = 4  # number of regions of the vector, and of messages merged together
# number of batches per kind of work, and the smallest number if time is short, besides one for warm-up
_BATCHES, _AT_LEAST = 8, 3
_SETTLED = 12  # steps until the selector's threshold fits a residual that starts at zero
_REHEARSAL = 0.2  # fraction of the time that is spent on whole exchanges
_REHEARSED = Algorithm("budgeted", Exact, Budgeted)  # two turns are nearly all of its cost
_LEAST, _MOST = 8, 50  # limits on the number of rehearsed exchanges
# seconds from the last rank's arrival to the start; 8 ranks on 2 cores agree in a tenth of this time
_AHEAD = 0.03
_FAR = 1e-3  # if a message is in flight for fewer seconds, most of its latency is work at both ends
# factor by which the rehearsal's vectors are smaller than those in ``_Work``, so that turns dominate
_SMALLER = 4


@dataclass(frozen=True)
class Calibration:
    """A measured machine, with an interval for each of its numbers; bit-identical on all ranks."""

    machine: Machine
    intervals: dict[str, Interval]  # 95 % intervals; for a single rank, without alpha and beta
    links: tuple[Link, ...] = ()  # every measured direction between two ranks
    clocks: tuple[Clock, ...] = (Clock(),)  # every rank's clock relative to rank 0's clock
    sizes: tuple[int, ...] = ()  # bytes of the messages that were sent

    def slow_links(self, *, factor: float = 1.5) -> list[Link]:
        """Return the links whose seconds per byte exceed ``factor`` times the median, slowest first."""
        if not self.links:
            return []
        limit = factor * median(link.beta for link in self.links)
        return sorted((k for k in self.links if k.beta > limit), key=lambda k: -k.beta)


async def calibrate(
    comm: Communicator,
    *,
    seconds: float = 3.0,
    probe: Probe = Probe(),  # noqa: B008 (frozen)
) -> Calibration:
    """Measure a group's links and the work of its ranks; all ranks call this together.

    Alpha and beta are fitted to rounds of messages of several sizes, as large as the time allows.  In the
    simulator, they equal the alpha and beta of its ``Links``, and work takes no time.  At the end, the
    ranks rehearse whole exchanges.

    Args:
        comm: the group, of any size, with no other messages in flight.  Its ledger counts the bytes.
        seconds: approximate duration; slow or distant links may take longer.
        probe: limits of the measurement.

    Returns:
        The same calibration on all ranks.  A single rank has no links and gets the default alpha and beta
        of ``Machine``.

    Raises:
        ConfigurationError: the time is not valid.

    Example:
        >>> from sparsync.transports.sim import Links, simulate
        >>> async def program(comm):
        ...     return await calibrate(comm, probe=Probe(largest=1 << 16))
        >>> machine = simulate(program, 3, links=Links(alpha=1e-4, beta=1e-8)).results[0].machine
        >>> round(machine.alpha * 1e6, 3), round(machine.beta * 1e9, 3), machine.select
        (100.0, 10.0, 0.0)
    """
    seconds = check_timeout(seconds)
    left = max(1 - probe.budget - _REHEARSAL, _REHEARSAL) * seconds
    if comm.world_size == 1:
        measured = await _measure_work(comm, left, probe)
        return Calibration(_machine(measured), _intervals(measured))
    line, links, clocks, sizes = await measure_links(comm, seconds, probe)
    measured = line | await _measure_work(comm, left, probe)
    ahead, rehearsal = clocks[comm.rank].ahead, _REHEARSAL * seconds
    alpha = measured["alpha"][0]
    measured["distance"] = _distance(alpha, () if _stands_still(comm) else clocks[1:])
    turn = await _measure_turn(comm, _machine(measured), ahead, rehearsal, probe)
    measured["turn"] = turn
    return Calibration(_machine(measured), _intervals(measured), links, clocks, sizes)


def _distance(alpha: float, clocks: Sequence[Clock]) -> Measured:
    """Return the part of alpha spent in flight: half of the fastest round trips, or 0 if that is short.

    Example:
        >>> _distance(0.05, [Clock(0.3, 0.0402), Clock(0.1, 0.0404)])
        (0.0403, (0.0402, 0.0404))
        >>> _distance(50e-6, [Clock(0.0, 30e-6)])
        (0.0, (0.0, 0.0))
    """
    ways = [min(alpha, clock.uncertainty) for clock in clocks]
    if not ways or median(ways) < _FAR:
        return 0.0, (0.0, 0.0)
    return median(ways), (min(ways), max(ways))


def _machine(measured: Mapping[str, Measured]) -> Machine:
    return Machine(**{name: value for name, (value, _) in measured.items()})


def _intervals(measured: Mapping[str, Measured]) -> dict[str, Interval]:
    return {name: interval for name, (_, interval) in measured.items()}


def _stands_still(comm: Communicator) -> bool:
    """Return whether the group's clock ignores work, as the simulator's clock does."""
    start = comm.now
    torch.ones(1 << 16, device="cpu").sum()
    return comm.now == start


# ---- work -------------------------------------------------------------------------------------------


async def _measure_work(comm: Communicator, seconds: float, probe: Probe) -> dict[str, Measured]:
    """Return the times per unit of "gamma", "select", "encode" and "decode", as in ``Machine``.

    All ranks call this together.  The slowest rank's times count, because the others wait for it.

    Cost: about ``seconds`` of work; 5 n floats of memory.
    """
    if _stands_still(comm):  # such a clock charges at most for summed bytes, so one call is enough
        probe = replace(probe, elements=min(probe.elements, 1 << 10), calls=1)
    work = _Work(comm, probe.elements)
    tasks: dict[str, Callable[[], Awaitable[tuple[float, int]]]] = {
        "gamma": work.sum,
        "select": work.select,
        "encode": work.encode,
        "decode": work.decode,
    }
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in tasks}
    length = seconds / len(tasks) / (_BATCHES + 1)
    await comm.barrier()
    end = comm.now + seconds
    # interleaved, so that a busy moment affects all kinds of work
    for batch in range(_BATCHES + 1):
        if batch > _AT_LEAST and comm.now >= end:
            break
        for name, task in tasks.items():
            until, taken, units = comm.now + length, 0.0, 0
            for _ in range(probe.calls):
                more, done = await task()
                taken, units = taken + more, units + done
                if comm.now >= until:
                    break
            samples[name].append((taken, units))
    fits = [fit_pace(batches[1:]) for batches in samples.values()]
    mine = torch.tensor(
        [[pace, *interval] for pace, interval in fits], dtype=torch.float64, device="cpu"
    )
    everyone = [rank.tolist() for rank in await comm.allgather(mine, _PHASE)]
    slowest = (max(rank[i] for rank in everyone) for i in range(len(tasks)))
    return {
        name: (pace, (low, high)) for name, (pace, low, high) in zip(tasks, slowest, strict=True)
    }


class _Work:
    """A rank's vectors and the work on them; each task returns its seconds and its units of work."""

    def __init__(self, comm: Communicator, elements: int) -> None:
        self.comm, self.step = comm, 0
        generator = torch.Generator().manual_seed(comm.rank)
        size = max(elements // _REGIONS, 1) * _REGIONS
        self.gradient = torch.randn(size, generator=generator, device="cpu")
        self.incoming, self.residual = self.gradient.clone(), torch.zeros(size, device="cpu")
        self.selector, self.codec = Exact(), Packed()
        self.k = max(int(_DENSITY * size), 1)
        positions = kernels.top(self.gradient, self.k)
        vector = SparseVector(positions, self.gradient[positions], size)
        self.pieces = vector.split([i * (size // _REGIONS) for i in range(_REGIONS + 1)])
        self.messages = [self.codec.encode(piece).payload for piece in self.pieces]

    async def sum(self) -> tuple[float, int]:
        """Add one dense vector to another; in the simulator, this takes virtual time."""
        nbytes, start = self.gradient.numel() * _ITEM_BYTES, self.comm.now
        self.incoming.add_(self.gradient)
        await self.comm.work(nbytes)
        return self.comm.now - start, nbytes

    async def select(self) -> tuple[float, int]:
        """Accumulate, select and keep the rest, as in training after the first steps."""
        while self.step < _SETTLED:
            self._select()
        return self._select(), self.residual.numel()

    def _select(self) -> float:
        self.incoming.copy_(self.gradient)  # accumulating overwrites the memory of ``incoming``
        start = self.comm.now
        collect = self.selector.collect_from(self.k, self.step, self.residual.dtype)
        found = kernels.accumulate_(self.residual, self.incoming, *collect or ())
        collected = found and SparseVector(*found, self.residual.numel())
        selected = self.selector.select(self.residual, self.k, self.step, collected)
        kernels.subtract_(self.residual, selected.indices, selected.values)
        self.step += 1
        return self.comm.now - start

    async def encode(self) -> tuple[float, int]:
        """Pack the entries of each region."""
        start = self.comm.now
        for piece in self.pieces:
            self.codec.encode(piece)
        return self.comm.now - start, self.k

    async def decode(self) -> tuple[float, int]:
        """Unpack and merge one message per region."""
        start, size = self.comm.now, self.pieces[0].size
        SparseVector.merge([self.codec.decode(message, size) for message in self.messages])
        return self.comm.now - start, self.k


# ---- turns ------------------------------------------------------------------------------------------


async def _measure_turn(
    comm: Communicator, machine: Machine, ahead: float, seconds: float, probe: Probe
) -> Measured:
    """Return the seconds lost per turn (``Machine.turn``), bit-identical on all ranks.

    All ranks rehearse an exchange of ``budgeted``.  The times measured so far predict how long its
    messages, bytes and entries take; the rest of the exchange's time is divided by the number of turns.
    This rest is large if ranks share cores: a rank that waits for entries while others work gets its core
    back a time slice later.  As in a training step, every exchange follows a selection.  Without
    selections in between, caches would be warm, and exchanges would take half as long (measured).

    ``ahead`` is the offset of this rank's clock from rank 0's, in seconds.
    """
    size, ranks = max(probe.elements // _SMALLER, 1), comm.world_size
    k = max(int(_DENSITY * size), 1)

    def exchange_seconds() -> float:
        made = predict(_REHEARSED, size=size, k=k, world_size=ranks, machine=machine)
        return made.seconds_exchange

    while (_LEAST + 2) * exchange_seconds() > seconds:
        k //= 2  # send fewer entries on slow links
        if not k:
            return 0.0, (0.0, 0.0)
    generator = torch.Generator().manual_seed(comm.rank)
    stride = max(size // k, 1)  # one entry per stride, ascending, at random positions
    indices = torch.arange(k, device="cpu") * stride + torch.randint(
        stride, (k,), generator=generator, device="cpu"
    )
    vector = SparseVector(indices, torch.randn(k, generator=generator, device="cpu"), size)
    still = _stands_still(comm)
    work = None if still else _Work(comm, probe.elements)
    times: list[tuple[float, float]] = []  # on rank 0's clock
    collective, end = Budgeted(), comm.now + seconds
    for step in range(_MOST + 1):
        if work is not None:
            await work.select()  # this leaves caches cold, as a training step does
        # all ranks start at an agreed time, because a barrier would release them one by one
        mine = torch.tensor(
            [comm.now - ahead + (0.0 if still else _AHEAD)], dtype=torch.float64, device="cpu"
        )
        agreed = float(await comm.allreduce(mine, _PHASE, op="max"))
        start = max(agreed, comm.now - ahead)
        if not still:
            time.sleep(max(start - (comm.now - ahead), 0.0))
        await collective.reduce(comm, vector, k, step)
        times.append((start, comm.now - ahead))
        late = torch.tensor([float(comm.now >= end)], device="cpu")
        if step >= _LEAST and float(await comm.allreduce(late, _PHASE, op="max")) > 0:
            break
    everyone = await comm.allgather(torch.tensor(times, dtype=torch.float64, device="cpu"), _PHASE)
    last = torch.stack(everyone).amax(0)  # from the last rank's start until the last rank's end
    lasted = last[1:, 1] - last[1:, 0]
    quarters = lasted.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64, device="cpu"))
    turns = _REHEARSED.cost(Job(size, k, ranks)).turns
    low, middle, high = (max(q - exchange_seconds(), 0.0) / turns for q in quarters.tolist())
    return middle, (low, high)
