"""Ring: reduce-scatter and allgather between neighbours, sparse or dense (SparCML's ring baselines)."""

from __future__ import annotations

from itertools import pairwise
from typing import final

from sparsync.collectives.costs import WORD_BYTES, Cost, Job, Result
from sparsync.collectives.oktopk.regions import even_boundaries
from sparsync.collectives.sparcml.exchange import (
    Call,
    StreamCollective,
    allgather_regions,
    stream_bytes,
    stream_work,
)
from sparsync.errors import ConfigurationError
from sparsync.reduction import Reduction
from sparsync.sparse import DenseVector, SparseVector, Vector
from sparsync.wire.base import HEADER_BYTES
from sparsync.wire.streams import StreamCodec

__all__ = ["Ring"]


@final
class Ring(StreamCollective):
    """Pass partial sums of P even regions around a ring, then the sums.

    Region r starts at rank r + 1 and ends, after P - 1 hops, at its owner r: the order of its operands
    is fixed by P.

    Args:
        codec: wire format; whoever rounds keeps what that takes (default: coo, dense from where that
            is shorter).
        op: as for ``StreamCollective``; it must commute.
        cap: likewise; the dense ring takes all, whatever it is.
        dense: regions are dense from the start (the dense baseline).

    Cost: 2 (P - 1) messages; dense 2 (P - 1) / P N beta_d, sparse
    ``[2 (P - 1) / P k, (P - 1) k + k (P - 1) / 2] beta_s`` for supports that are spread evenly, from all
    equal to all disjoint.   State: none.
    Differs from the paper: that only names its baselines; here with a dense switch, which turns a
    partial sum dense in mid-flight.

    Example:
        >>> import torch; from sparsync.transports.sim import simulate
        >>> async def program(comm):
        ...     mine = DenseVector(torch.full((3,), comm.rank + 1.0))
        ...     return (await Ring(dense=True).reduce(comm, mine, k=3, step=0)).total
        >>> simulate(program, world_size=4).results[0]
        DenseVector(values=tensor([10., 10., 10.]))

    References: Renggli et al., SparCML, SC 2019, section 8.1; Patarasuk & Yuan, "Bandwidth optimal
    all-reduce algorithms for clusters of workstations", 2009.
    """

    order = "tree"

    def __init__(
        self,
        codec: StreamCodec | None = None,
        *,
        op: str | Reduction = "sum",
        cap: float | None = 1.0,
        dense: bool = False,
    ) -> None:
        super().__init__(codec, op, None if dense else cap)
        self.dense = dense
        self.result: Result = "whole" if dense else "sum"
        if not self.operation.commutative:
            raise ConfigurationError(
                f"Ring: operation '{self.operation.name}' does not commute, but a ring reduces "
                "in rotated order; use RecursiveDoubling or Dynamic"
            )

    def cost(self, job: Job) -> Cost:
        """Return ``2 (P - 1)`` messages to the next rank, of partial sums of regions, then of sums.

        Dense: ``2 n (P - 1) / P`` words (section 8.1).  Else a block is dense from where that is shorter.

        Example:
            >>> Ring(dense=True).cost(Job(8_000, 8_000, 8)).words  # 14 blocks of 1000 words, headers
            14028.0
        """
        peers, blocks = job.world_size - 1, 2 * (job.world_size - 1)
        if self.dense:
            block = HEADER_BYTES + WORD_BYTES * (-(-job.size // job.world_size))
            added = WORD_BYTES * job.size * job.share
            return Cost(blocks, blocks * block, dense_bytes=added, turns=blocks)
        summed = [job.union(ranks) for ranks in range(1, job.world_size)] + [job.summed] * peers
        bodies = sum(stream_bytes(entries, job.size) - HEADER_BYTES for entries in summed)
        return stream_work(blocks, blocks * HEADER_BYTES + bodies / job.world_size)

    def promised_words(self, job: Job, *, exchangeable: bool) -> float | None:
        """Return the dense one's cost."""
        return self.cost(job).words if self.dense else None

    async def total(self, call: Call) -> Vector:
        """Reduce-scatter, then allgather."""
        boundaries = even_boundaries(call.size, call.comm.world_size)
        region = await self._reduce_scatter(call, boundaries)
        return await allgather_regions(call, region, boundaries, dense=self.dense, ring=True)

    async def _reduce_scatter(self, call: Call, boundaries: list[int]) -> Vector:
        """Return this rank's region, reduced: what arrives is the left operand, the own the right."""
        comm, framing = call.comm, call.framing
        pieces = self._pieces(call, boundaries)
        last, following = (comm.rank - 1) % comm.world_size, (comm.rank + 1) % comm.world_size
        partial = pieces[last]
        for hop in range(comm.world_size - 1):
            passing, coming = last - hop, last - hop - 1  # regions; negative ones count from P
            start = boundaries[passing % comm.world_size]
            payload = call.encode(partial, hop, start=start).payload
            width = pieces[coming].size
            capacity = call.capacity(hop + 1, width, dense=self.dense)
            receiving = comm.irecv(last, capacity, "reduce-scatter", framing)
            sending = comm.isend(payload, following, "reduce-scatter", framing)
            message = await receiving
            await sending
            theirs = call.decode(message, width)
            await comm.work(message.numel(), dense=isinstance(theirs, DenseVector))
            partial = call.combine(theirs, pieces[coming])
        return partial

    def _pieces(self, call: Call, boundaries: list[int]) -> list[Vector]:
        if self.dense:
            values = call.densify(call.mine).values
            return [DenseVector(values[start:stop]) for start, stop in pairwise(boundaries)]
        assert isinstance(call.mine, SparseVector)
        return [call.settle(piece) for piece in call.mine.split(boundaries)]
