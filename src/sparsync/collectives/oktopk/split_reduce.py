"""Split and reduce: every rank sends each region's entries to the region's owner, who sums them.

The first phase of Ok-Topk (section 3.1.1): destination rotation, and windows of messages in flight
whose reduction overlaps the next window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from sparsync.collectives.oktopk import regions
from sparsync.sparse import SparseVector
from sparsync.transports.communicator import Communicator
from sparsync.transports.driver import Operation
from sparsync.wire.base import Codec, MessageFraming

__all__ = ["Share", "split_reduce"]

_PHASE = "split"


async def split_reduce(
    comm: Communicator,
    selected: SparseVector,
    boundaries: Sequence[int],
    codec: Codec[SparseVector],
    *,
    most: int,
    window: int | None,
    rotate: bool,
) -> Share:
    """Return the sum over ranks of this rank's region, relative to the region's start.

    Sums are left folds in rank order whatever arrives first, the own share at its rank's place: a
    window is folded as soon as all lower ranks are in.

    Args:
        comm: the group.
        selected: this rank's entries, at most ``most``.
        boundaries: P + 1 ascending cuts of ``[0, size)``; rank r owns ``[b[r], b[r + 1])``.
        codec: an exact wire format.
        most: the largest number of entries that any rank may have selected.
        window: messages in flight in each direction; None for all at once.
        rotate: send to rank + 1, rank + 2, ... instead of 0, 1, ...

    Cost: P - 1 messages; at most 2 ``most`` words sent.
    """
    parts = selected.split(boundaries)
    mine = parts[comm.rank]
    framing = MessageFraming(codec)
    capacity = codec.nbytes(min(most, mine.size), mine.size, mine.values.dtype)
    fold = _RankOrderFold(comm.world_size)
    fold.add(comm.rank, mine)
    turns = list(regions.schedule(comm.rank, comm.world_size, rotate=rotate))
    width = window or max(len(turns), 1)
    for first in range(0, len(turns), width):
        flight: list[tuple[int, Operation, Operation]] = []
        for dest, source in turns[first : first + width]:
            receiving = comm.irecv(source, capacity, _PHASE, framing)
            with comm.stage("pack"):
                payload = codec.encode(parts[dest]).payload
            flight.append((source, receiving, comm.isend(payload, dest, _PHASE, framing)))
        with comm.stage("unpack"):
            await comm.work(fold.fold())  # what earlier windows brought; this one is in flight
        for source, receiving, sending in flight:
            message: Tensor = await receiving
            with comm.stage("unpack"):
                fold.add(source, codec.decode(message, mine.size).to(mine.values.device))
            await sending
    with comm.stage("unpack"):
        await comm.work(fold.fold())
    return fold.result()


class Share(NamedTuple):
    """One rank's region after splitting and reducing.

    Attributes:
        region: the sum over ranks of its region, relative to the region's start.
        load: the number of entries, of all ranks, that were summed.
    """

    region: SparseVector
    load: int


class _RankOrderFold:
    """Sums one vector per rank, in rank order, as far as the next rank's vector is there."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.arrived: dict[int, SparseVector] = {}
        self.folded: SparseVector | None = None
        self.next = 0
        self.load = 0

    def add(self, rank: int, vector: SparseVector) -> None:
        self.arrived[rank] = vector
        self.load += vector.nnz

    def fold(self) -> int:
        """Fold the longest prefix that is there; return the bytes reduced."""
        ready = [] if self.folded is None else [self.folded]
        fresh = 0
        while self.next in self.arrived:
            vector = self.arrived.pop(self.next)
            fresh += vector.nnz * (vector.indices.itemsize + vector.values.itemsize)
            ready.append(vector)
            self.next += 1
        if ready:
            self.folded = SparseVector.merge(ready)
        return fresh

    def result(self) -> Share:
        assert self.folded is not None and self.next == self.world_size
        return Share(self.folded, self.load)
