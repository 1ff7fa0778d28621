"""The contract of a whole step: selector, collective and residual together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsync.errors import NonFiniteGradientError
from sparsync.feedback.reducer import Reducer
from sparsync.presets import Algorithm
from sparsync.testing.cases import STEPS, WORLD_SIZES, Case, cases, digest, noise, same, within
from sparsync.transports.communicator import Communicator
from sparsync.transports.sim import simulate
from sparsync.units import Slot, Unit

__all__ = ["check_algorithm", "exercise_algorithm"]


def check_algorithm(algorithm: Algorithm, *, world_sizes: Sequence[int] = WORLD_SIZES) -> None:
    """Check the law of a whole step, residuals included, per step: selector and collective together.

    Example:
        >>> from sparsync.presets import resolve
        >>> check_algorithm(resolve("allgather"), world_sizes=(2,))
    """
    for world_size in world_sizes:

        async def program(comm: Communicator) -> list[str]:
            return await exercise_algorithm(comm, algorithm)

        digests = simulate(program, world_size).results
        assert all(d == digests[0] for d in digests), f"P = {world_size}: totals differ"


async def exercise_algorithm(comm: Communicator, algorithm: Algorithm) -> list[str]:
    """Run every case through a ``Reducer`` on this rank; return one digest per case and step."""
    digests = []
    for case in cases():
        unit = Unit((Slot("w", 0, case.size),), torch.float32, torch.device("cpu"))
        density = case.k / case.size if case.size else 1.0
        reducer = Reducer(comm, [unit], algorithm, density)
        for step in range(STEPS):
            where = f"{algorithm.name}, P = {comm.world_size}, case '{case.name}', step {step}"
            gradient = case.make(comm.rank, comm.world_size, step)
            digests.append(await _check_step(comm, reducer, gradient, where))
    await _check_refusal(comm, algorithm, density=0.1)
    await _check_refusal(comm, algorithm, density=0.001)  # k = 1: a NaN must survive every cap
    return digests


async def _check_step(comm: Communicator, reducer: Reducer, gradient: Tensor, where: str) -> str:
    """Check ``sum(accumulated) == total + sum(residual)`` over one step."""
    kept = reducer.residuals[0]
    before = torch.zeros_like(gradient) if kept.value is None else kept.value.clone()
    buffer = gradient.clone()
    (average,) = await reducer.reduce([buffer])
    assert torch.equal(buffer, average.to_dense()), f"{where}: the gradient is not its average"
    after = torch.zeros_like(gradient) if kept.value is None else kept.value.clone()
    lost = torch.zeros_like(gradient)  # it did not arrive, and nobody keeps it: the law counts it
    for vector in reducer.lost:
        lost = lost + vector.to_dense()
    mine = torch.stack([before + gradient, after, lost])
    gathered = torch.stack(await comm.allgather(mine, "verify"))
    accumulated, residuals, losses = gathered.unbind(1)
    world_size = comm.world_size
    divisor = world_size if reducer.algorithm.average else 1
    left = accumulated.double().sum(0)
    total = average.to_dense().double() * divisor
    right = total + residuals.double().sum(0) + losses.double().sum(0)
    # a codec may deliver more than an entry has (a mean): the residual's rounding is relative to it
    scale = accumulated.abs().maximum(residuals.abs()).sum(0) + losses.double().abs().sum(0)
    # one more rounding than in the law: the average was divided by P
    assert within(left - right, scale, world_size + 1), f"{where}: mass appeared or was lost"
    return digest(average)


async def _check_refusal(comm: Communicator, algorithm: Algorithm, density: float) -> None:
    """Check that NaN on one rank is refused by all and leaves no trace in what follows."""
    case = Case("noise", 499, 40, noise)
    unit = Unit((Slot("w", 0, case.size),), torch.float32, torch.device("cpu"))
    broken, untouched = (Reducer(comm, [unit], algorithm, density) for _ in range(2))
    for step in range(STEPS):
        gradient = case.make(comm.rank, comm.world_size, step)
        if step == 1:
            poisoned = gradient.clone()
            if comm.rank == comm.world_size - 1:
                poisoned[step] = float("nan")
            before = [part.state for part in (*broken.selectors, *broken.collectives)]
            try:
                await broken.reduce([poisoned])
            except NonFiniteGradientError as error:
                assert "'w'" in str(error), "the parameter is not named"
                broken.refuse()
                after = [part.state for part in (*broken.selectors, *broken.collectives)]
                assert after == before, f"{algorithm.name}: a refused step changed a state"
            else:
                raise AssertionError(f"{algorithm.name}: NaN on one rank was not refused by all")
        (one,) = await broken.reduce([gradient.clone()])
        (other,) = await untouched.reduce([gradient.clone()])
        assert same(one, other), f"{algorithm.name}: a refused step left a trace"
