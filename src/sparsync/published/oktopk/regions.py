"""Ok-Topk's regions (section 3.1): how ranks agree on, reduce, balance and gather them.

All ranks know all counts before the allgatherv, so the receiver of a message knows its length and can
allocate a buffer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, final

import torch
from torch import Tensor

from sparsync.collectives.collective import rounded_off
from sparsync.sparse import SparseVector, even_boundaries
from sparsync.transports.communicator import Communicator, rounds
from sparsync.transports.driver import Operation
from sparsync.transports.groups import Subgroup
from sparsync.wire.codec import Codec, MessageFraming, decode_as
from sparsync.wire.messages import encode_regions, join_messages, sum_messages

__all__ = [
    "REFINING_BINS",
    "Bracket",
    "Share",
    "Writer",
    "balance_and_allgatherv",
    "balance_plan",
    "balanced_counts",
    "bins_for",
    "dissemination_sends",
    "equal_count_cuts",
    "holders",
    "is_crowded",
    "quantiles",
    "schedule",
    "spans",
    "split_reduce",
]

REFINING_BINS = 64  # per bracket that is divided again: three rounds distinguish 2^18 magnitudes
# The allgatherv uses a ring if the busiest rank would send more than this multiple of an even share in a
# dissemination.
_TOLERANCE = 1.25


# ---- where regions begin ----------------------------------------------------------------------------


def equal_count_cuts(indices: Sequence[int], size: int, parts: int) -> list[int]:
    """Return the ``parts - 1`` cuts that leave equally many of the ascending ``indices`` between them.

    Example:
        >>> equal_count_cuts([1, 2, 3, 90], size=100, parts=2)
        [3]
    """
    if not len(indices):
        return even_boundaries(size, parts)[1:-1]
    return [int(indices[len(indices) * i // parts]) for i in range(1, parts)]


def is_crowded(loads: Sequence[int], trigger: float) -> bool:
    """Return whether a region was so full that ranks should agree on new boundaries.

    A crowded region has more than ``trigger`` times the mean load, plus a margin of 2 P.  The margin is
    needed because an index that all ranks select is a load of P, which new cuts cannot divide.
    """
    world_size = len(loads)
    return bool(loads) and max(loads) > trigger * sum(loads) / world_size + 2 * world_size


class Bracket(NamedTuple):
    """A range of keys: ``below`` keys are less than ``low``, ``inside`` keys are in ``[low, high)``."""

    low: int
    high: int
    below: int
    inside: int


def bins_for(k: int) -> int:
    """Return the number of bins of a histogram: k / 16, limited to [32, 1024] to keep it cheap."""
    return min(max(k // 16, 32), 1024)


async def quantiles(
    comm: Communicator,
    below: Callable[[Tensor], Tensor],
    ranks_of: Callable[[int], Sequence[int]],
    *,
    stop: int,
    bins: int,
    tolerance: Callable[[int], int],
    start_at: tuple[int, int] | None = None,
    count_limit: int,
    phase: str,
) -> tuple[int, list[Bracket]]:
    """Find brackets for the keys at given positions in the sorted union of all ranks' keys.

    An allreduce of a histogram narrows every wanted cut to one bin; bins that still hold too many keys
    are divided again.  The paper averages the cuts that suit each rank (section 3.1.1), but this requires
    that the ranks' supports are alike.

    Args:
        comm: the group.
        below: given ascending ``torch.int64`` edges in ``[0, stop]``, returns the number of this rank's
            keys below each edge.
        ranks_of: returns the wanted 0-based positions, in ascending order, given the total number of
            keys.
        stop: all keys are smaller than this.
        bins: number of bins of the first histogram; later ones have 64 per bracket that is divided again.
        tolerance: returns how many keys a bracket may hold before it is divided again, given the total.
        start_at: the range to search first, ``(low, high)``; by default, all keys.
        count_limit: an upper bound on the total, the same on all ranks; it determines whether a bin has 4
            or 8 bytes.
        phase: the phase under which the ledger counts the bytes.

    Returns:
        The total, and one bracket per position; a position past the last key gets an empty bracket at the
        end.

    Cost: one allreduce per round; usually 1 or 2 rounds.
    """
    dtype = torch.int32 if count_limit < 1 << 31 else torch.int64
    # 0 and ``stop`` are always edges, so keys outside ``start_at`` are counted in the two outer bins
    edges = _edges([start_at or (0, stop)], bins, 0, stop)
    brackets: list[Bracket] = []
    wanted: Sequence[int] = []
    total = 0
    while True:
        at = below(torch.tensor(edges, dtype=torch.int64, device="cpu"))
        counts = await comm.allreduce(at.diff().to(dtype), phase)
        ends = [0, *counts.to(torch.int64).cumsum(0).tolist()]
        # From here on, all decisions use integers that are equal on all ranks, so all ranks take the
        # same branches and stay in the same round of the loop.
        if not brackets:  # the first histogram covers all keys, so it yields the total
            total = ends[-1]
            wanted = ranks_of(total)
            brackets = [_find(position, 0, edges, ends) for position in wanted]
        else:
            brackets = [
                _narrowed(bracket, position, edges, ends)
                for bracket, position in zip(brackets, wanted, strict=True)
            ]
        # a bracket of a single key is not divided, so the loop ends even if many entries have this key
        enough = tolerance(total)
        open_ones = sorted(
            {(b.low, b.high) for b in brackets if b.inside > enough and b.high - b.low > 1}
        )
        if not open_ones:
            return total, brackets
        edges = _edges(open_ones, min(bins, REFINING_BINS * len(open_ones)))


def _edges(spans: Sequence[tuple[int, int]], bins: int, *outer: int) -> list[int]:
    """Divide the spans evenly into about ``bins`` pieces in total, and return the edges."""
    # divide each span into at least two pieces; otherwise a round would leave it unchanged
    per_span, edges = max(2, bins // len(spans)), set(outer)
    for low, high in spans:
        pieces = max(min(per_span, high - low), 1)
        edges.update(low + (high - low) * i // pieces for i in range(pieces + 1))
    return sorted(edges)


def _find(position: int, below: int, edges: Sequence[int], ends: Sequence[int]) -> Bracket:
    """Return the bin that holds ``position``, if ``below`` is the number of keys below the first edge."""
    i = bisect_right(ends, position - below) - 1
    if i >= len(edges) - 1:  # past the last key
        return Bracket(edges[-1], edges[-1], below + ends[-1], 0)
    return Bracket(edges[i], edges[i + 1], below + ends[i], ends[i + 1] - ends[i])


def _narrowed(
    bracket: Bracket, position: int, edges: Sequence[int], ends: Sequence[int]
) -> Bracket:
    """Return the finer bin that holds the position, or the bracket itself if no edges divide it."""
    first, last = bisect_left(edges, bracket.low), bisect_left(edges, bracket.high)
    # edges that divide a different bracket may also be in this range; the ones that divide this bracket
    # begin and end exactly where it does
    if last - first < 2 or edges[first] != bracket.low or bracket.high not in edges[last:]:
        return bracket
    base = bracket.below - ends[first]
    return _find(position, base, edges[first : last + 1], ends[first : last + 1])


# ---- messages ---------------------------------------------------------------------------------------


@final
class Writer:
    """Writes this rank's messages for one call, and collects the errors of a lossy codec.

    Args:
        codec: wire format.
        comm: the group.
        like: any vector with the size and dtype of the whole vector.
        step: 0-based, for codecs that draw random numbers.

    Attributes:
        errors: for every message, the values before encoding minus the decoded ones, at their indices in
            the whole vector; empty for an exact codec.
    """

    def __init__(
        self, codec: Codec[SparseVector], comm: Communicator, like: SparseVector, step: int = 0
    ) -> None:
        self.codec, self.framing = codec, MessageFraming(codec)
        self.exact = codec.is_exact(like.values.dtype)
        self.errors: list[SparseVector] = []
        self._size, self._step = like.size, step
        self._source, self._ranks = comm.rank, comm.world_size

    def write(self, region: SparseVector, start: int) -> Tensor:
        """Return the message for a region that begins at ``start`` of the whole vector."""
        if self.exact:
            return self.codec.encode(region).payload
        encoded = self.codec.seeded(self._source, self._step).encode(region)
        # seed the next message differently, because QSGD is unbiased only if draws are independent
        self._source += self._ranks
        error = rounded_off(region, encoded.decoded)
        self.errors.append(error.embed(start, self._size))
        return encoded.payload

    def write_regions(
        self, vector: SparseVector, boundaries: Sequence[int], own: int
    ) -> tuple[list[Tensor], SparseVector]:
        """Return one message per region (empty for ``own``), and the unrounded entries of ``own``."""
        if self.exact:
            return encode_regions(self.codec, vector, boundaries, own)
        parts, none = vector.split(boundaries), torch.empty(0, dtype=torch.uint8, device="cpu")
        messages = [
            none if region == own else self.write(part, boundaries[region])
            for region, part in enumerate(parts)
        ]
        return messages, parts[own]


# ---- split and reduce -------------------------------------------------------------------------------


def schedule(rank: int, world_size: int, *, rotate: bool) -> Iterator[tuple[int, int]]:
    """Yield ``(dest, source)`` for each of the P - 1 turns in which a rank sends to all others.

    With ``rotate``, rank r sends to r + 1, r + 2, ..., and in every turn each rank receives from one peer
    (Ok-Topk, Figure 2b).  Otherwise, all ranks send to rank 0, then to rank 1, ..., so that turn i floods
    rank i (2a).

    Example:
        >>> list(schedule(1, 4, rotate=True))
        [(2, 0), (3, 3), (0, 2)]
        >>> list(schedule(1, 4, rotate=False))
        [(0, 0), (2, 2), (3, 3)]
    """
    if rotate:
        for shift in range(1, world_size):
            yield (rank + shift) % world_size, (rank - shift) % world_size
    else:
        for peer in range(world_size):
            if peer != rank:
                yield peer, peer


class Share(NamedTuple):
    """The sum of one rank's region, with indices relative to the region, and the number of summands."""

    region: SparseVector
    load: int


