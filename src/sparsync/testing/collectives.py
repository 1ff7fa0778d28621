"""The contract of a collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from sparsync.collectives.base import Collective, Reduced
from sparsync.selection import Everything, Exact, Selector
from sparsync.sparse import SparseVector
from sparsync.testing.cases import STEPS, WORLD_SIZES, cases, digest, within
from sparsync.transports.communicator import Communicator
from sparsync.transports.sim import simulate

__all__ = ["check_collective", "exercise_collective"]


def check_collective(
    make: Callable[[], Collective],
    *,
    rounding: bool = False,
    world_sizes: Sequence[int] = WORLD_SIZES,
) -> None:
    """Check a collective on the simulator, for every case and world size.

    Its ``order`` says whether sums are checked bit for bit, its ``result`` whether it gets whole vectors.

    Args:
        make: builds one collective; called once per rank and case.
        rounding: what its codec rounds away is delivered by nobody: sums are checked to rounding.
        world_sizes: the numbers of virtual ranks.

    Example:
        >>> from sparsync.collectives import Allgather
        >>> check_collective(Allgather, world_sizes=(1, 3))
    """
    for world_size in world_sizes:

        async def program(comm: Communicator) -> list[str]:
            return await exercise_collective(comm, make, rounding=rounding)

        digests = simulate(program, world_size).results
        assert all(d == digests[0] for d in digests), f"P = {world_size}: totals differ"


async def exercise_collective(
    comm: Communicator,
    make: Callable[[], Collective],
    *,
    rounding: bool = False,
) -> list[str]:
    """Run every case on this rank and check it; return one digest of the total per case and step."""
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
            await _check_law(comm, reduced, where, exact)
            digests.append(digest(reduced.total))
    return digests


async def _check_law(comm: Communicator, reduced: Reduced, where: str, exact: bool) -> None:
    """Check ``sum over ranks(delivered) == total`` and that all ranks have the same total."""
    total = reduced.total.to_dense()
    if isinstance(reduced.total, SparseVector):
        reduced.total.check()
    lost = torch.zeros_like(total) if reduced.lost is None else reduced.lost.to_dense()
    mine = torch.stack([total, reduced.delivered.to_dense(), lost])
    totals, shares, losses = torch.stack(await comm.allgather(mine, "verify")).unbind(1)
    assert all(torch.equal(other, total) for other in totals), (
        f"{where}: totals differ between ranks"
    )
    summed = torch.zeros_like(total)
    for share, loss in zip(shares, losses, strict=True):
        summed = summed + (share - loss)
    if exact:
        assert torch.equal(summed, total), (
            f"{where}: the total is not the sum of what was delivered"
        )
    else:
        scale = shares.abs().sum(0) + losses.abs().sum(0)
        assert within(summed - total, scale, comm.world_size), f"{where}: the sum is off"
