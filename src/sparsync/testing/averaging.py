"""The contract of an averager."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sparsync.averaging.base import Averager
from sparsync.testing.cases import WORLD_SIZES
from sparsync.transports.base import Communicator
from sparsync.transports.sim import simulate

__all__ = ["check_averager"]


def check_averager(
    make: Callable[[], Averager], *, world_sizes: Sequence[int] = WORLD_SIZES, steps: int = 24
) -> None:
    """Check an averager: the mean of the models is preserved, ``finish`` leaves them equal."""

    async def program(comm: Communicator) -> None:
        averager = make()
        model = torch.arange(5, dtype=torch.float64) * (comm.rank + 1)
        for step in range(steps):
            before = torch.stack(await comm.allgather(model, "verify")).mean(0)
            model = await averager.average(comm, model, step)
            after = torch.stack(await comm.allgather(model, "verify")).mean(0)
            torch.testing.assert_close(after, before)
            model = model + (comm.rank + 1) * (step + 1)  # the ranks drift apart again
        model = await averager.finish(comm, model)
        for theirs in await comm.allgather(model, "verify"):
            assert torch.equal(theirs, model), "finish left different models"

    for world_size in world_sizes:
        simulate(program, world_size)
