"""Contract checks for a collective, and for whole steps of selector, collective and residual."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparsync.algorithm import Algorithm
from sparsync.collectives.collective import Collective, Reduced
from sparsync.errors import NonFiniteGradientError
from sparsync.feedback.reducer import Reducer
from sparsync.selection import Everything, Exact, Selector
from sparsync.sparse import SparseVector
from sparsync.testing.cases import STEPS, WORLD_SIZES, Case, cases, digest, noise, same, within
from sparsync.transports.communicator import Communicator
from sparsync.transports.sim import simulate
from sparsync.units import Slot, Unit

__all__ = ["check_algorithm", "check_collective", "exercise_algorithm", "exercise_collective"]


def check_collective(
    make: Callable[[], Collective],
    *,
    rounding: bool = False,
    world_sizes: Sequence[int] = WORLD_SIZES,
) -> None:
    """Check a collective on the simulator, for every case and world size.

    The collective's ``order`` determines whether sums are checked bit for bit, and its ``result``
    determines whether it gets whole vectors.  Pass ``rounding=True`` if the collective's codec rounds;
    sums are then checked only up to rounding errors.

    Example:
        >>> from sparsync.collectives import Allgather
        >>> check_collective(Allgather, world_sizes=(1, 3))
    """
    _on_virtual_ranks(lambda comm: exercise_collective(comm, make, rounding=rounding), world_sizes)


def check_algorithm(algorithm: Algorithm, *, world_sizes: Sequence[int] = WORLD_SIZES) -> None:
    """Check the conservation law of whole steps: selector, collective and residuals together.

    Example:
        >>> from sparsync.presets import resolve
        >>> check_algorithm(resolve("allgather"), world_sizes=(2,))
    """
    _on_virtual_ranks(lambda comm: exercise_algorithm(comm, algorithm), world_sizes)


def _on_virtual_ranks(
    exercise: Callable[[Communicator], Coroutine[Any, Any, list[str]]], world_sizes: Sequence[int]
) -> None:
    for world_size in world_sizes:
        digests = simulate(exercise, world_size).results
        assert all(d == digests[0] for d in digests), f"P = {world_size}: totals differ"


# ---- collectives ------------------------------------------------------------------------------------


async def exercise_collective(
    comm: Communicator,
    make: Callable[[], Collective],
    *,
    rounding: bool = False,
) -> list[str]:
    """Run and check every case on this rank; return one digest of the total per case and step."""
    digests = []
    selector: Selector = Everything() if make().result == "whole" else Exact()
    wide = [replace(case, dtype=torch.float64) for case in cases()[:2]]
    for case in [*cases(), *wide]:
        collective = make()
        for step in range(STEPS):
            where = f"P = {comm.world_size}, case '{case.name}', {case.dtype}, step {step}"
            accumulated = case.make(comm.rank, comm.world_size, step).to(case.dtype)
            selected = selector.select(accumulated, case.k, step)
            before = selected.to_dense().clone()
            reduced = await collective.reduce(comm, selected, case.k, step)
            assert torch.equal(selected.to_dense(), before), f"{where}: the input was modified"
            exact = not rounding and (collective.order == "rank" or case.exact)
            await _check_law(comm, reduced, before, where, exact)
            digests.append(digest(reduced.total))
    return digests


async def _check_law(
    comm: Communicator, reduced: Reduced, selected: Tensor, where: str, exact: bool
) -> None:
    """Check that ``sum over ranks(delivered) == total``, and that all ranks have the same total."""
    total = reduced.total.to_dense()
    if isinstance(reduced.total, SparseVector):
        reduced.total.check()
    lost = torch.zeros_like(total) if reduced.lost is None else reduced.lost.to_dense()
    mine = torch.stack([total, reduced.delivered.to_dense(), lost, selected.abs()])
    totals, shares, losses, given = torch.stack(await comm.allgather(mine, "verify")).unbind(1)
    assert all(torch.equal(other, total) for other in totals), (
        f"{where}: totals differ between ranks"
    )
    summed = torch.zeros_like(total)
    for share, loss in zip(shares, losses, strict=True):
        summed = summed + (share - loss)
    if exact:
        assert torch.equal(summed, total), (
            f"{where}: the total is not the sum of the delivered vectors"
        )
    else:
        # a codec may round most of an entry away, so the tolerance is relative to the whole entry
        scale = shares.abs().maximum(given).sum(0) + losses.abs().sum(0)
        assert within(summed - total, scale, comm.world_size), f"{where}: the sum is off"


# ---- whole steps ------------------------------------------------------------------------------------


async def exercise_algorithm(comm: Communicator, algorithm: Algorithm) -> list[str]:
    """Run every case through a ``Reducer`` on this rank; return one digest per case and step."""
    digests = []
    for case in cases():
        reducer = _reducer(comm, algorithm, case, case.k / case.size if case.size else 1.0)
        for step in range(STEPS):
            where = f"{algorithm.name}, P = {comm.world_size}, case '{case.name}', step {step}"
            gradient = case.make(comm.rank, comm.world_size, step)
            digests.append(await _check_step(comm, reducer, gradient, where))
    # the smaller density gives k = 1; even then, a NaN must not be cut off by any cap
    for density in (0.1, 0.001):
        await _check_refusal(comm, algorithm, density)
    return digests


def _reducer(comm: Communicator, algorithm: Algorithm, case: Case, density: float) -> Reducer:
    unit = Unit((Slot("w", 0, case.size),), torch.float32, torch.device("cpu"))
    return Reducer(comm, [unit], algorithm, density)


async def _check_step(comm: Communicator, reducer: Reducer, gradient: Tensor, where: str) -> str:
    """Check that ``sum(accumulated) == total + sum(residual)`` over one step."""
    kept = reducer.residuals[0]
    before = torch.zeros_like(gradient) if kept.value is None else kept.value.clone()
    buffer = gradient.clone()
    (average,) = await reducer.reduce([buffer])
    assert torch.equal(buffer, average.to_dense()), f"{where}: the gradient is not its average"
    after = torch.zeros_like(gradient) if kept.value is None else kept.value.clone()
    lost = torch.zeros_like(gradient)  # the law includes parts that are neither delivered nor kept
    for vector in reducer.lost:
        lost = lost + vector.to_dense()
    mine = torch.stack([before + gradient, after, lost])
    accumulated, residuals, losses = torch.stack(await comm.allgather(mine, "verify")).unbind(1)
    world_size = comm.world_size
    divisor = world_size if reducer.algorithm.average else 1
    left = accumulated.double().sum(0)
    total = average.to_dense().double() * divisor
    right = total + residuals.double().sum(0) + losses.double().sum(0)
    # a codec may deliver more than an entry, e.g. a mean; the residual's rounding error is then relative
    # to the delivered value
    scale = accumulated.abs().maximum(residuals.abs()).sum(0) + losses.double().abs().sum(0)
    # + 1, because dividing by P for the average adds a rounding that ``within`` does not include
    assert within(left - right, scale, world_size + 1), f"{where}: mass appeared or was lost"
    return digest(average)


async def _check_refusal(comm: Communicator, algorithm: Algorithm, density: float) -> None:
    """Check that all ranks refuse a step if one has a NaN, and that later steps are not affected."""
    case = Case("noise", 499, 40, noise)
    broken, untouched = (_reducer(comm, algorithm, case, density) for _ in range(2))
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
