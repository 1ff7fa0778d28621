"""What is lost between the parts of an exchange: a whole one, against what its parts take."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from sparsync.collectives.budgeted import Budgeted
from sparsync.planning.forms import COLLECTIVES, Job
from sparsync.planning.machine import Machine
from sparsync.planning.predict import predict
from sparsync.planning.work import Bench, Pace, stands_still
from sparsync.sparse import SparseVector
from sparsync.transports.base import Communicator

__all__ = ["measure_turn"]

_NAME = "budgeted"  # two turns, and little else
_LEAST, _MOST = 5, 50  # exchanges
_PAUSE = 0.05  # seconds
_SMALLER = 4  # than what is worked on, so that turns are more than the rest


async def measure_turn(
    comm: Communicator,
    machine: Machine,
    *,
    seconds: float,
    clock: Callable[[], float],
    bench: Bench,
) -> Pace:
    """Return the seconds lost per turn (``Machine.turn``): bit-identical on all ranks.

    All ranks rehearse an exchange of ``budgeted``; what it takes longer than its messages, bytes and
    entries do, by the machine as measured so far, is divided by its turns.  Where ranks share cores,
    one that waits for entries while others work gets its core back a time slice later.  Before each all
    ranks sweep through memory and pause: one upon the other, with warm caches, exchanges take half as
    long (measured) as they do behind a computation.

    Args:
        comm: the group, of at least two ranks.
        machine: all but ``turn``.
        seconds: about how long it may take.
        clock: of this rank.
        bench: size and density of the vectors.
    """
    size, ranks = max(bench.elements // _SMALLER, 1), comm.world_size
    k = max(int(bench.density * size), 1)
    job: dict[str, Any] = {"size": size, "world_size": ranks, "machine": machine}
    while (_LEAST + 2) * predict(_NAME, k=k, **job).seconds_exchange > seconds:
        k //= 2  # on slow links, fewer entries
        if not k:
            return Pace(0.0, (0.0, 0.0))
    generator = torch.Generator().manual_seed(comm.rank)
    stride = max(size // k, 1)  # one entry per cell: ascending, at random places
    indices = torch.arange(k) * stride + torch.randint(stride, (k,), generator=generator)
    vector = SparseVector(indices, torch.randn(k, generator=generator), size)
    collective, samples, end = Budgeted(), [], clock() + seconds
    virtual = stands_still(clock)
    pause, swept = 0.0 if virtual else _PAUSE, torch.zeros(1 if virtual else bench.elements)
    for step in range(_MOST + 1):
        swept.add_(1.0)
        await comm.barrier()
        time.sleep(pause)
        start = clock()
        await collective.reduce(comm, vector, k, step)
        samples.append(clock() - start)
        late = torch.tensor([float(clock() >= end)])
        if step >= _LEAST and float(await comm.allreduce(late, "calibrate", op="max")) > 0:
            break
    quarters = torch.tensor(samples[1:], dtype=torch.float64).quantile(
        torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    )
    everyone = await comm.allgather(quarters, "calibrate")
    whole = predict(_NAME, k=k, **job)
    turns = COLLECTIVES[_NAME].work(Job(size, k, ranks)).turns
    low, middle, high = (
        max(max(rank[i].item() for rank in everyone) - whole.seconds_exchange, 0.0) / turns
        for i in range(3)
    )
    return Pace(middle, (low, high))
