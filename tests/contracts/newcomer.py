"""A collective that the library does not know: this file, and one row that an entry point names."""

from typing import final

from sparsync import Algorithm, Reduced, SparseVector
from sparsync.algorithm import Preset
from sparsync.collectives.collective import Collective, capped
from sparsync.collectives.costs import Cost
from sparsync.selection import Exact
from sparsync.wire.codec import MessageFraming
from sparsync.wire.streams import Coo


@final
class Star(Collective):
    """Rank 0 sums what all selected, and sends the k largest to all.  State: none."""

    result = "top-k"

    def cost(self, job):
        """Return ``2 (P - 1)`` messages of k entries through the port of rank 0."""
        peers, message = job.world_size - 1, Coo().nbytes(round(job.k), job.size)
        entries = peers * job.k
        return Cost(2 * peers, peers * message, peers * message, entries, entries, turns=2)

    async def reduce(self, comm, selected, k, step):
        codec, framing, mine = Coo(), MessageFraming(Coo()), capped(selected, k, 1.0)
        room = codec.nbytes(min(k, mine.size), mine.size, mine.values.dtype)
        others = range(1, comm.world_size)
        if comm.rank:
            await comm.isend(codec.encode(mine).payload, 0, "collect", framing)
            total = codec.decode(await comm.irecv(0, room, "spread", framing), mine.size)
        else:
            arriving = [comm.irecv(rank, room, "collect", framing) for rank in others]
            shares = [codec.decode(await message, mine.size) for message in arriving]
            total = SparseVector.merge([mine, *shares]).top(k)
            payload = codec.encode(total).payload
            for sending in [comm.isend(payload, rank, "spread", framing) for rank in others]:
                await sending
        return Reduced(total, mine.restrict(total.indices))


def star() -> Algorithm:
    """Exact local top-k, summed by rank 0."""
    return Algorithm("star", Exact, Star)


row = Preset(star, source="tests", planned=True)
