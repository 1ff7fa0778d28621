"""gTop-k: a reduction tree that keeps the k largest entries after every merge, then a broadcast."""

from __future__ import annotations

from typing import final

from sparsync.collectives.collective import Collective, Reduced, capped, cut, less, rounded_off
from sparsync.collectives.costs import Cost, Job, Result
from sparsync.sparse import SparseVector, Vector
from sparsync.transports.communicator import Communicator
from sparsync.wire.codec import Codec, MessageFraming, decode_as
from sparsync.wire.coo import Coo

__all__ = ["GTopk"]


@final
class GTopk(Collective):
    """Sums along a binomial tree to rank 0, keeping k entries after every merge; broadcasts the result.

    In the round with distance d, rank r + d passes its partial sum to rank r, for all r divisible by 2 d;
    the broadcast takes the reverse path.  The lower ranks' sum is the left operand.  Of every merged sum,
    only the k largest entries are kept, so the result need not contain the k largest entries of the whole
    sum.  Entries that a rank drops, and the rounding errors of its message, stay in its residual, even at
    indices that it had not selected.  A lossy codec must therefore be contractive.

    Args:
        codec: wire format of both trees (default: coo, as in the paper).

    Cost: 2 ceil(log2 P) sequential messages, and 4 k ceil(log2 P) words through the port of rank 0, the
    busiest rank; half of each is sent and half received.   State: none.
    Differs from the paper: P need not be a power of two; values are sent in their own dtype; an entry
    that is dropped stays in the residual of the rank that drops it.  The paper returns it to the ranks
    that had selected it, but then entries that cancel are lost.

    Example:
        >>> import torch; from sparsync.transports.sim import simulate
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
        """Return ``2 log2 P`` sequential messages with ``4 k log2 P`` words (Ok-Topk, Table 1).

        The root receives in the first half and sends in the second, so no rank sends or receives more
        than half of these words.  In each round, one of two ranks encodes and the other decodes.

        Example:
            >>> GTopk().cost(Job(10**6, k=1000, world_size=8)).words
            6006.0
        """
        rounds = job.rounds
        half = rounds * self.codec.nbytes(round(job.k), job.size)
        entries = (rounds + 1) * job.k
        return Cost(2 * rounds, half, half, entries, entries, turns=2 * rounds)

    def promised_words(self, job: Job, *, exchangeable: bool) -> float | None:
        """Return the words of ``cost``, which do not depend on the entries that ranks select."""
        return self.cost(job).words

    async def reduce(self, comm: Communicator, selected: Vector, k: int, step: int) -> Reduced:
        """Add the children's sums in rank order, pass the sum to the parent, then broadcast."""
        mine = capped(selected, k, 1.0)
        if comm.world_size == 1:
            return Reduced(mine, mine)
        codec, rank, size = self.codec.seeded(comm.rank, step), comm.rank, mine.size
        framing, device = MessageFraming(codec), mine.values.device
        capacity = codec.nbytes(min(k, size), size, mine.values.dtype)
        # the lowest set bit of a rank is the distance to its parent; lower bits lead to its children
        reach = rank & -rank or 1 << (comm.world_size - 1).bit_length()  # distance to the parent
        distances = (1 << i for i in range(reach.bit_length() - 1))
        children = [rank + d for d in distances if rank + d < comm.world_size]
        total, dropped = mine, []
        # the order from the nearest child to the farthest is rank order, so the lower ranks' sum is on
        # the left
        for child in children:
            message = await comm.irecv(child, capacity, "reduce", framing)
            theirs = decode_as(codec, message, size, mine.values.dtype).to(device)
            await comm.work(message.numel())
            total, rest = cut(SparseVector.merge([total, theirs]), k)
            dropped.append(rest)
        encoded = codec.encode(total)
        dropped.append(rounded_off(total, encoded.decoded))
        payload, total = encoded.payload, encoded.decoded
        if rank:
            await comm.isend(payload, rank - reach, "reduce", framing)
            payload = await comm.irecv(rank - reach, capacity, "broadcast", framing)
        # the child with the most descendants comes first, because its subtree needs the most rounds
        sending = [comm.isend(payload, child, "broadcast", framing) for child in children[::-1]]
        if rank:
            total = decode_as(codec, payload, size, mine.values.dtype).to(device)
        for operation in sending:
            await operation
        return Reduced(total, less(mine, dropped))
