"""Contract checks for an averager."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sparsync.averaging.averager import Averager
from sparsync.testing.cases import WORLD_SIZES
from sparsync.transports.sim import SimCommunicator, simulate

__all__ = ["check_averager"]


def check_averager(
    make: Callable[[], Averager],
    *,
    world_sizes: Sequence[int] = WORLD_SIZES,
    steps: int = 24,
    preserves_mean: bool = True,
    late: Callable[[int, int], float] | None = None,
) -> float:
    """Check that an averager's ``conclude`` leaves all models equal, and that their mean is preserved.

    ``conclude`` is also checked directly after another ``conclude`` and after a load, without a step in
    between.  If there is only one rank, its model must never change.

    Args:
        make: builds an averager without a model.
        world_sizes: the numbers of ranks to check.
        steps: local steps per run.
        preserves_mean: whether every step preserves the mean of the models.
        late: ``late(step, rank)`` returns the seconds of virtual time that a rank takes for a step.
            Ranks then do not wait for each other between steps, and wait-avoiding schemes average stale
            models: pass ``preserves_mean=False`` for these schemes.  With None, ranks begin and end
            averages together, so no model is stale.

    Returns:
        The largest drift of the mean at any step, relative to the largest magnitude in the models.
    """
    return max(_drift(make, size, steps, preserves_mean, late) for size in world_sizes)


def _drift(
    make: Callable[[], Averager],
    world_size: int,
    steps: int,
    preserves_mean: bool,
    late: Callable[[int, int], float] | None,
) -> float:
    # use float64, because the check to 1e-12 is about the scheme, not about rounding in float32
    shape = (steps, world_size, 5)
    before, after = (torch.zeros(shape, dtype=torch.float64, device="cpu") for _ in range(2))

    async def program(comm: SimCommunicator) -> Tensor:
        averager = make()
        vector = slope = torch.arange(5, dtype=torch.float64, device="cpu")
        await averager.begin(comm, vector, 0)
        for step in range(steps):
            vector = vector + (comm.rank + 1) * (step + 1 + slope)  # make the ranks drift apart
            await (comm.barrier() if late is None else comm.compute(late(step, comm.rank)))
            before[step, comm.rank] = vector
            vector = await averager.average(comm, vector, step)
            after[step, comm.rank] = vector
            if late is None:
                await comm.barrier()
        ends, own = [await averager.conclude(comm, vector, steps)], [vector]
        for load in (False, True):
            if load:
                saved, averager = averager.state_dict(), make()
                averager.load_state_dict(saved)
                await averager.begin(comm, ends[-1], steps)
            own.append(ends[-1] + (comm.rank + 1) * slope)
            ends.append(await averager.conclude(comm, own[-1].clone(), steps))
        return torch.stack([*ends, *own])

    # [P, 2, 3, n]: the models after and before each ``conclude``
    models = torch.stack(simulate(program, world_size).results).view(world_size, 2, 3, 5)
    for which, end in zip(
        ("", "a second time", "after a load"), models[:, 0].unbind(1), strict=True
    ):
        assert (end == end[0]).all(), f"conclude left different models {which}".rstrip()
    if preserves_mean:
        means = models.mean(0)
        torch.testing.assert_close(means[0, 1:], means[1, 1:], rtol=1e-12, atol=1e-12)
    assert torch.isfinite(after).all(), "a model is not finite"
    if world_size == 1:
        torch.testing.assert_close(after, before)
    moved = (after.mean(1) - before.mean(1)).abs().amax(1) / before.abs().amax((1, 2))
    drift, step = moved.max(0)
    assert not preserves_mean or drift < 1e-12, f"step {int(step)}: the mean moved by {drift}"
    return float(drift)
