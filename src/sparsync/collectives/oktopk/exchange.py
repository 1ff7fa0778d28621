"""Ok-Topk's exchange: split and reduce, select globally, balance and allgatherv.

Ok-Topk, sections 3.1.1 and 3.1.2, Algorithm 1.  Counts are known to all ranks before the allgatherv, so
every message of it has a known length, and its receiver a known place for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.collectives.base import most_entries
from sparsync.collectives.oktopk import regions
from sparsync.collectives.oktopk.quantiles import REFINING_BINS, bins_for, quantiles
from sparsync.sparse import SparseVector
from sparsync.transports.communicator import Communicator, Subgroup
from sparsync.transports.driver import Operation
from sparsync.wire.base import Codec, MessageFraming

__all__ = [
    "Kept",
    "Share",
    "balance_and_allgatherv",
    "by_allgather",
    "by_histogram",
    "by_threshold",
    "split_reduce",
]

_FINE = 64  # the marginal bin may hold k / 64 entries: finer changes nothing that training sees
_TOLERANCE = 1.25  # dissemination may send so much more than its balanced volume; else the ring


# ---- split and reduce -------------------------------------------------------------------------------


class Share(NamedTuple):
    """One rank's region after splitting and reducing.

    Attributes:
        region: the sum over ranks of its region, relative to the region's start.
        load: the number of entries, of all ranks, that were summed.
    """

    region: SparseVector
    load: int


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
    """Send each region's entries to its owner; return the sum of this rank's region.

    Sums are left folds in rank order whatever arrives first, the own share at its rank's place: a
    window is folded as soon as all lower ranks are in, while the next one is in flight.

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
    parts, phase, framing = selected.split(boundaries), "split", MessageFraming(codec)
    mine = parts[comm.rank]
    capacity = codec.nbytes(min(most, mine.size), mine.size, mine.values.dtype)
    fold, load = _RankOrderFold(), mine.nnz
    fold.arrived[comm.rank] = mine
    turns = list(regions.schedule(comm.rank, comm.world_size, rotate=rotate))
    width = window or max(len(turns), 1)
    for first in range(0, len(turns), width):
        flight: list[tuple[int, Operation, Operation]] = []
        for dest, source in turns[first : first + width]:
            receiving = comm.irecv(source, capacity, phase, framing)
            with comm.stage("pack"):
                payload = codec.encode(parts[dest]).payload
            flight.append((source, receiving, comm.isend(payload, dest, phase, framing)))
        with comm.stage("unpack"):
            await comm.work(fold.advance())  # what earlier windows brought; this one is in flight
        for source, receiving, sending in flight:
            message: Tensor = await receiving
            with comm.stage("unpack"):
                theirs = codec.decode(message, mine.size).to(mine.values.device)
                fold.arrived[source] = theirs
                load += theirs.nnz
            await sending
    with comm.stage("unpack"):
        await comm.work(fold.advance())
    return Share(fold.folded[0], load)


class _RankOrderFold:
    """Sums one vector per rank, in rank order, as far as the next rank's vector has arrived."""

    def __init__(self) -> None:
        self.arrived: dict[int, SparseVector] = {}
        self.folded: list[SparseVector] = []
        self.next = 0

    def advance(self) -> int:
        """Fold the longest prefix that is there; return the bytes reduced."""
        ready = []
        while self.next in self.arrived:
            ready.append(self.arrived.pop(self.next))
            self.next += 1
        if ready:
            self.folded = [SparseVector.merge([*self.folded, *ready])]
        return sum(v.nnz * (v.indices.itemsize + v.values.itemsize) for v in ready)


# ---- global selection: three answers to Algorithm 1, lines 9-12 -------------------------------------


class Kept(NamedTuple):
    """The outcome of a global selection.

    Attributes:
        entries: what this rank keeps of its region (relative indices).
        counts: how many entries each rank keeps, known to all.
        threshold_key: magnitude of the smallest kept entry or a bound of it, as a key.
        loads: entries that each rank summed; empty where nobody asked.
    """

    entries: SparseVector
    counts: list[int]
    threshold_key: int | None
    loads: Sequence[int] = ()