async def split_reduce(
    comm: Communicator,
    selected: SparseVector,
    boundaries: Sequence[int],
    writer: Writer,
    *,
    most: int,
    buckets: int,
    rotate: bool,
) -> Share:
    """Send each region's entries to its owner; return the sum of this rank's region.

    Sums are left folds in the order of the turns, starting with this rank's share: with rotation, rank r
    adds the shares of r - 1, r - 2, ..., whatever arrives first.  A bucket of turns is reduced while the
    next one is in flight (section 3.1.1).  If the next one has already arrived, both are reduced
    together.

    Args:
        comm: the group.
        selected: this rank's entries.
        boundaries: P + 1 ascending cuts of ``[0, size)``; rank r owns ``[b[r], b[r + 1])``.
        writer: writes this rank's messages.
        most: the largest number of entries that any rank may have selected.
        buckets: the largest number of buckets of turns; with 1, all shares are reduced at the end.
        rotate: as for ``schedule``.

    Cost: P - 1 messages; at most 2 ``most`` words sent; two buckets in flight.
    """
    phase, codec, framing = "split", writer.codec, writer.framing
    with comm.stage("pack"):
        payloads, mine = writer.write_regions(selected, boundaries, comm.rank)
    capacity = codec.nbytes(min(most, mine.size), mine.size, mine.values.dtype)
    turns = list(schedule(comm.rank, comm.world_size, rotate=rotate))
    width = max(-(-len(turns) // buckets), 1)

    sending: list[Operation] = []

    def start(first: int) -> list[Operation]:
        receiving = []
        for dest, source in turns[first : first + width]:
            receiving.append(comm.irecv(source, capacity, phase, framing))
            sending.append(comm.isend(payloads[dest], dest, phase, framing))
        return receiving

    # Shares are added in the order of the turns, not of their arrival: float addition is not
    # associative, and the simulator, gloo and ZeroMQ must agree bit for bit.  Rank order would be too
    # slow: rank P - 1 gets rank 0's share, which it would have to add first, only in its last turn.
    region, load, flight, arrived = mine, mine.nnz, start(0), []
    for first in range(0, len(turns), width):
        # Send the next bucket before this one has arrived.  The paper sends it afterwards, which costs
        # the latency once per bucket.  For short messages, this is more than the overlap gains.
        ahead = start(first + width)
        arrived += [await receiving for receiving in flight]
        flight = ahead
        # an early reduction reads the running sum once more, which pays only if the rank would be idle
        if sum(receiving.poll(0.0) for receiving in flight) > len(flight) // 2:
            continue
        with comm.stage("unpack"):
            entries = sum(codec.read_header(message).entries for message in arrived)
            nbytes = mine.indices.itemsize + mine.values.itemsize
            await comm.work((region.nnz + entries) * nbytes)
            region = sum_messages(codec, [region, *arrived], mine)
        load += entries
        arrived = []
    for operation in sending:
        await operation
    return Share(region, load)


# ---- balance and allgatherv -------------------------------------------------------------------------


def holders(counts: Sequence[int], trigger: float) -> list[int]:
    """Return the ranks with at most ``trigger`` times the mean, which hold entries after balancing."""
    # compare integers, because rounding could make ranks disagree
    total, world_size = sum(counts), len(counts)
    return [r for r, count in enumerate(counts) if count * world_size <= trigger * total]


def balanced_counts(counts: Sequence[int], ranks: Sequence[int]) -> list[int]:
    """Return the number of entries per rank after balancing: even over ``ranks``, 0 for the others.

    Section 3.1.2 gives every rank k / P.  Here, an overfull rank keeps none: it already knows its
    entries, so a share that it kept or got back would only add volume.

    Example:
        >>> balanced_counts([9, 0, 1, 0, 0], ranks=[1, 2, 3, 4])
        [0, 2, 3, 2, 3]
    """
    targets = [0] * len(counts)
    for rank, (low, high) in zip(
        ranks, pairwise(even_boundaries(sum(counts), len(ranks))), strict=True
    ):
        targets[rank] = high - low
    return targets


def balance_plan(
    counts: Sequence[int], targets: Sequence[int]
) -> Iterator[tuple[int, int, int, int]]:
    """Yield moves ``(source, dest, start, entries)`` in order, after which rank j has ``targets[j]``.

    All ranks' entries are concatenated and cut into pieces of the target lengths; piece j goes to rank j.
    There are at most 2 P - 1 moves, including moves from a rank to itself.

    Example:
        >>> list(balance_plan([4, 0, 0, 0], [1, 1, 1, 1]))
        [(0, 0, 0, 1), (0, 1, 1, 1), (0, 2, 2, 1), (0, 3, 3, 1)]
    """
    ends, dest = _ends(targets), 0
    for source, (start, stop) in enumerate(pairwise(_ends(counts))):
        low = start
        while low < stop:
            while ends[dest + 1] <= low:
                dest += 1
            high = min(stop, ends[dest + 1])
            yield source, dest, low - start, high - low
            low = high


def dissemination_sends(lengths: Sequence[int]) -> int:
    """Return the busiest rank's number of sent bytes if messages of these lengths are disseminated.

    Example:
        >>> dissemination_sends([1, 1, 1, 1]), dissemination_sends([4, 0, 0, 0])
        (3, 8)
    """
    world_size = len(lengths)
    ends = _ends([*lengths, *lengths])
    return max(
        sum(ends[rank + count] - ends[rank] for _, count in rounds(world_size))
        for rank in range(world_size)
    )


def spans(
    counts: Sequence[int], targets: Sequence[int], boundaries: Sequence[int]
) -> list[tuple[int, int]]:
    """Return, for each balanced piece, the narrowest ``[start, stop)`` of whole regions that holds it.

    All ranks can compute these spans from the counts, so indices are sent relative to the spans.

    Example:
        >>> spans([4, 0, 4], [2, 4, 2], [0, 10, 20, 30])
        [(0, 10), (0, 30), (20, 30)]
    """
    held = _ends(counts)
    return [
        (boundaries[bisect_right(held, low) - 1], boundaries[bisect_left(held, high)])
        if low < high
        else (0, 0)
        for low, high in pairwise(_ends(targets))
    ]


def _ends(counts: Sequence[int]) -> list[int]:
    return [0, *accumulate(counts)]


async def balance_and_allgatherv(
    comm: Communicator,
    kept: SparseVector,
    counts: Sequence[int],
    boundaries: Sequence[int],
    writer: Writer,
    *,
    balance_trigger: float | None,
) -> SparseVector:
    """Return the union of all ranks' kept entries, identical on all ranks.

    ``kept`` holds this rank's entries, with indices relative to its region; ``counts`` holds each rank's
    number of entries.  If the largest count exceeds ``balance_trigger`` times the mean, entries are
    balanced first; with None, they never are.

    Cost: balancing takes at most 2 (P - 1) messages in total and 2k words per rank.  The allgatherv takes
    ceil(log2 P) messages and about 2k (P - 1) / P words if counts are even, otherwise P - 1 messages on a
    ring and at most 2k words.  After balancing, m ranks hold nothing, and each of the others also sends
    its share to all of these (m messages, 2k m / (P - m) words).  So a rank that has handed over 2k
    words forwards nothing.
    """
    size, total, codec = boundaries[-1], sum(counts), writer.codec
    mine = kept.embed(boundaries[comm.rank], size)
    places, holding = list(pairwise(boundaries)), list(range(comm.world_size))
    if balance_trigger is not None and max(counts) * len(counts) > balance_trigger * total:
        holding = holders(counts, balance_trigger)
        targets = balanced_counts(counts, holding)
        mine = await _balance(comm, mine, counts, targets, boundaries, writer)
        places = spans(counts, targets, boundaries)
        counts = targets
    start, stop = places[comm.rank]
    with comm.stage("pack"):
        shifted = SparseVector(mine.indices - start, mine.values, stop - start)
        payload = writer.write(shifted, start)
    lengths = [
        codec.nbytes(count, high - low, kept.values.dtype)
        for count, (low, high) in zip(counts, places, strict=True)
    ]
    messages = await _allgatherv(comm, payload, lengths, holding, writer.framing)
    with comm.stage("unpack"):
        return join_messages(codec, messages, [places[rank] for rank in holding], mine)


async def _allgatherv(
    comm: Communicator,
    payload: Tensor,
    lengths: Sequence[int],
    holding: Sequence[int],
    framing: MessageFraming,
) -> list[Tensor]:
    """Collect messages, in rank order, from the ranks that hold entries; idle ranks only receive."""
    phase = "allgatherv"
    idle = [rank for rank in range(comm.world_size) if rank not in holding]
    if comm.rank in idle:
        receiving = [comm.irecv(source, lengths[source], phase, framing) for source in holding]
        return [await operation for operation in receiving]
    # With recursive doubling (3.1.2), idle ranks would forward other ranks' entries after sending up to
    # 2 k words for balancing.  Here, the ranks that hold entries gather among themselves, and also send
    # to all idle ranks.
    sending = [comm.isend(payload, dest, phase, framing) for dest in idle]
    group = Subgroup(comm, holding) if idle else comm
    shares = [lengths[rank] for rank in holding]
    # In a dissemination, a rank that holds nearly all entries sends them in every round, ceil(log2 P)
    # times; a ring sends nothing twice.  All ranks know the lengths, so they make the same choice.
    even_share = sum(shares) * (len(shares) - 1) / len(shares)
    ring = dissemination_sends(shares) > _TOLERANCE * even_share
    messages = await group.allgatherv(payload, shares, phase, framing, ring=ring)
    for operation in sending:
        await operation
    return messages


async def _balance(
    comm: Communicator,
    mine: SparseVector,
    counts: Sequence[int],
    targets: Sequence[int],
    boundaries: Sequence[int],
    writer: Writer,
) -> SparseVector:
    """Hand entries over until rank j holds ``targets[j]``, in order, so that pieces can be joined."""
    # a message contains entries of one region, whose width all ranks know; indices are relative to it
    codec, framing, phase = writer.codec, writer.framing, "balance"
    pieces = {comm.rank: mine.keep(slice(0, 0))}
    receiving: dict[int, Operation] = {}
    sending: list[Operation] = []
    for source, dest, start, count in balance_plan(counts, targets):
        base, width = boundaries[source], boundaries[source + 1] - boundaries[source]
        if source == comm.rank:
            part = mine.keep(slice(start, start + count))
            if dest == comm.rank:
                pieces[source] = part
                continue
            relative = SparseVector(part.indices - base, part.values, width)
            sending.append(comm.isend(writer.write(relative, base), dest, phase, framing))
        elif dest == comm.rank:
            capacity = codec.nbytes(count, width, mine.values.dtype)
            receiving[source] = comm.irecv(source, capacity, phase, framing)
    for source, operation in receiving.items():
        base, width = boundaries[source], boundaries[source + 1] - boundaries[source]
        piece = decode_as(codec, await operation, width, mine.values.dtype).embed(base, mine.size)
        pieces[source] = piece.to(mine.values.device)
    for operation in sending:
        await operation
    return SparseVector.join([pieces[source] for source in sorted(pieces)])
