"""The contract of an averager."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sparsync.averaging.base import Averager
from sparsync.testing.cases import WORLD_SIZES
from sparsync.transports.sim import SimCommunicator, simulate

__all__ = ["check_averager"]


def check_averager(
    make: Callable[[], Averager],
    *,
    world_sizes: Sequence[int] = WORLD_SIZES,
    steps: int = 24,
    preserves_mean: bool = True,
) -> float:
    """Check an averager: ``conclude`` leaves all models equal, and their mean is preserved.

    Ranks take equal time for their steps, so that none is stale.  Those of one rank change nothing.

    Args:
        make: builds one, without a model.
        world_sizes: how many ranks to check with.
        steps: local steps per run.
        preserves_mean: every step leaves the mean of the models as it was; False: it may drift.

    Returns:
        The largest drift of the mean at any step, relative to the largest magnitude in the models.
    """
    drifts = [0.0]

    async def program(comm: SimCommunicator) -> None:
        averager = make()
        vector = torch.arange(5, dtype=torch.float64)
        await averager.begin(comm, vector, 0)
        for step in range(steps):
            vector = vector + (comm.rank + 1) * (step + 1)  # the ranks drift apart
            models = torch.stack(await comm.allgather(vector, "verify"))
            vector = await averager.average(comm, vector, step)
            averaged = torch.stack(await comm.allgather(vector, "verify"))
            drift = (averaged.mean(0) - models.mean(0)).abs().max() / models.abs().max()
            drifts.append(float(drift))
            assert torch.isfinite(averaged).all(), f"step {step}: not finite"
            assert not preserves_mean or drift < 1e-12, f"step {step}: the mean moved by {drift}"
            if comm.world_size == 1:
                torch.testing.assert_close(averaged, models)
        vector = await averager.conclude(comm, vector, steps)
        for theirs in await comm.allgather(vector, "verify"):
            assert torch.equal(theirs, vector), "conclude left different models"

    for world_size in world_sizes:
        simulate(program, world_size)
    return max(drifts)
