"""Halving: O(k) volume in O(log P) rounds, by selecting again after every hop."""

from __future__ import annotations

from typing import final

import torch

from sparsync import kernels
from sparsync.collectives.collective import Collective, Reduced, capped, cut, less, rounded_off
from sparsync.collectives.costs import Cost, Job, Result, allgatherv
from sparsync.errors import WireFormatError
from sparsync.sparse import SparseVector, Vector
from sparsync.transports.communicator import Communicator, rounds
from sparsync.wire.codec import Codec, MessageFraming, decode_as
from sparsync.wire.packed import Packed

__all__ = ["Halving"]

# Both constants are fitted to benchmarks/fidelity.md at P = 4 and 8.  Their units are a decoding pass
# and a turn of ``Budgeted``.
_PASSES = 12  # per received entry: merging, selecting again, recording dropped entries
_TURN = 2 / 3  # less than a whole turn, because a rank waits for only one peer in each round


@final
class Halving(Collective):
    """Runs a sparse reduce-scatter and allgather on the circulant graph, with k / P entries per block.

    This removes the first limitation stated in the Ok-Topk paper: O(P) messages.

    A hash deals elements to P blocks, so a block's k / P largest entries are nearly the same as its
    entries in the global top-k.  In each round of the reduce-scatter, a rank sends some of its blocks,
    adds the blocks that it receives to the ones that it keeps, and reduces each to its k / P largest
    entries.  Dropped entries stay in the residual of the rank that drops them, even if other ranks
    contributed to them.  The same holds for the codec's rounding errors.

    Args:
        codec: wire format (default: packed, bf16).

    Cost: 2 ceil(log2 P) messages; 2 k (P - 1) / P entries sent and received, on every input;
    the total has at most k + P entries.   State: none.
    Differs from the paper: hashed blocks instead of contiguous ones; any P.

    Example:
        >>> from sparsync.transports.sim import simulate
        >>> async def program(comm):
        ...     mine = SparseVector.from_dense(torch.tensor([0.0, 1.0, 0.0, comm.rank + 2.0]))
        ...     return (await Halving().reduce(comm, mine, k=3, step=0)).total.to_dense().tolist()
        >>> simulate(program, world_size=3).results[0]
        [0.0, 3.0, 0.0, 9.0]

    References: Zhao et al., SparDL, ICDE 2024; Träff, 2024 (the circulant reduce-scatter).
    """

    result: Result = "top-k"
    order = "tree"

    def __init__(self, codec: Codec[SparseVector] | None = None) -> None:
        self.codec = codec or Packed()

    def cost(self, job: Job) -> Cost:
        """Return ``2 k (P - 1) / P`` entries in ``2 log2 P`` messages, with ceil(k / P) per block.

        This is a bound for any input, because blocks need not be full.

        Example:
            >>> Halving().cost(Job(14_728_266, 147_283, 8)).messages
            6
        """
        world_size, k = job.world_size, round(job.k)
        quota, width = -(-k // world_size), -(-job.size // world_size)
        most = min(quota, width)
        scattered = [
            self.codec.nbytes(most * count, width * count) for _, count in rounds(world_size)
        ]
        gathered = allgatherv(self.codec.nbytes(most, width), world_size)
        decoded = (_PASSES + 1) * job.k * job.share
        work = Cost(0, 0, encoded=job.k, decoded=decoded, turns=_TURN * 2 * job.rounds)
        return Cost(job.rounds, sum(scattered)) + gathered + work

    async def reduce(self, comm: Communicator, selected: Vector, k: int, step: int) -> Reduced:
        """Run a reduce-scatter that selects again after every hop, and then an allgather."""
        mine = capped(selected, k, 1.0)
        if comm.world_size == 1:
            return Reduced(mine, mine)
        walk = _Walk(comm, self.codec, mine, -(-k // comm.world_size))
        await walk.reduce_scatter()
        total = await walk.allgather()
        return Reduced(total, less(mine, walk.dropped))


class _Walk:
    """The state of one call: the blocks in flight, and the entries that this rank dropped.

    ``blocks[i]`` belongs to rank + i, which makes the schedule the same for all ranks.
    """

    def __init__(
        self, comm: Communicator, codec: Codec[SparseVector], mine: SparseVector, quota: int
    ) -> None:
        self.comm, self.codec, self.mine, self.quota = comm, codec, mine, quota
        world_size = comm.world_size
        self.width = -(-mine.size // world_size)
        dealt = kernels.deal(mine.indices, world_size)
        local = torch.split(dealt.local, dealt.counts)
        values = torch.split(mine.values[dealt.order], dealt.counts)
        self.dropped: list[SparseVector] = []
        # every block is cut to its quota here already, so no message exceeds its capacity
        self.blocks = [
            self._largest(SparseVector(local[owner], values[owner], self.width), owner)
            for owner in ((comm.rank + i) % world_size for i in range(world_size))
        ]

    async def reduce_scatter(self) -> None:
        """Send and add blocks until only this rank's own block, summed over all ranks, is left."""
        comm, phase, framing = self.comm, "reduce-scatter", MessageFraming(self.codec)
        # The widest round comes first.  The ``count`` blocks that begin at ``skip`` go to rank + skip,
        # where they are numbered from 0.  This rank keeps the first ``skip`` blocks and, in the end,
        # only block 0.
        for skip, count in rounds(comm.world_size):
            span = self.width * count
            passed = self.blocks[skip : skip + count]
            joined = SparseVector.join(
                [block.embed(self.width * i, span) for i, block in enumerate(passed)]
            )
            # all blocks of a round are sent as one message with one header
            encoded = self.codec.encode(joined)
            self._note_rounding(joined, encoded.decoded, first=skip)
            source, dest = (
                (comm.rank - skip) % comm.world_size,
                (comm.rank + skip) % comm.world_size,
            )
            most = min(self.quota * count, span)
            capacity = self.codec.nbytes(most, span, self.mine.values.dtype)
            receiving = comm.irecv(source, capacity, phase, framing)
            sending = comm.isend(encoded.payload, dest, phase, framing)
            message = await receiving
            values = self.mine.values
            theirs = decode_as(self.codec, message, span, values.dtype).to(values.device)
            await sending
            arrived = theirs.split([self.width * i for i in range(count + 1)])
            await comm.work(message.numel())
            self.blocks = self.blocks[:skip]
            for i, block in enumerate(arrived):
                owner = (comm.rank + i) % comm.world_size
                self.blocks[i] = self._largest(SparseVector.merge([self.blocks[i], block]), owner)

    async def allgather(self) -> SparseVector:
        """Collect all ranks' own blocks; return the total."""
        comm = self.comm
        # this rank's own block must be rounded and decoded as on the other ranks, so that all totals are
        # bit-identical
        encoded = self.codec.encode(self.blocks[0])
        self._note_rounding(self.blocks[0], encoded.decoded, first=0)
        most = min(self.quota, self.width)
        capacity = self.codec.nbytes(most, self.width, self.mine.values.dtype)
        messages = await comm.allgatherv(
            encoded.payload,
            [capacity] * comm.world_size,
            "allgather",
            MessageFraming(self.codec),
        )
        pieces, values = [], self.mine.values
        for owner, message in enumerate(messages):
            block = decode_as(self.codec, message, self.width, values.dtype).to(values.device)
            pieces.append(self._placed(block, owner))
        return SparseVector.merge(pieces)

    def _largest(self, block: SparseVector, owner: int) -> SparseVector:
        """Keep the ``quota`` largest entries of a block; record the others as dropped."""
        kept, rest = cut(block, self.quota)
        self.dropped.append(self._placed(rest, owner))
        return kept

    def _note_rounding(self, before: SparseVector, after: SparseVector, first: int) -> None:
        """Record the rounding errors of joined blocks, beginning with ``blocks[first]``."""
        errors = rounded_off(before, after)
        if not errors.nnz:
            return
        for i, part in enumerate(errors.split(range(0, before.size + 1, self.width))):
            owner = (self.comm.rank + first + i) % self.comm.world_size
            self.dropped.append(self._placed(part, owner))

    def _placed(self, block: SparseVector, owner: int) -> SparseVector:
        """Return a block's entries with their indices in the whole vector."""
        indices = kernels.undeal(block.indices, owner, self.comm.world_size)
        # A block has room for ceil(n / P) elements, and the last ones may lie beyond the end of the
        # vector.  No correct sender uses their indices, but the codec cannot refuse them, because it
        # knows only the block.
        if indices.numel() and int(indices[-1]) >= self.mine.size:
            raise WireFormatError(
                f"an element beyond the vector's {self.mine.size} was sent; "
                "the sender is corrupt or hostile"
            )
        return SparseVector(indices, block.values, self.mine.size)
