"""gTop-k: a reduction tree that selects again after every merge, then a broadcast tree."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.collectives.base import Collective, Reduced, capped
from sparsync.collectives.costs import Cost, Job, Result
from sparsync.sparse import SparseVector, Vector
from sparsync.transports.communicator import Communicator
from sparsync.transports.driver import Operation
from sparsync.wire.base import Codec, MessageFraming
from sparsync.wire.coo import Coo

__all__ = ["GTopk"]


@final
class GTopk(Collective):
    """Sum along a binomial tree to rank 0, keeping the k largest of every merged pair; broadcast them.

    In the round with distance d, rank r + d passes what it has to rank r, for all r that 2 d divides;
    the broadcast goes the same way back.  The lower ranks' share is the left operand.  The k largest
    of a pair need not be those of the sum: what a rank drops, and what the codec rounds away from its
    message, stays in its residual, also where it had selected nothing.  A codec that rounds must
    therefore be contractive.

    Args:
        codec: wire format of both trees (default: coo, as in the paper).

    Cost: 2 ceil(log2 P) messages, one after the other, and 4 k ceil(log2 P) words through the port of
    rank 0, the busiest, half of each in and half out.   State: none.
    Differs from the paper: P need not be a power of two; values travel in their dtype; dropped sums
    are kept by the rank that dropped them, so that none is lost or counted twice.

    Example:
        >>> from sparsync.transports.sim import simulate
        >>> async def program(comm):
        ...     mine = SparseVector.from_dense(torch.tensor([0.0, 1.0, 0.0, comm.rank + 2.0]))
        ...     return (await GTopk().reduce(comm, mine, k=1, step=0)).total.to_dense().tolist()
        >>> simulate(program, world_size=3).results[2]
        [0.0, 0.0, 0.0, 9.0]

    References: Shi et al., "A distributed synchronous SGD algorithm with global top-k sparsification for
    low bandwidth networks", ICDCS 2019; Ok-Topk, Table 1, "gTopk".
    """

    result: Result = "top-k"
    order = "tree"

    def __init__(self, codec: Codec[SparseVector] | None = None) -> None:
        self.codec = codec or Coo()

    def cost(self, job: Job) -> Cost:
        """Return ``2 log2 P`` messages in sequence, ``4 k log2 P`` words (Ok-Topk, Table 1).

        The root receives the first half and sends the second: no rank sends or receives more than half
        of the words that pass in sequence.  Of each round's two ranks one encodes, the other decodes.

        Example:
            >>> GTopk().cost(Job(10**6, k=1000, world_size=8)).words
            6006.0
        """
        rounds = job.rounds
        half = rounds * self.codec.nbytes(round(job.k), job.size)
        entries = (rounds + 1) * job.k
        return Cost(2 * rounds, half, half, entries, entries, turns=2 * rounds)

    def promised_words(self, job: Job, *, exchangeable: bool) -> float | None:
        """Return its cost, which the supports do not change."""
        return self.cost(job).words

    async def reduce(self, comm: Communicator, selected: Vector, k: int, step: int) -> Reduced:
        """Reduce to rank 0, then broadcast."""
        mine = capped(selected, k, 1.0)
        if comm.world_size == 1:
            return Reduced(mine, mine)
        tree = _Tree(comm, self.codec.seeded(comm.rank, step), mine, k)
        await tree.reduce()
        total = await tree.broadcast()
        return Reduced(total, tree.delivered())


class _Tree:
    """One call: the sum so far, and what this rank dropped.

    ``reach`` is the distance to the parent; children are at the smaller powers of two.
    """

    def __init__(
        self, comm: Communicator, codec: Codec[SparseVector], mine: SparseVector, k: int
    ) -> None:
        self.comm, self.codec, self.mine, self.k = comm, codec, mine, k
        self.sum, self.dropped = mine, list[SparseVector]()
        self.framing = MessageFraming(codec)
        self.capacity = codec.nbytes(min(k, mine.size), mine.size, mine.values.dtype)
        rank, world_size = comm.rank, comm.world_size
        self.reach = rank & -rank or 1 << (world_size - 1).bit_length()
        powers = (1 << i for i in range(self.reach.bit_length() - 1))
        self.children = [rank + d for d in powers if rank + d < world_size]

    async def reduce(self) -> None:
        """Add the children's sums in rank order, then pass the sum on to the parent."""
        comm = self.comm
        for child in self.children:
            payload = await comm.irecv(child, self.capacity, "reduce", self.framing)
            theirs = self._decoded(payload)
            await comm.work(payload.numel())
            self.sum = self._largest(SparseVector.merge([self.sum, theirs]))
        if comm.rank:
            payload = self._encoded()
            await comm.isend(payload, comm.rank - self.reach, "reduce", self.framing)

    async def broadcast(self) -> SparseVector:
        """Pass rank 0's message on, to the child with the most descendants first; return the total."""
        comm, phase = self.comm, "broadcast"
        if comm.rank:
            parent = comm.rank - self.reach
            payload = await comm.irecv(parent, self.capacity, phase, self.framing)
        else:
            payload = self._encoded()
        sending: list[Operation] = [
            comm.isend(payload, child, phase, self.framing) for child in reversed(self.children)
        ]
        total = self._decoded(payload) if comm.rank else self.sum
        for operation in sending:
            await operation
        return total

    def delivered(self) -> SparseVector:
        """Return what was selected less what was dropped or rounded away here."""
        return SparseVector.merge([self.mine, *self.dropped])

    def _encoded(self) -> Tensor:
        """Encode the sum, which becomes what the receivers see; note what rounding took."""
        encoded = self.codec.encode(self.sum)
        error = self.sum.values - encoded.decoded.values
        rounded = (error != 0).nonzero().flatten()
        self._drop(self.sum.indices[rounded], error[rounded])
        self.sum = encoded.decoded
        return encoded.payload

    def _decoded(self, payload: Tensor) -> SparseVector:
        return self.codec.decode(payload, self.mine.size).to(self.mine.values.device)

    def _largest(self, merged: SparseVector) -> SparseVector:
        """Cut a merged pair to the k largest; note the rest as dropped."""
        if merged.nnz <= self.k:
            return merged
        positions = kernels.top(merged.values, self.k)
        left = torch.ones(merged.nnz, dtype=torch.bool, device=positions.device)
        left[positions] = False
        self._drop(merged.indices[left], merged.values[left])
        return merged.keep(positions)

    def _drop(self, indices: Tensor, values: Tensor) -> None:
        """Note entries that this rank keeps."""
        if indices.numel():
            self.dropped.append(SparseVector(indices, -values, self.mine.size))
