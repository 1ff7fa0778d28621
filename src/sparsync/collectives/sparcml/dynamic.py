"""Dynamic: split, then gather each region as sparse or dense as its sum is (DSAR, "TopkDSA")."""

from __future__ import annotations

from itertools import pairwise
from typing import final

import torch

from sparsync.collectives.base import Collective, Reduced
from sparsync.collectives.costs import WORD_BYTES, Cost, Job
from sparsync.collectives.oktopk.regions import even_boundaries
from sparsync.collectives.sparcml.exchange import (
    allgather_regions,
    begin,
    checked,
    split_and_fold,
    split_cost,
)
from sparsync.errors import ConfigurationError
from sparsync.reduction import Reduction
from sparsync.sparse import SparseVector, Vector
from sparsync.transports.communicator import Communicator
from sparsync.wire.base import HEADER_BYTES, Codec
from sparsync.wire.streams import StreamCodec

__all__ = ["Dynamic"]


@final
class Dynamic(Collective):
    """Send each even region's entries to its owner, who folds them; allgather what that gives.

    A region travels sparse as long as its reduced entries are within the codec's limit, dense from
    then on; its header says which.  The total is dense if any region was.

    Args:
        codec: wire format; its dense part may quantise (``StreamCodec(dense=...)``).  What it rounds
            off an entry is kept by the sender, what it rounds off a reduced one by the owner.
            Default: coo, dense from where that is shorter.
        op: a name of ``sparsync.reduction.OPERATIONS``, or a ``Reduction``.
        cap: at most ``cap * k`` entries per rank are taken; None: all (needed where op is no sum).
        always_dense: regions travel dense, however few their entries (as published).
        local: codec of what ranks send to owners, which rounds the own share as well (SparCML's
            Algorithm 1, Q).  Default: that of the rest.
        keep_error: what ``local`` rounds away is kept by the sender; False: it is lost, as published.

    Cost: P - 1 + ceil(log2 P) messages.  Dense:
    ``L2 + (P - 1) / P N beta_d <= T <= L2 + k beta_s + (P - 1) / P N beta_d`` with
    ``L2 = (P - 1) alpha + log2(P) alpha``; sparse: that of ``SplitAllgather``.
    State: none.
    Differs from the paper: regions stay sparse where that is shorter; left folds in rank order; any
    P.  With one rank nothing travels, and the total stays sparse.

    Example:
        >>> import torch; from sparsync import DenseVector; from sparsync.transports.sim import simulate
        >>> async def program(comm):
        ...     mine = DenseVector(torch.eye(4)[comm.rank])
        ...     return (await Dynamic(always_dense=True).reduce(comm, mine, k=1, step=0)).total
        >>> simulate(program, world_size=3).results[2]
        DenseVector(values=tensor([1., 1., 1., 0.]))

    References: Renggli et al., SparCML, SC 2019, section 5.3.3 ("DSAR_Split_allgather"); Li &
    Hoefler, Ok-Topk, PPoPP 2022, Table 1 ("TopkDSA").
    """

    def __init__(
        self,
        codec: StreamCodec | None = None,
        *,
        op: str | Reduction = "sum",
        cap: float | None = 1.0,
        always_dense: bool = False,
        local: Codec[SparseVector] | None = None,
        keep_error: bool = True,
    ) -> None:
        self.codec, self.operation = checked("Dynamic", codec, op, cap)
        self.cap = cap
        if local is not None and self.operation.name != "sum":
            raise ConfigurationError(
                f"Dynamic: local={local!r} rounds, as only sums may be, not '{self.operation.name}'; "
                "omit it"
            )
        self.always_dense, self.keep_error = always_dense, keep_error
        self.local = None if local is None else StreamCodec(local, factor=None)

    def cost(self, job: Job) -> Cost:
        """Return ``SplitAllgather``'s cost where the sum stays sparse; else its second half is dense.

        Dense: ``n (P - 1) / P`` to ``2 k + n (P - 1) / P`` words (section 5.3.3).

        Example:
            >>> cost = Dynamic().cost(Job(10**6, 100_000, 8, result=800_000))
            >>> cost.words < 2 * 100_000 + 10**6 * 7 / 8
            True
        """
        local = None if self.local is None else self.local.sparse
        limit = self.codec.limit(job.size, torch.float32)
        if not self.always_dense and (limit is None or job.summed <= limit):
            return split_cost(job, local)
        whole = self.codec.dense.nbytes(job.size, job.size) - HEADER_BYTES
        placed = WORD_BYTES * job.size * job.share
        return split_cost(job, local, dense=whole) + Cost(0, 0, dense_bytes=placed)

    async def reduce(self, comm: Communicator, selected: Vector, k: int, step: int) -> Reduced:
        """Split, fold, choose the form, allgather."""
        call = begin(comm, self, selected, k, step)
        if comm.world_size == 1:
            return call.reduced(call.mine)
        boundaries = even_boundaries(call.size, comm.world_size)
        region = await split_and_fold(call, boundaries, self.local, keep_error=self.keep_error)
        region = call.densify(region) if self.always_dense else call.settle(region)
        widths = [stop - start for start, stop in pairwise(boundaries)]
        if self.always_dense:
            capacities = [call.codec.dense.nbytes(width, width, call.dtype) for width in widths]
        else:
            capacities = [call.capacity(comm.world_size, width) for width in widths]
        return call.reduced(await allgather_regions(call, region, boundaries, capacities))
