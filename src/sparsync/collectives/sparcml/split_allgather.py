"""Split and allgather: half of the volume, for large data (SparCML's SSAR_Split_allgather)."""

from __future__ import annotations

from itertools import pairwise
from typing import final

from sparsync.collectives.base import Collective, Reduced
from sparsync.collectives.costs import Cost, Job
from sparsync.collectives.oktopk.regions import even_boundaries
from sparsync.collectives.sparcml.exchange import (
    allgather_regions,
    begin,
    checked,
    split_and_fold,
    split_cost,
)
from sparsync.reduction import Reduction
from sparsync.sparse import Vector
from sparsync.transports.communicator import Communicator
from sparsync.wire.streams import StreamCodec

__all__ = ["SplitAllgather"]


@final
class SplitAllgather(Collective):
    """Send each even region's entries to its owner, who folds them; allgather the regions, sparse.

    Args:
        codec: wire format; only its sparse part is used.  What it rounds off an entry is kept by the
            sender, what it rounds off a reduced one by the owner (default: coo).
        op: a name of ``sparsync.reduction.OPERATIONS``, or a ``Reduction``.
        cap: at most ``cap * k`` entries per rank are taken; None: all (needed where op is no sum).

    Cost: P - 1 + ceil(log2 P) messages;
    ``L2 + 2 (P - 1) / P k beta_s <= T <= L2 + P k beta_s`` with ``L2 = (P - 1) alpha + L1``, received:
    from supports equal and spread evenly to disjoint ones, each in one region.  The
    dissemination sends a region that is much larger than the others up
    to ceil(log2 P) times.   State: none.
    Differs from the paper: left folds in rank order, not in that of arrival; any P; regions differ
    by one element at most.

    Example:
        >>> import torch; from sparsync import DenseVector; from sparsync.transports.sim import simulate
        >>> async def program(comm):
        ...     mine = DenseVector(torch.tensor([1.0, 2.0, 0.0, 1.0]))
        ...     collective = SplitAllgather(op="prod", cap=None)
        ...     return (await collective.reduce(comm, mine, k=4, step=0)).total.to_dense(1).tolist()
        >>> simulate(program, world_size=3).results[2]
        [1.0, 8.0, 0.0, 1.0]

    References: Renggli et al., SparCML, SC 2019, section 5.3.2.
    """

    def __init__(
        self,
        codec: StreamCodec | None = None,
        *,
        op: str | Reduction = "sum",
        cap: float | None = 1.0,
    ) -> None:
        always_sparse = StreamCodec(codec.sparse if codec else None, factor=None)
        self.codec, self.operation = checked("SplitAllgather", always_sparse, op, cap)
        self.cap = cap

    def cost(self, job: Job) -> Cost:
        """Return ``P - 1 + log2 P`` messages, entries spread evenly over the regions (section 5.3.2).

        Example:
            >>> job = Job(10**6, 1000, 8, result=1000)
            >>> SplitAllgather().cost(job).words  # 4 k (P - 1) / P, and 14 headers
            3528.0
        """
        return split_cost(job)

    async def reduce(self, comm: Communicator, selected: Vector, k: int, step: int) -> Reduced:
        """Split, fold, allgather."""
        call = begin(comm, self, selected, k, step)
        if comm.world_size == 1:
            return call.reduced(call.mine)
        boundaries = even_boundaries(call.size, comm.world_size)
        region = await split_and_fold(call, boundaries)
        widths = [stop - start for start, stop in pairwise(boundaries)]
        capacities = [call.capacity(comm.world_size, width) for width in widths]
        return call.reduced(await allgather_regions(call, region, boundaries, capacities))