async def by_histogram(
    comm: Communicator,
    share: Share,
    k: int,
    *,
    cap: float | None,
    size: int,
    last_threshold_key: int | None,
) -> Kept:
    """Keep exactly ``min(cap * k, nnz)`` entries: a histogram of magnitudes, then one of counts.

    Bins lie around the last threshold (one octave either way), else everywhere, and are refined
    until the marginal bin holds at most k / 64 entries.  All above the marginal bin are kept; its
    own places go to the ranks in rank order, on each rank to the largest.  ``cap=None`` keeps the
    whole marginal bin.

    Cost: usually one allreduce of ``bins_for(k)`` words and one allgather of 3 words.
    """
    region = share.region
    stop, octave = kernels.key_range(region.values.dtype)  # one NaN pattern is ``stop``: clamped
    around, bins = None, REFINING_BINS
    if last_threshold_key is not None:
        bins = bins_for(k)
        around = max(last_threshold_key - octave, 1), min(last_threshold_key + octave, stop)
    wanted = most_entries(k, cap if cap is not None else 1.0, size)
    keys = kernels.magnitude_keys(region.values).to(torch.int64).clamp(max=stop - 1).sort().values
    total, (bracket,) = await quantiles(
        comm,
        keys,
        lambda total: [max(total - wanted, 0)],
        stop=stop,
        bins=bins,
        tolerance=lambda _: max(wanted // _FINE, 1),
        start_at=around,
        count_limit=size,
        phase="threshold",
    )
    bounds = torch.tensor([bracket.low, bracket.high], device=keys.device)
    from_low, from_high = (keys.numel() - torch.searchsorted(keys, bounds)).tolist()
    mine = torch.tensor([from_high, from_low - from_high, share.load])
    everyone = await comm.allgather(mine, "sizes")
    above, marginal, loads = zip(*(t.tolist() for t in everyone), strict=True)
    places = sum(marginal) if cap is None else min(wanted, total) - sum(above)
    counts = []
    for over, wish in zip(above, marginal, strict=True):
        granted = min(wish, places)
        places -= granted
        counts.append(over + granted)
    return Kept(region.top(counts[comm.rank]), counts, bracket.low or None, loads)


async def by_allgather(
    comm: Communicator,
    region: SparseVector,
    k: int,
    *,
    cap: float | None,
    boundaries: Sequence[int],
    codec: Codec[SparseVector],
) -> Kept:
    """Collect all reduced entries everywhere and take the k-th largest as threshold (line 10).

    Cost: one allgather of a word, then an allgatherv of all reduced entries: up to
    2 min(k P, n) words, which the paper's "< 6k" leaves out.
    """
    encoded = codec.encode(region)
    length = torch.tensor([encoded.payload.numel()])
    lengths = [int(t) for t in await comm.allgather(length, "sizes")]
    framing = MessageFraming(codec)
    messages = await comm.allgatherv(encoded.payload, lengths, "threshold", framing)
    everyone = [
        codec.decode(message, stop - start).values.to(region.values.device)
        for message, (start, stop) in zip(messages, pairwise(boundaries), strict=True)
    ]
    values = torch.cat(everyone)
    largest = kernels.top(values, k)
    if not largest.numel():
        return Kept(region.top(0), [0] * comm.world_size, None)
    threshold_key = int(kernels.magnitude_keys(values[largest]).min())
    counts = [int((kernels.magnitude_keys(v) >= max(threshold_key, 1)).sum()) for v in everyone]
    finite = bool(torch.isfinite(values).all())
    return _within_cap(comm, region, counts, k, cap if finite else None, threshold_key)


async def by_threshold(
    comm: Communicator,
    region: SparseVector,
    k: int,
    *,
    cap: float | None,
    threshold_key: int | None,
) -> Kept:
    """Keep what reaches a reused threshold; over the cap, each rank keeps its largest pro rata.

    Cost: one allgather of two words.
    """
    reach = 0
    if threshold_key is not None:
        key = torch.tensor([max(threshold_key, 1)], device=region.values.device)
        reach = int(kernels.count_from(region.values, key))
    mine = torch.tensor([reach, int((~region.isfinite()).sum())])
    counts, broken = zip(*(t.tolist() for t in await comm.allgather(mine, "sizes")), strict=True)
    return _within_cap(comm, region, counts, k, None if any(broken) else cap, threshold_key)


def _within_cap(
    comm: Communicator,
    region: SparseVector,
    counts: Sequence[int],
    k: int,
    cap: float | None,
    threshold_key: int | None,
) -> Kept:
    """Scale the counts down to ``cap * k`` entries, pro rata; what is cut off is not delivered.

    Where a value is not finite there is no cap: it could drop the NaN that makes all ranks refuse the
    step.
    """
    total = sum(counts)
    most = total if cap is None else most_entries(k, cap, total)
    if total > most:
        counts = [high - low for low, high in pairwise(most * e // total for e in _ends(counts))]
    return Kept(region.top(counts[comm.rank]), list(counts), threshold_key)


def _ends(counts: Sequence[int]) -> list[int]:
    return [0, *accumulate(counts)]


# ---- balance and allgatherv -------------------------------------------------------------------------


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
    mine = kept.embed(boundaries[comm.rank], size)
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
