"""Balance and allgatherv: every rank obtains the kept entries of all ranks.

The second phase of Ok-Topk (section 3.1.2).  Counts are known to all ranks, so every message has a
known length and its receiver a known place for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from sparsync.collectives.oktopk import regions
from sparsync.sparse import SparseVector
from sparsync.transports.communicator import Communicator, Subgroup
from sparsync.transports.driver import Operation
from sparsync.wire.base import Codec, MessageFraming

__all__ = ["balance_and_allgatherv"]

_TOLERANCE = 1.25  # dissemination may send so much more than its balanced volume; else the ring


async def balance_and_allgatherv(
    comm: Communicator,
    kept: SparseVector,
    counts: Sequence[int],
    boundaries: Sequence[int],
    codec: Codec[SparseVector],
    *,
    balance_trigger: float | None,
) -> SparseVector:
    """Return the union of all ranks' kept entries, identical everywhere.

    Args:
        comm: the group.
        kept: this rank's entries, indices relative to its region; ``counts[rank]`` of them.
        counts: entries of every rank.
        boundaries: P + 1 ascending cuts; rank r's entries lie in ``[b[r], b[r + 1])``.
        codec: an exact wire format.
        balance_trigger: balance first when the largest count exceeds this multiple of the mean;
            None: never.

    Cost: balancing at most 2 (P - 1) messages in all and 2k words per rank; then ceil(log2 P)
    messages and about 2k (P - 1) / P words where counts are even, else P - 1 messages on a ring and
    at most 2k words.  After balancing, m ranks hold none: the others send each of them their share
    (m messages, 2k m / (P - m) words more), so that who handed over 2k words forwards nothing.
    """
    size, total = boundaries[-1], sum(counts)
    mine = SparseVector(kept.indices + boundaries[comm.rank], kept.values, size)
    spans, holders = list(pairwise(boundaries)), list(range(comm.world_size))
    if balance_trigger is not None and max(counts) * len(counts) > balance_trigger * total:
        holders = regions.holders(counts, balance_trigger)
        targets = regions.balanced_counts(counts, balance_trigger)
        mine = await _balance(comm, mine, counts, targets, boundaries, codec)
        spans = regions.spans(counts, targets, boundaries)
        counts = targets
    start, stop = spans[comm.rank]
    with comm.stage("pack"):
        shifted = SparseVector(mine.indices - start, mine.values, stop - start)
        payload = codec.encode(shifted).payload
    lengths = [
        codec.nbytes(count, high - low, kept.values.dtype)
        for count, (low, high) in zip(counts, spans, strict=True)
    ]
    messages = await _allgatherv(comm, payload, lengths, holders, MessageFraming(codec))
    with comm.stage("unpack"):
        pieces = [
            codec.decode(message, spans[rank][1] - spans[rank][0]).embed(spans[rank][0], size)
            for rank, message in zip(holders, messages, strict=True)
        ]
        return SparseVector.join(pieces).to(kept.values.device)


async def _allgatherv(
    comm: Communicator,
    payload: Tensor,
    lengths: Sequence[int],
    holders: Sequence[int],
    framing: MessageFraming,
) -> list[Tensor]:
    """Collect the holders' messages, in their order; ranks that hold none only receive."""
    phase = "allgatherv"
    idle = [rank for rank in range(comm.world_size) if rank not in holders]
    if comm.rank in idle:
        receiving = [comm.irecv(source, lengths[source], phase, framing) for source in holders]
        return [await operation for operation in receiving]
    sending = [comm.isend(payload, dest, phase, framing) for dest in idle]
    group = Subgroup(comm, holders) if idle else comm
    shares = [lengths[rank] for rank in holders]
    even_share = sum(shares) * (len(shares) - 1) / len(shares)
    gather = group.allgatherv
    if regions.dissemination_sends(shares) > _TOLERANCE * even_share:
        gather = group.ring_allgatherv
    messages = await gather(payload, shares, phase, framing)
    for operation in sending:
        await operation
    return messages


async def _balance(
    comm: Communicator,
    mine: SparseVector,
    counts: Sequence[int],
    targets: Sequence[int],
    boundaries: Sequence[int],
    codec: Codec[SparseVector],
) -> SparseVector:
    """Hand entries over until rank j holds ``targets[j]``; order is kept, so pieces just join."""
    framing, phase = MessageFraming(codec), "balance"
    pieces: dict[int, SparseVector] = {}
    receiving: dict[int, Operation] = {}
    sending: list[Operation] = []
    for source, dest, start, count in regions.balance_plan(counts, targets):
        base, width = boundaries[source], boundaries[source + 1] - boundaries[source]
        if source == comm.rank:
            part = mine.keep(slice(start, start + count))
            if dest == comm.rank:
                pieces[source] = part
                continue
            relative = SparseVector(part.indices - base, part.values, width)
            sending.append(comm.isend(codec.encode(relative).payload, dest, phase, framing))
        elif dest == comm.rank:
            capacity = codec.nbytes(count, width, mine.values.dtype)
            receiving[source] = comm.irecv(source, capacity, phase, framing)
    for source, operation in receiving.items():
        base, width = boundaries[source], boundaries[source + 1] - boundaries[source]
        piece = codec.decode(await operation, width).embed(base, mine.size)
        pieces[source] = piece.to(mine.values.device)
    for operation in sending:
        await operation
    if not pieces:
        return mine.keep(slice(0, 0))
    return SparseVector.join([pieces[source] for source in sorted(pieces)])
