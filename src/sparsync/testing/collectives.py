"""The contract of a collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from sparsync.collectives.base import Collective, Reduced
from sparsync.selection import Everything, Exact, Selector
from sparsync.sparse import SparseVector
from sparsync.testing.cases import STEPS, WORLD_SIZES, cases, digest, within
from sparsync.transports.base import Communicator
from sparsync.transports.sim import simulate

__all__ = ["check_collective", "exercise_collective"]


def check_collective(
    make: Callable[[], Collective],
    *,
    dense: bool = False,
    rank_ordered: bool = True,
    rounding: bool = False,
    world_sizes: Sequence[int] = WORLD_SIZES,
) -> None:
    """Check a collective on the simulator, for every case and world size.

    Args:
        make: builds one collective; called once per rank and case.
        dense: it takes dense vectors.
        rank_ordered: its sums are left folds in rank order, so they can be checked bit for bit.
        rounding: what its codec rounds away is delivered by nobody: sums are checked to rounding.
        world_sizes: the numbers of virtual ranks.

    Example:
        >>> from sparsync.collectives import Allgather
        >>> check_collective(Allgather, world_sizes=(1, 3))
    """
    for world_size in world_sizes:

        async def program(comm: Communicator) -> list[str]:
            return await exercise_collective(
                comm, make, dense=dense, rank_ordered=rank_ordered, rounding=rounding
            )

        digests = simulate(program, world_size).results
        assert all(d == digests[0] for d in digests), f"P = {world_size}: totals differ"


async def exercise_collective(
    comm: Communicator,
    make: Callable[[], Collective],
    *,
    dense: bool = False,
    rank_ordered: bool = True,
    rounding: bool = False,
) -> list[str]:
    """Run every case on this rank and check it; return one digest of the total per case and step."""
    digests = []
    selector: Selector = Everything() if dense else Exact()
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
            exact = not rounding and (rank_ordered or case.exact)
            await _check_law(comm, reduced, where, exact)
            digests.append(digest(reduced.total))
    return digests


async def _check_law(comm: Communicator, reduced: Reduced, where: str, exact: bool) -> None:
    """Check ``sum over ranks(delivered) == total`` and that all ranks have the same total."""
    total = reduced.total.to_dense()
    if isinstance(reduced.total, SparseVector):
        reduced.total.check()
    for theirs in await comm.allgather(total.clone(), "verify"):
        assert torch.equal(theirs, total), f"{where}: totals differ between ranks"
    shares = await comm.allgather(reduced.delivered.to_dense().clone(), "verify")
    lost = torch.zeros_like(total) if reduced.lost is None else reduced.lost.to_dense()
    losses = await comm.allgather(lost, "verify")
    summed = torch.zeros_like(total)
    for share, loss in zip(shares, losses, strict=True):
        summed = summed + (share - loss)
    if exact:
        assert torch.equal(summed, total), (
            f"{where}: the total is not the sum of what was delivered"
        )
    else:
        scale = torch.stack([*shares, *losses]).abs().sum(0)
        assert within(summed - total, scale, comm.world_size), f"{where}: the sum is off"
