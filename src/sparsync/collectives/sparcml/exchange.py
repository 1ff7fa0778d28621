"""Shared steps of SparCML's collectives: check arguments, encode and combine, split by regions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Protocol, final

import torch
from torch import Tensor

from sparsync.collectives.base import Reduced, check_cap, most_entries
from sparsync.collectives.costs import ENTRY_BYTES, WORD_BYTES, Cost, Job
from sparsync.errors import ConfigurationError
from sparsync.reduction import SUM, Reduction, reduction
from sparsync.sparse import DenseVector, SparseVector, Vector, combine, densify, fold
from sparsync.transports.communicator import Communicator, rotated_alltoallv
from sparsync.wire.base import HEADER_BYTES, Codec, Encoded, MessageFraming
from sparsync.wire.streams import StreamCodec

__all__ = [
    "Call",
    "Settings",
    "allgather_regions",
    "begin",
    "checked",
    "neutral_of",
    "split_and_fold",
    "split_cost",
    "stream_bytes",
    "stream_work",
    "taken",
]


class Settings(Protocol):
    """The arguments that SparCML's collectives have in common."""

    codec: StreamCodec
    operation: Reduction
    cap: float | None


def checked(
    name: str, codec: StreamCodec | None, op: str | Reduction, cap: float | None
) -> tuple[StreamCodec, Reduction]:
    """Return the codec and the operation that a collective of this name is given.

    Raises:
        ConfigurationError: unknown operation; a cap that is not positive, or not of a sum.
    """
    check_cap(cap, name)
    operation = reduction(op)
    if cap is not None and operation is not SUM:
        raise ConfigurationError(
            f"{name}: cap is {cap} with operation '{operation.name}', but a cap keeps the "
            "largest magnitudes, which only a sum can do without the rest; give cap=None"
        )
    return codec or StreamCodec(), operation


def neutral_of(settings: Settings, dtype: torch.dtype) -> int | float:
    """Return the neutral element, or refuse a dtype.

    Raises:
        ConfigurationError: the operation is not defined on it, or the codec would round what is
            not a sum.
    """
    neutral, operation = settings.operation.check(dtype), settings.operation
    if operation is not SUM and not settings.codec.is_exact(dtype):
        raise ConfigurationError(
            f"{type(settings).__name__}: the codec rounds {dtype}, which only sums may be; use an "
            f"exact one with operation '{operation.name}', e.g. StreamCodec()"
        )
    return neutral


def taken(settings: Settings, selected: Vector, k: int) -> SparseVector:
    """Return the entries that take part: none is neutral, and at most ``cap * k``.

    Raises:
        ConfigurationError: as ``neutral_of``; more entries than the cap, of a dtype without magnitudes.
    """
    neutral = neutral_of(settings, selected.values.dtype)
    if isinstance(selected, DenseVector):
        sparse = SparseVector.from_dense(selected.values, neutral)
    else:
        stored = selected.values != neutral
        sparse = selected if bool(stored.all()) else selected.keep(stored)
    most = most_entries(k, settings.cap, sparse.size)
    if sparse.nnz > most and not sparse.values.is_floating_point():
        raise ConfigurationError(
            f"{type(settings).__name__}: got {sparse.nnz} entries of {sparse.values.dtype}, and "
            f"cap={settings.cap} takes {most}, but integers are not cut by magnitude; give cap=None"
        )
    return sparse.top(most)


def begin(comm: Communicator, settings: Settings, selected: Vector, k: int, step: int) -> Call:
    """Begin a call with the entries that take part."""
    most = most_entries(k, settings.cap, selected.size)
    return Call(comm, settings, taken(settings, selected, k), most, step)


