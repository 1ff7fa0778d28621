"""Measure what an exchange takes beyond its parts: waiting for ranks that still work."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsync.collectives.budgeted import Budgeted
from sparsync.collectives.costs import Job
from sparsync.cost.links import Clock
from sparsync.cost.machine import Machine
from sparsync.cost.predict import Candidate, predict
from sparsync.cost.work import Bench, Pace, Workshop, stands_still
from sparsync.sparse import SparseVector
from sparsync.transports.communicator import Communicator

__all__ = ["measure_turn"]

_REHEARSED = Candidate("budgeted", Budgeted)  # two turns, and little else
_LEAST, _MOST = 8, 50  # exchanges
_AHEAD = (
    0.03  # seconds from the last arrival to the start: 10 x what agreeing takes 8 ranks on 2 cores
)
_SMALLER = 4  # than what is worked on, so that turns are more than the rest


async def measure_turn(
    comm: Communicator,
    machine: Machine,
    clocks: Sequence[Clock],
    *,
    seconds: float,
    clock: Callable[[], float],
    bench: Bench,
) -> Pace:
    """Return the seconds lost per turn (``Machine.turn``): bit-identical on all ranks.

    All ranks rehearse an exchange of ``budgeted``; what it takes longer than its messages, bytes and
    entries do, by the machine as measured so far, is divided by its turns.  Where ranks share cores,
    one that waits for entries while others work gets its core back a time slice later.  As in a
    training step, every exchange follows a selection: one right after the other, with warm caches, they
    take half as long (measured).

    Args:
        comm: the group, of at least two ranks.
        machine: all but ``turn``.
        clocks: of every rank.
        seconds: about how long it may take.
        clock: of this rank.
        bench: size and density of the vectors.
    """
    size, ranks = max(bench.elements // _SMALLER, 1), comm.world_size
    k = max(int(bench.density * size), 1)
    job: dict[str, Any] = {"size": size, "world_size": ranks, "machine": machine}
    while (_LEAST + 2) * predict(_REHEARSED, k=k, **job).seconds_exchange > seconds:
        k //= 2  # on slow links, fewer entries
        if not k:
            return Pace(0.0, (0.0, 0.0))
    generator = torch.Generator().manual_seed(comm.rank)
    stride = max(size // k, 1)  # one entry per cell: ascending, at random places
    indices = torch.arange(k) * stride + torch.randint(stride, (k,), generator=generator)
    vector = SparseVector(indices, torch.randn(k, generator=generator), size)
    stage, collective, end = _Stage(comm, clocks, clock, bench), Budgeted(), clock() + seconds
    for step in range(_MOST + 1):
        await stage.enter()
        await collective.reduce(comm, vector, k, step)
        late = torch.tensor([float(await stage.leave() >= end)])
        if step >= _LEAST and float(await comm.allreduce(late, "calibrate", op="max")) > 0:
            break
    quarters = (await stage.lasted())[1:].quantile(
        torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    )
    whole = predict(_REHEARSED, k=k, **job)
    turns = _REHEARSED.cost(Job(size, k, ranks)).turns
    low, middle, high = (max(q - whole.seconds_exchange, 0.0) / turns for q in quarters.tolist())
    return Pace(middle, (low, high))


class _Stage:
    """Start all ranks at an agreed time and measure until the last finishes.

    A barrier would release them one by one.
    """

    def __init__(
        self, comm: Communicator, clocks: Sequence[Clock], clock: Callable[[], float], bench: Bench
    ) -> None:
        self.comm, self.clock, self.ahead = comm, clock, clocks[comm.rank].ahead
        self.virtual = stands_still(clock)
        self.shop = None if self.virtual else Workshop(comm, clock, bench)
        self.times: list[tuple[float, float]] = []
        self.start = 0.0

    async def enter(self) -> None:
        """Select, as a training step does, which leaves caches cold; then wait for the start."""
        if self.shop is not None:
            await self.shop.select()
        mine = torch.tensor([self._now() + (0.0 if self.virtual else _AHEAD)], dtype=torch.float64)
        moment = float(await self.comm.allreduce(mine, "calibrate", op="max"))
        self.start = max(moment, self._now())
        if not self.virtual:
            time.sleep(max(self.start - self._now(), 0.0))

    async def leave(self) -> float:
        """Book the time; return it, by this rank's clock."""
        self.times.append((self.start, self._now()))
        return self.clock()

    async def lasted(self) -> Tensor:
        """Return the seconds of every exchange: from the last rank's start to the last rank's end."""
        everyone = await self.comm.allgather(
            torch.tensor(self.times, dtype=torch.float64), "calibrate"
        )
        last = torch.stack(everyone).amax(0)
        return last[:, 1] - last[:, 0]

    def _now(self) -> float:
        """By rank 0's clock."""
        return self.clock() - self.ahead
