"""The base of SparCML's collectives, which reduce streams; a stream becomes dense if that is shorter."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import final

import torch
from torch import Tensor

from sparsync.collectives.collective import Collective, Reduced, check_cap, less, most_entries
from sparsync.collectives.costs import ENTRY_BYTES, WORD_BYTES, Cost
from sparsync.errors import ConfigurationError
from sparsync.reduction import SUM, Reduction, combine, densify, fold, neutral_absent, reduction
from sparsync.sparse import DenseVector, SparseVector, Vector
from sparsync.transports.communicator import Communicator
from sparsync.wire.codec import HEADER_BYTES, Encoded, MessageFraming, decode_as
from sparsync.wire.coo import StreamCodec
from sparsync.wire.messages import join_messages, sum_messages

__all__ = ["Call", "StreamCollective", "relayed", "stream_bytes"]


class StreamCollective(Collective):
    """The base class of collectives that reduce streams: vectors in sparse or dense form (section 5.1).

    Args:
        codec: wire format (default: coo, or dense where that is shorter); the rank that rounds a value
            keeps the error.
        op: a name in ``sparsync.reduction.OPERATIONS``, or a ``Reduction``.
        cap: a rank sends at most ``cap * k`` entries; with None, it sends all.

    Raises:
        ConfigurationError: the operation is unknown; the cap is not positive; or a cap is given although
            the operation is not a sum.

    Attributes:
        keep_error: whether the rank that rounds a value keeps the error; if False, no rank keeps it, and
            it is reported as lost.
    """

    keep_error = True

    def __init__(
        self,
        codec: StreamCodec | None = None,
        *,
        op: str | Reduction = "sum",
        cap: float | None = 1.0,
    ) -> None:
        check_cap(cap, type(self).__name__)
        self.codec, self.operation, self.cap = codec or StreamCodec(), reduction(op), cap
        if cap is not None and self.operation is not SUM:
            raise ConfigurationError(
                f"{type(self).__name__}: cap is {cap} with operation '{self.operation.name}', but "
                "a cap keeps the largest magnitudes, and only a sum is meaningful without the "
                "rest; give "
                "cap=None"
            )

    async def reduce(self, comm: Communicator, selected: Vector, k: int, step: int) -> Reduced:
        """Reduce the entries of all ranks, at most as many per rank as the cap allows.

        Raises:
            ConfigurationError: the operation is not defined for the dtype; the codec would round values
                although the operation is not a sum; a vector of integers has more entries than the cap.
        """
        # ``most`` is equal on all ranks, so they agree on capacities and on the switch to dense
        most = most_entries(k, self.cap, selected.size)
        call = Call(comm, self, self._taken(selected, most), most, step)
        return call.reduced(call.mine if comm.world_size == 1 else await self.total(call))

    @abstractmethod
    async def total(self, call: Call) -> Vector:
        """Return the reduction over all ranks; there are at least two."""

    def _taken(self, selected: Vector, most: int) -> Vector:
        """Return the entries to reduce: no neutral elements, and at most ``most``."""
        # A missing element stands for the operation's neutral element (5.2), not for zero: for a product,
        # zeros must be sent, but ones need not be.
        name, dtype = type(self).__name__, selected.values.dtype
        neutral = self.operation.check(dtype)
        if self.operation is not SUM and not self.codec.is_exact(dtype):
            raise ConfigurationError(
                f"{name}: the codec rounds {dtype}, and only sums may be rounded; use an exact "
                f"codec with operation '{self.operation.name}', e.g. StreamCodec()"
            )
        if self.result == "whole":
            return selected
        if isinstance(selected, DenseVector):
            sparse = SparseVector.from_dense(selected.values, neutral)
        else:
            stored = selected.values != neutral
            sparse = selected if bool(stored.all()) else selected.keep(stored)
        if sparse.nnz > most and not dtype.is_floating_point:
            raise ConfigurationError(
                f"{name}: got {sparse.nnz} entries of {dtype}, and cap={self.cap} takes {most}, but "
                "integers are not cut by magnitude; give cap=None"
            )
        return sparse.top(most)


@final
class Call:
    """One rank's call of a collective; it contributes ``mine``, and no rank has more than ``most``."""

    def __init__(
        self, comm: Communicator, collective: StreamCollective, mine: Vector, most: int, step: int
    ) -> None:
        self.comm, self.mine, self.most, self.step = comm, mine, most, step
        self.codec, self.operation = collective.codec, collective.operation
        self.size, self.dtype = mine.size, mine.values.dtype
        self.framing = MessageFraming(self.codec)
        self.exact, self.keep_error = self.codec.is_exact(self.dtype), collective.keep_error
        self._errors: list[SparseVector] = []  # this rank's rounding errors: given minus decoded

    def encode(
        self,
        vector: Vector,
        turn: int,
        *,
        source: int | None = None,
        start: int = 0,
        keep: bool = True,
        codec: StreamCodec | None = None,
    ) -> Encoded[Vector]:
        """Encode a vector, and record this rank's rounding error.

        Args:
            vector: a region of the whole vector that begins at ``start``.
            turn: distinguishes the messages of one source, for codecs that draw random numbers.
            source: the rank whose random numbers are used (default: this one).
            start: first index of the region.
            keep: whether to record the error; False if a different rank encodes the same vector and does.
            codec: replaces the call's codec.
        """
        # Every message in a step has a different seed: QSGD is unbiased over independent draws, and
        # rounding twice with equal draws would change the expectation.
        source = self.comm.rank if source is None else source
        codec = codec or self.codec
        with self.comm.stage("pack"):
            seeded = codec.seeded(source + turn * self.comm.world_size, self.step)
            encoded = seeded.encode(vector)
        if keep and not codec.is_exact(self.dtype):
            # embed the error in a vector of the whole size, because ``reduced`` subtracts it from the
            # whole delivered vector, or reports it
            error = _difference(vector, encoded.decoded).embed(start, self.size)
            self._errors.append(error)
        return encoded

    def decode(self, message: Tensor, size: int, codec: StreamCodec | None = None) -> Vector:
        """Decode a whole message; the result is on the device of this rank's values."""
        with self.comm.stage("unpack"):
            vector = decode_as(codec or self.codec, message, size, self.dtype)
        return vector.to(self.mine.values.device)

    async def receive(self, source: int, capacity: int, size: int, phase: str) -> Vector:
        """Receive a message and decode it."""
        return await self._arrived(
            await self.comm.irecv(source, capacity, phase, self.framing), size
        )

    async def swap(
        self, payload: Tensor, dest: int, source: int, capacity: int, size: int, phase: str
    ) -> Vector | Tensor:
        """Send a message and receive one at the same time; return the received one for ``combine``."""
        receiving = self.comm.irecv(source, capacity, phase, self.framing)
        sending = self.comm.isend(payload, dest, phase, self.framing)
        message: Tensor = await receiving
        await sending
        # keep the message encoded, because ``combine`` sums a message and a vector in one C++ pass
        if self.operation is SUM and self._is_sparse(message):
            await self.comm.work(message.numel())
            return message
        return await self._arrived(message, size)

    async def _arrived(self, message: Tensor, size: int) -> Vector:
        theirs = self.decode(message, size)
        await self.comm.work(message.numel(), dense=isinstance(theirs, DenseVector))
        return theirs

    def combine(self, lower: Vector | Tensor, higher: Vector | Tensor) -> Vector:
        """Return ``lower op higher``, dense above the codec's limit; one operand may be a message."""
        # The limit applies to the operands' entries, not to the result's (5.1: |H1| + |H2| > delta).
        # Their number is known before adding, and equal on all ranks with the same operands.
        one, other = (lower, higher) if isinstance(higher, Tensor) else (higher, lower)
        assert not isinstance(one, Tensor)
        limit = self.codec.limit(one.size, self.dtype)
        if isinstance(other, Tensor):
            entries = self.codec.read_header(other).entries
            if isinstance(one, SparseVector) and (limit is None or one.nnz + entries <= limit):
                both = [v for v in (lower, higher) if not isinstance(v, DenseVector)]
                return self.fold(both, one, self.codec)
            other = self.decode(other, one.size)
        vectors = (one, other) if one is lower else (other, one)
        with self.comm.stage("unpack"):
            return combine(*vectors, self.operation, limit)

    def _is_sparse(self, message: Tensor) -> bool:
        return self.codec.read_header(message).format == self.codec.sparse.format

    def fold(
        self, shares: Sequence[SparseVector | Tensor], own: SparseVector, codec: StreamCodec
    ) -> Vector:
        """Return the left fold of a region's shares, including ``own``; they are messages or vectors."""
        if self.operation is SUM:
            with self.comm.stage("unpack"):
                return sum_messages(codec.sparse, shares, own)
        vectors = [self.decode(s, own.size, codec) if isinstance(s, Tensor) else s for s in shares]
        with self.comm.stage("unpack"):
            return fold(vectors, self.operation)

    def settle(self, vector: Vector) -> Vector:
        """Return a vector in its shorter form: dense if it has more entries than the codec's limit."""
        limit = self.codec.limit(vector.size, self.dtype)
        return vector if limit is None or vector.nnz <= limit else self.densify(vector)

    def densify(self, vector: Vector) -> DenseVector:
        """Return the vector in dense form."""
        return densify(vector, self.operation)

    def capacity(self, ranks: int, width: int, *, dense: bool = False) -> int:
        """Return a bound on the bytes of a message for ``width`` elements from ``ranks`` ranks.

        The width does not limit the number of entries: whether a sum becomes dense depends on the
        operands' entries, whose number may exceed the width.
        """
        if dense:
            return self.codec.dense.nbytes(width, width, self.dtype)
        return self.codec.nbytes(min(self.most, width) * ranks, width, self.dtype)

    async def allgather(
        self,
        region: Vector,
        boundaries: Sequence[int],
        *,
        dense: bool = False,
        ring: bool = False,
    ) -> Vector:
        """Gather every rank's region; return the whole vector, which is dense if any region is dense.

        With ``dense``, all regions are dense.  With ``ring``, regions are not disseminated but passed
        around a ring, which sends nothing twice.
        """
        # each owner chooses its region's form by the number of entries; the header states this form, so
        # ranks need no extra round to agree
        comm, spans = self.comm, list(pairwise(boundaries))
        encoded = self.encode(region, comm.world_size, start=boundaries[comm.rank])
        capacities = [
            self.capacity(comm.world_size, stop - start, dense=dense) for start, stop in spans
        ]
        messages = await comm.allgatherv(
            encoded.payload, capacities, "allgather", self.framing, ring=ring
        )
        if isinstance(self.mine, SparseVector) and all(map(self._is_sparse, messages)):
            with comm.stage("unpack"):
                return join_messages(self.codec.sparse, messages, spans, self.mine)
        regions = [
            # use this rank's region as the other ranks decode it
            encoded.decoded if rank == comm.rank else self.decode(messages[rank], stop - start)
            for rank, (start, stop) in enumerate(spans)
        ]
        return DenseVector(torch.cat([self.densify(r).values for r in regions]))

    def reduced(self, total: Vector) -> Reduced:
        """Return the total, and this rank's delivered entries: its share minus its rounding errors.

        If no rank keeps rounding errors, the whole share counts as delivered, and the errors count as
        lost.  The total shares no memory with ``delivered``, because the caller may scale it in place.
        """
        # decoded messages do not state the value of absent elements, so set it here
        mine, total = (neutral_absent(vector, self.operation) for vector in (self.mine, total))
        if total.values.untyped_storage().data_ptr() == mine.values.untyped_storage().data_ptr():
            total = replace(total, values=total.values.clone())
        if not self._errors:
            return Reduced(total, mine)
        if not self.keep_error:
            return Reduced(total, mine, SparseVector.merge(self._errors))
        if isinstance(mine, DenseVector):
            mine = SparseVector.from_dense(mine.values)
        return Reduced(total, less(mine, self._errors))


def _difference(one: Vector, other: Vector) -> SparseVector:
    """Return ``one - other`` for two vectors in the same form."""
    if isinstance(one, SparseVector) and isinstance(other, SparseVector):
        return less(one, [other])
    return SparseVector.from_dense(one.to_dense() - other.to_dense())


def stream_bytes(entries: float, size: int) -> float:
    """Return the number of bytes of a message: its header, and coo entries or all elements if shorter."""
    return HEADER_BYTES + min(ENTRY_BYTES * entries, WORD_BYTES * size)


def relayed(messages: int, nbytes: float) -> Cost:
    """Return the cost if every message is encoded once by its sender and decoded once by its receiver."""
    entries = nbytes / ENTRY_BYTES
    return Cost(messages, nbytes, encoded=entries, decoded=entries, turns=messages)