@final
class Call:
    """One call on one rank: encodes, decodes and combines, and notes what rounding took here.

    Args:
        comm: the group.
        settings: of the collective.
        mine: this rank's contribution.
        most: the most entries that any rank contributes.
        step: 0-based.
    """

    def __init__(
        self, comm: Communicator, settings: Settings, mine: Vector, most: int, step: int
    ) -> None:
        self.comm, self.mine, self.most, self.step = comm, mine, most, step
        self.codec, self.operation = settings.codec, settings.operation
        self.size, self.dtype = mine.size, mine.values.dtype
        self.framing = MessageFraming(self.codec)
        self.exact = self.codec.is_exact(self.dtype)
        self._rounded: list[SparseVector] = []  # decoded less given: what this rank keeps, negated
        self._lost: list[SparseVector] = []  # the same, of what nobody keeps

    def encode(
        self,
        vector: Vector,
        turn: int,
        *,
        source: int | None = None,
        start: int = 0,
        keep: bool = True,
        codec: StreamCodec | None = None,
        lose: bool = False,
    ) -> Encoded[Vector]:
        """Encode; what is rounded away stays with this rank.

        Args:
            vector: a region of the whole vector.
            turn: different for all messages of one source in a call, so that a codec that draws
                random numbers draws others for each.
            source: the rank that the random numbers are those of (default: this one).
            start: of the region.
            keep: False where another rank encodes the same and keeps the rounding error.
            codec: another than the call's.
            lose: the rounding error is kept by nobody, and reported as lost.
        """
        source = self.comm.rank if source is None else source
        codec = codec or self.codec
        with self.comm.stage("pack"):
            seeded = codec.seeded(source + turn * self.comm.world_size, self.step)
            encoded = seeded.encode(vector)
        if keep and not codec.is_exact(self.dtype):
            error = _difference(encoded.decoded, vector).embed(start, self.size)
            (self._lost if lose else self._rounded).append(error)
        return encoded

    def decode(self, message: Tensor, size: int, codec: StreamCodec | None = None) -> Vector:
        """Decode a whole message, to where this rank's values are."""
        with self.comm.stage("unpack"):
            vector = (codec or self.codec).decode(message, size)
        device = self.mine.values.device
        if isinstance(vector, DenseVector):
            return DenseVector(vector.values.to(device))
        return vector.to(device)

    def combine(self, lower: Vector, higher: Vector) -> Vector:
        """Return ``lower operation higher``, dense from where the codec says so."""
        with self.comm.stage("unpack"):
            limit = self.codec.limit(lower.size, self.dtype)
            return combine(lower, higher, self.operation, limit)

    def settle(self, vector: Vector) -> Vector:
        """Return a vector in the form in which the codec's limit wants it."""
        limit = self.codec.limit(vector.size, self.dtype)
        return vector if limit is None or vector.nnz <= limit else self.densify(vector)

    def densify(self, vector: Vector) -> DenseVector:
        """Store all elements."""
        return densify(vector, self.operation)

    def capacity(self, ranks: int, width: int) -> int:
        """Bound the bytes of what ``ranks`` ranks contribute to a region of ``width`` elements.

        The number of entries is not bounded by the width: a sum turns dense by the entries of its
        operands, not by those of its result.
        """
        return self.codec.nbytes(min(self.most, width) * ranks, width, self.dtype)

    def reduced(self, total: Vector) -> Reduced:
        """Return the result: this rank delivered its share as it arrived, and keeps what it rounded.

        The caller may scale the total in place, so it shares no memory with what was delivered.
        """
        mine = self.mine
        if total.values.untyped_storage().data_ptr() == mine.values.untyped_storage().data_ptr():
            total = replace(total, values=total.values.clone())
        if self._rounded:
            if isinstance(mine, DenseVector):
                mine = SparseVector.from_dense(mine.values)
            mine = SparseVector.merge([mine, *self._rounded])
        lost = None
        if self._lost:  # of one piece after the other: the regions ascend
            errors = SparseVector.join(self._lost)
            lost = SparseVector(errors.indices, -errors.values, errors.size)
        return Reduced(total, mine, lost)


