"""Run an averager on virtual ranks, and move their models by given updates."""

import io

import torch

from sparsync import simulate
from tests.draws import seeded

SIZE, WORLD_SIZE = 40, 3


def update(rank, step):
    return torch.randn(SIZE, generator=seeded(1000 * step + rank), dtype=torch.float64)


def on_all_ranks(make, steps, *, update=update, world_size=WORLD_SIZE, reload_at=None, watch=None):
    """Return models `[steps + 1, P, n]`, after every step and at the end; all models start as ones.

    ``watch(rank, step, averager, local)`` is called after every step.
    """

    async def program(comm):
        averager, vector, models = make(), torch.ones(SIZE, dtype=torch.float64), []
        await averager.begin(comm, vector, 0)
        for step in range(steps):
            if step == reload_at:
                saved, averager = through_a_file(averager.state_dict()), make()
                averager.load_state_dict(saved)
                await averager.begin(comm, vector, step)
            local = vector + update(comm.rank, step)
            before = local.clone()
            vector = await averager.average(comm, local, step)
            # the published model must be unchanged
            torch.testing.assert_close(local, before, rtol=0, atol=0, equal_nan=True)
            if watch is not None:
                watch(comm.rank, step, averager, local)
            models.append(vector)
        models.append(await averager.conclude(comm, vector, steps))
        return torch.stack(models)

    return torch.stack(simulate(program, world_size).results, dim=1)


def check_resumption(make, steps, reload_at, **options):
    """Check that a run from a saved state continues bit for bit."""
    through = on_all_ranks(make, steps, **options)
    assert torch.equal(on_all_ranks(make, steps, reload_at=reload_at, **options), through)


def through_a_file(value):
    """Save and load a value as a user would."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)
