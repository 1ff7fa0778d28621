"""Dense sums that leave out layers that never change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from sparsync.collectives.collective import Collective, Reduced
from sparsync.collectives.costs import Result
from sparsync.sparse import DenseVector, Vector
from sparsync.transports.communicator import Communicator

__all__ = ["Changing", "ChangingState"]


@dataclass(frozen=True)
class ChangingState:
    """The layers that have had a nonzero entry on at least one rank."""

    moving: tuple[int, ...] = ()


@final
class Changing(Collective):
    """Sums whole vectors, except for the layers that have been 0 on every rank so far.

    A layer is a buffer, or a parameter that is exchanged whole.  A rank sends the layers that have
    changed so far on any rank.  For every other layer, it sends only a flag: whether the layer has now
    changed on this rank.  All ranks see the sum of the flags, so they agree on the layers that a second
    round must deliver.  From then on, these layers are always sent.  A buffer may start to change on a
    single rank, after any number of exchanges; it is then delivered as if it had always been sent.
    Detecting such a buffer takes no extra round.

    Cost: as ``Dense`` for the layers that change, plus 4 or 8 bytes for every other layer.  A second
    allreduce is needed in the first exchange and whenever a layer starts to change.
    State: the layers that change, equal on all ranks.   Differs from the paper: there is no paper.

    Example:
        >>> from sparsync.transports.sim import simulate
        >>> async def program(comm):
        ...     mask_and_mean = DenseVector(torch.tensor([0.0, 0.0, comm.rank + 1.0]))
        ...     changing = Changing().for_layers([2, 1])
        ...     reduced = await changing.reduce(comm, mask_and_mean, k=3, step=0)
        ...     return reduced.total.to_dense().tolist(), changing.state.moving
        >>> simulate(program, world_size=2).results[0]
        ([0.0, 0.0, 3.0], (1,))
    """

    result: Result = "whole"
    order = "tree"

    def __init__(self, sizes: Sequence[int] = ()) -> None:
        self._sizes = list(sizes)
        self.state = ChangingState()

    def for_layers(self, sizes: Sequence[int]) -> Collective:
        """Return a collective for layers of these sizes."""
        return Changing(sizes)

    async def reduce(self, comm: Communicator, selected: Vector, k: int, step: int) -> Reduced:
        """Sum the layers that change on at least one rank; this rank's whole vector is delivered."""
        own, moved = selected.to_dense(), set(self.state.moving)
        numbers = range(len(self._sizes))
        still = [i for i in numbers if i not in moved]
        if not still:
            return Reduced(DenseVector(await comm.allreduce(own, "dense")), selected)
        # use new memory: this rank's vector must stay unchanged, because with ``elastic=`` the step may
        # be retried
        total = torch.zeros_like(own)
        parts, sums = (torch.split(flat, self._sizes) for flat in (own, total))
        # Sum flags rather than values, because changes on two ranks could cancel.  NaN counts as a
        # change: it must reach all ranks, so that they refuse the step.
        flags = torch.stack([parts[i].any() for i in still]).to(own.dtype)
        moving = [i for i in numbers if i in moved]
        changed, *values = await _sum(comm, [flags, *(parts[i] for i in moving)])
        # all ranks see the same sum of flags, so either all start a second allreduce or none does
        begun = [i for i, flag in zip(still, changed.tolist(), strict=True) if flag]
        if begun:
            values += await _sum(comm, [parts[i] for i in begun])
            self.state = ChangingState(tuple(sorted((*moving, *begun))))
        for i, summed in zip((*moving, *begun), values, strict=True):
            sums[i].copy_(summed)
        return Reduced(DenseVector(total), selected)


async def _sum(comm: Communicator, parts: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Sum several vectors over the ranks in one allreduce.

    Cost: one allreduce of their concatenation.
    """
    # ``in_place`` overwrites only the copy that ``cat`` makes, not the layers
    flat = await comm.allreduce(torch.cat(parts), "dense", in_place=True)
    return torch.split(flat, [part.numel() for part in parts])
