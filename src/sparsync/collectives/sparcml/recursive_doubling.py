"""Recursive doubling: the fewest rounds, for small data (SparCML's SSAR_Recursive_double)."""

from __future__ import annotations

from typing import final

from sparsync.collectives.costs import Cost, Job
from sparsync.collectives.sparcml.exchange import Call, StreamCollective, stream_bytes, stream_work
from sparsync.reduction import Reduction
from sparsync.sparse import DenseVector, Vector
from sparsync.wire.streams import StreamCodec

__all__ = ["RecursiveDoubling"]


@final
class RecursiveDoubling(StreamCollective):
    """Reduce in log2 P rounds; in round t ranks 2^(t-1) apart exchange all that they have reduced.

    Where P is not a power of two, ``P - 2^m`` ranks first hand their vector to the rank below, and
    get the result in the end.  So a group that holds the same partial result is always a run of
    consecutive ranks, and each merge is (lower ranks) op (higher ranks): partners compute the same
    bits, and operations need not commute.  A partial result that may have more entries than the
    codec's limit turns dense in mid-flight.

    Args:
        codec: wire format; what it rounds off a partial result is kept by the lowest rank that
            holds that (default: coo, dense from where that is shorter).
        op: as for ``StreamCollective``.
        cap: likewise.

    Cost: log2 P messages, two more where P is not a power of two;
    ``L1 + log2(P) k beta_s <= T <= L1 + (P - 1) k beta_s`` with ``L1 = log2(P) alpha``: from all
    supports equal to all disjoint.   State: none.
    Differs from the paper: reproducible (merges follow rank order); any P, as its appendix A
    sketches; the dense switch, which it leaves to DSAR.

    Example:
        >>> import torch; from sparsync import DenseVector; from sparsync.transports.sim import simulate
        >>> async def program(comm):
        ...     mine = DenseVector(torch.eye(4)[comm.rank])
        ...     reduced = await RecursiveDoubling().reduce(comm, mine, k=1, step=0)
        ...     return reduced.total.to_dense().tolist()
        >>> simulate(program, world_size=3).results[2]
        [1.0, 1.0, 1.0, 0.0]

    References: Renggli et al., SparCML, SC 2019, section 5.3.1 and appendix A.
    """

    order = "tree"

    def __init__(
        self,
        codec: StreamCodec | None = None,
        *,
        op: str | Reduction = "sum",
        cap: float | None = 1.0,
    ) -> None:
        super().__init__(codec, op, cap)

    def cost(self, job: Job) -> Cost:
        """Return ``log2 P`` messages; k entries in every round, to twice as many in each (5.3.1).

        Where P is no power of two, P - 2^m ranks first hand over what they have and get the result at
        the end: one message more, with the whole result.  A message is dense from where that is shorter.

        Example:
            >>> doubling = RecursiveDoubling()
            >>> doubling.cost(Job(10**6, 1000, 8, result=1000)).words  # 3 rounds of 1000 entries
            6006.0
            >>> doubling.cost(Job(10**6, 1000, 8, result=8000)).words  # 1000, 2000, 4000
            14006.0
        """
        doublings = job.world_size.bit_length() - 1
        folded = job.world_size != 1 << doublings
        held = [min(2**i * (1 + folded), job.world_size) for i in range(doublings)]
        held += [job.world_size] * folded
        nbytes = sum(stream_bytes(job.union(ranks), job.size) for ranks in held)
        return stream_work(doublings + folded, nbytes)

    def promised_words(self, job: Job, *, exchangeable: bool) -> float | None:
        """Return the cost of disjoint supports."""
        disjoint = job._replace(result=job.k * job.world_size)
        return self.cost(disjoint).words if self.cap == 1 else None

    async def total(self, call: Call) -> Vector:
        """Fold the extra ranks, double, hand back."""
        comm = call.comm
        groups = _Groups(comm.world_size)
        mine = call.settle(call.mine)
        if groups.is_extra(comm.rank):
            host = comm.rank - 1
            await comm.isend(call.encode(mine, 0).payload, host, "fold", call.framing)
            return await _receive(call, host, comm.world_size, "hand back")
        is_host = groups.is_extra(comm.rank + 1)
        if is_host:
            mine = call.combine(mine, await _receive(call, comm.rank + 1, 1, "fold"))
        total = await _double(call, groups, mine)
        # all ranks must end with what the extra ones can be sent, so all round it
        if groups.extra and (is_host or not call.exact):
            encoded = call.encode(total, comm.world_size, source=0, keep=comm.rank == 0)
            total = encoded.decoded
            if is_host:
                await comm.isend(encoded.payload, comm.rank + 1, "hand back", call.framing)
        return total


async def _double(call: Call, groups: _Groups, partial: Vector) -> Vector:
    """Return the reduction over all groups, of which ``partial`` is this rank's."""
    comm = call.comm
    position = groups.position(comm.rank)
    span = 1
    while span < groups.core:
        first = position // span * span  # of this rank's group, as positions
        partner_first = first ^ span
        partner = groups.rank(position ^ span)
        lowest = groups.rank(first)
        # every rank of the group encodes the same partial result, with the same random numbers
        encoded = call.encode(partial, span, source=lowest, keep=comm.rank == lowest)
        ranks = groups.rank(partner_first + span) - groups.rank(partner_first)
        receiving = comm.irecv(partner, call.capacity(ranks, call.size), "double", call.framing)
        sending = comm.isend(encoded.payload, partner, "double", call.framing)
        message = await receiving
        await sending
        theirs = call.decode(message, call.size)
        await comm.work(message.numel(), dense=isinstance(theirs, DenseVector))
        mine = encoded.decoded
        partial = (
            call.combine(mine, theirs) if first < partner_first else call.combine(theirs, mine)
        )
        span *= 2
    return partial


class _Groups:
    """The ``core = 2^m <= P`` ranks that double, by position; the extra ones are 1, 3, 5, ...

    Position p stands for ranks ``[rank(p), rank(p + 1))``: one rank, or a host and its extra one.
    """

    def __init__(self, world_size: int) -> None:
        self.core = 1 << world_size.bit_length() - 1
        self.extra = world_size - self.core

    def is_extra(self, rank: int) -> bool:
        return rank % 2 == 1 and rank < 2 * self.extra

    def position(self, rank: int) -> int:
        return rank // 2 if rank < 2 * self.extra else rank - self.extra

    def rank(self, position: int) -> int:
        return position + min(position, self.extra)


async def _receive(call: Call, source: int, ranks: int, phase: str) -> Vector:
    """Receive what ``ranks`` ranks contribute."""
    message = await call.comm.irecv(source, call.capacity(ranks, call.size), phase, call.framing)
    theirs = call.decode(message, call.size)
    await call.comm.work(message.numel(), dense=isinstance(theirs, DenseVector))
    return theirs
