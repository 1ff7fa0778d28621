"""Ring: reduce-scatter and allgather between neighbours, sparse or dense (SparCML's ring baselines)."""

from __future__ import annotations

from itertools import pairwise
from typing import final

from sparsync.collectives.base import Collective, Reduced
from sparsync.collectives.exchange import Exchange, Terms, allgather_regions
from sparsync.collectives.regions import even_boundaries
from sparsync.errors import ConfigurationError
from sparsync.operations import Reduction
from sparsync.sparse import DenseVector, SparseVector, Vector
from sparsync.transports.base import Communicator
from sparsync.wire.streams import StreamCodec

__all__ = ["Ring"]


@final
class Ring(Collective):
    """Pass partial sums of P even regions around a ring, then the sums.

    Region r starts at rank r + 1 and ends, after P - 1 hops, at its owner r: the order of its operands
    is fixed by P.

    Args:
        codec: wire format; whoever rounds keeps what that takes (default: coo, dense from where that
            is shorter).
        op: a name of ``sparsync.operations.OPERATIONS``, or a ``Reduction``; it must commute.
        cap: at most ``cap * k`` entries per rank are taken; None: all (needed where op is no sum).
            The dense ring takes all, whatever it is.
        dense: regions are dense from the start (the dense baseline).

    Cost: 2 (P - 1) messages; dense 2 (P - 1) / P N beta_d, sparse
    ``[2 (P - 1) / P k, (P - 1) k + k (P - 1) / 2] beta_s`` for supports that are spread evenly, from all
    equal to all disjoint (`costs.ring`).   State: none.
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

    def __init__(
        self,
        codec: StreamCodec | None = None,
        *,
        op: str | Reduction = "sum",
        cap: float | None = 1.0,
        dense: bool = False,
    ) -> None:
        self.terms = Terms.of("Ring", codec, op, None if dense else cap)
        self.dense = dense
        if not self.terms.operation.commutative:
            raise ConfigurationError(
                f"Ring: operation '{self.terms.operation.name}' does not commute, but a ring reduces "
                "in rotated order; use RecursiveDoubling, SplitAllgather or Dynamic"
            )

    async def reduce(self, comm: Communicator, selected: Vector, k: int, step: int) -> Reduced:
        """Reduce-scatter, then allgather."""
        call = self._begin(comm, selected, k, step)
        if comm.world_size == 1:
            return call.reduced(call.mine)
        boundaries = even_boundaries(call.size, comm.world_size)
        region = await self._reduce_scatter(call, boundaries)
        widths = [stop - start for start, stop in pairwise(boundaries)]
        capacities = [self._capacity(call, comm.world_size, width) for width in widths]
        return call.reduced(
            await allgather_regions(call, region, boundaries, capacities, ring=True)
        )

    def _begin(self, comm: Communicator, selected: Vector, k: int, step: int) -> Exchange:
        if not self.dense:
            return Exchange.begin(comm, self.terms, selected, k, step)
        self.terms.check(selected.values.dtype)
        return Exchange(comm, self.terms, selected, selected.size, step)

    async def _reduce_scatter(self, call: Exchange, boundaries: list[int]) -> Vector:
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
            capacity = self._capacity(call, hop + 1, width)
            receiving = comm.irecv(last, capacity, "reduce-scatter", framing)
            sending = comm.isend(payload, following, "reduce-scatter", framing)
            message = await receiving
            await sending
            theirs = call.decode(message, width)
            await comm.work(message.numel(), dense=isinstance(theirs, DenseVector))
            partial = call.combine(theirs, pieces[coming])
        return partial

    def _pieces(self, call: Exchange, boundaries: list[int]) -> list[Vector]:
        if self.dense:
            values = call.densify(call.mine).values
            return [DenseVector(values[start:stop]) for start, stop in pairwise(boundaries)]
        assert isinstance(call.mine, SparseVector)
        return [call.settle(piece) for piece in call.mine.split(boundaries)]

    def _capacity(self, call: Exchange, ranks: int, width: int) -> int:
        if self.dense:
            return call.codec.dense.nbytes(width, call.dtype)
        return call.capacity(ranks, width)