async def split_and_fold(
    call: Call,
    boundaries: Sequence[int],
    local: StreamCodec | None = None,
    *,
    keep_error: bool = True,
) -> Vector:
    """Return the left fold, in rank order, of this rank's region; sparse.

    Where a native call would pad each message to the longest possible, they go from point to point.

    Args:
        call: with a sparse contribution.
        boundaries: P + 1 ascending cuts of ``[0, size)``; rank r owns ``[b[r], b[r + 1])``.
        local: another codec than the call's; it rounds this rank's own region as well.
        keep_error: this rank keeps what that rounds away; False: it is lost.

    Cost: P - 1 messages; the entries outside this rank's region are sent, those inside received.
    """
    comm, mine, codec = call.comm, call.mine, local or call.codec
    assert isinstance(mine, SparseVector)
    pieces: list[Vector] = [*mine.split(boundaries)]
    payloads = []
    for dest, (piece, start) in enumerate(zip(pieces, boundaries, strict=False)):
        if dest == comm.rank and local is None:
            payloads.append(mine.values.new_empty(0, dtype=torch.uint8))  # it stays, as it is
            continue
        encoded = call.encode(piece, dest, start=start, codec=codec, lose=not keep_error)
        pieces[dest] = encoded.decoded
        payloads.append(encoded.payload)
    width = pieces[comm.rank].size
    most = codec.sparse.nbytes(min(call.most, width), width, call.dtype)
    capacities, framing = [most] * comm.world_size, MessageFraming(codec)
    if comm.pads:
        messages = await rotated_alltoallv(comm, payloads, capacities, "split", framing)
    else:
        messages = await comm.alltoallv(payloads, capacities, "split", framing)
    others = (message.numel() for rank, message in enumerate(messages) if rank != comm.rank)
    await comm.work(sum(others))
    shares = [
        pieces[rank] if rank == comm.rank else call.decode(message, width, codec)
        for rank, message in enumerate(messages)
    ]
    with comm.stage("unpack"):
        return fold(shares, call.operation)


async def allgather_regions(
    call: Call,
    region: Vector,
    boundaries: Sequence[int],
    capacities: Sequence[int],
    *,
    ring: bool = False,
) -> Vector:
    """Return the whole vector: dense if any region is dense, else sparse.

    Args:
        call: of which this is the last phase.
        region: this rank's, in the form in which it shall travel.
        boundaries: P + 1 ascending cuts of ``[0, size)``.
        capacities: the most bytes of each rank's region.
        ring: pass regions around a ring, which sends nothing twice, instead of disseminating them.

    Cost: ceil(log2 P) messages, on a ring P - 1; the other ranks' regions are received.
    """
    comm = call.comm
    encoded = call.encode(region, comm.world_size, start=boundaries[comm.rank])
    gather = comm.ring_allgatherv if ring else comm.allgatherv
    messages = await gather(encoded.payload, capacities, "allgather", call.framing)
    regions = [
        encoded.decoded if rank == comm.rank else call.decode(messages[rank], stop - start)
        for rank, (start, stop) in enumerate(pairwise(boundaries))
    ]
    sparse = [r for r in regions if isinstance(r, SparseVector)]
    if len(sparse) < len(regions):
        return DenseVector(torch.cat([call.densify(r).values for r in regions]))
    placed = [r.embed(start, call.size) for r, start in zip(sparse, boundaries, strict=False)]
    return SparseVector.join(placed)


def stream_bytes(entries: float, size: int) -> float:
    """Return the bytes of a message: header, and coo entries or all elements, what is shorter."""
    return HEADER_BYTES + min(ENTRY_BYTES * entries, WORD_BYTES * size)


def stream_work(messages: int, nbytes: float) -> Cost:
    """Return the cost where every message sent was encoded once, and every one received decoded."""
    entries = nbytes / ENTRY_BYTES
    return Cost(messages, nbytes, encoded=entries, decoded=entries, turns=messages)


def split_cost(
    job: Job, local: Codec[SparseVector] | None = None, dense: float | None = None
) -> Cost:
    """Return the cost of splitting k entries, folding, and gathering the regions of the result.

    Args:
        job: the exchange; entries are spread evenly over the regions.
        local: wire format of the first half; None: coo.
        dense: bytes of the result, where it is dense.
    """
    peers, ranks = job.world_size - 1, job.world_size
    piece = HEADER_BYTES + ENTRY_BYTES * job.k / ranks
    if local is not None:
        piece = local.nbytes(round(job.k / ranks), -(-job.size // ranks))
    entries = job.summed if dense is None else 0.0
    body = ENTRY_BYTES * entries if dense is None else dense
    nbytes = peers * piece + peers * (HEADER_BYTES + body / ranks)
    split, turns = job.k * job.share, 1 + job.rounds
    encoded, decoded = split + entries / ranks, split + entries * job.share
    return Cost(peers + job.rounds, nbytes, encoded=encoded, decoded=decoded, turns=turns)


def _difference(after: Vector, before: Vector) -> SparseVector:
    """Return ``after - before``, of two vectors in the same form."""
    if isinstance(after, SparseVector) and isinstance(before, SparseVector):
        negative = SparseVector(before.indices, -before.values, before.size)
        return SparseVector.merge([after, negative])
    return SparseVector.from_dense(after.to_dense() - before.to_dense())
