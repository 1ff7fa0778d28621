"""Parcels: one message per owner at a time, for elements that are dealt (``kernels/dealing.py``).

Three compositions of a codec with dealing and merging.  For packed float32 on the CPU they are one
pass in C++ each (``native/exchange.cpp``), bit-equal: eight ranks that share two cores spend more time
on intermediate tensors than on anything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.errors import ConfigurationError, WireFormatError
from sparsync.kernels import native
from sparsync.sparse import SparseVector
from sparsync.wire.base import Codec
from sparsync.wire.packed import Packed

__all__ = ["Parcels", "decode_sum", "decode_undealt", "encode_dealt"]

_TILE = 1 << 16  # entries that C++ writes before it drops what ties at the end (native/scan.h)


class Parcels(NamedTuple):
    """What a rank gives away.

    Attributes:
        messages: one per owner; empty for the rank itself.
        arriving: `[nnz]` the values that owners see, in the order of the entries; 0 where an entry
            did not fit its message.
        own: the share that stays, within its owner, not rounded.
    """

    messages: list[Tensor]
    arriving: Tensor
    own: SparseVector


def encode_dealt(
    codec: Codec, vector: SparseVector, world_size: int, rank: int, limit: int
) -> Parcels:
    """Deal a vector's entries and encode a message for every owner but ``rank``.

    Args:
        codec: of the messages.
        vector: the entries.
        world_size: number of owners P; each owns ``ceil(size / P)`` elements.
        rank: who keeps its own share.
        limit: entries that fit one message: of more, the largest.

    Example:
        >>> from sparsync.wire import Coo
        >>> v = SparseVector.from_dense(torch.ones(4))
        >>> parcels = encode_dealt(Coo(), v, world_size=2, rank=0, limit=9)
        >>> [m.numel() for m in parcels.messages], parcels.own.nnz
        ([0, 24], 2)
    """
    if isinstance(codec, Packed) and _native(vector):
        parcels = _deal_and_pack(codec, vector, world_size, rank, limit)
        if parcels is not None:
            return parcels
    width = -(-vector.size // world_size)
    dealt = kernels.deal(vector.indices, world_size)
    values = vector.values[dealt.order]
    seen = torch.zeros_like(values)
    messages, own, start = [], SparseVector.empty(width, values), 0
    for owner, count in enumerate(dealt.counts):
        part = slice(start, start + count)
        entries, there = SparseVector(dealt.local[part], values[part], width), seen[part]
        start += count
        if owner == rank:
            own = entries
            there.copy_(values[part])
            messages.append(torch.empty(0, dtype=torch.uint8))
            continue
        fitting = kernels.top(entries.values, limit) if count > limit else slice(None)
        encoded = codec.encode(entries.keep(fitting))
        there[fitting] = encoded.decoded.values
        messages.append(encoded.payload)
    arriving = torch.empty_like(seen)
    arriving[dealt.order] = seen
    return Parcels(messages, arriving, own)


def decode_sum(
    codec: Codec, messages: Sequence[Tensor], rank: int, own: SparseVector, k: int
) -> SparseVector:
    """Sum what all ranks sent here and the own share, and keep the k largest sums.

    Args:
        codec: of the messages.
        messages: one per rank; that of ``rank`` is ignored.
        rank: where in the sum, a left fold in rank order, the own share has its place.
        own: what was not sent.
        k: how many sums to keep; ties go to the lower index.

    Raises:
        WireFormatError: a message is malformed.
    """
    if isinstance(codec, Packed) and _native(own, *messages):
        room = min(k, own.size)
        indices, values = _room(room, torch.int64), _room(room, torch.float32)
        mine = own.indices.data_ptr(), own.values.data_ptr(), own.nnz
        ends, isa = (indices.data_ptr(), values.data_ptr()), native.chosen()
        count = native.EXTENSION.unpack_and_sum(
            _raw(messages), rank, *mine, codec.style(own.size), k, *ends, isa
        )
        if count >= 0:
            return SparseVector(indices[:count], values[:count], own.size)
    device = own.values.device
    shares = [
        own if source == rank else codec.decode(message, own.size).to(device)
        for source, message in enumerate(messages)
    ]
    return SparseVector.merge(shares).top(k)


def decode_undealt(
    codec: Codec, messages: Sequence[Tensor], size: int, k: int, like: SparseVector
) -> SparseVector:
    """Join what every owner sent to one vector, and keep its k largest; zeros are not stored.

    Args:
        codec: of the messages.
        messages: one per owner, in rank order.
        size: elements of the whole vector.
        k: how many entries to keep; ties go to the lower index.
        like: any vector of the result's dtype and device.

    Raises:
        WireFormatError: a message is malformed, or names an element beyond ``size``.
    """
    width, device = -(-size // len(messages)), like.values.device
    if isinstance(codec, Packed) and _native(like, *messages):
        room = min(size, k + _TILE, sum(message.numel() for message in messages))
        indices, values = _room(room, torch.int64), _room(room, torch.float32)
        ends, isa = (indices.data_ptr(), values.data_ptr()), native.chosen()
        count = native.EXTENSION.unpack_and_undeal(
            _raw(messages), codec.style(width), size, k, *ends, isa
        )
        if count >= 0:
            return SparseVector(indices[:count], values[:count], size)
    pieces = []
    for owner, message in enumerate(messages):
        piece = codec.decode(message, width).to(device)
        indices = kernels.undeal(piece.indices, owner, len(messages))
        if indices.numel() and int(indices[-1]) >= size:
            raise WireFormatError(
                f"rank {owner} sent an element beyond the vector's {size}; it is corrupt or hostile"
            )
        stored = piece.values != 0
        pieces.append(SparseVector(indices[stored], piece.values[stored], size))
    return SparseVector.merge(pieces).top(k)


def _room(count: int, dtype: torch.dtype) -> Tensor:
    """Allocate, whatever the user's default dtype and device are; what is not written costs nothing."""
    return torch.empty(count, dtype=dtype, device="cpu")


def _raw(messages: Sequence[Tensor]) -> list[tuple[int, int]]:
    return [(message.data_ptr(), message.numel()) for message in messages]


def _native(vector: SparseVector, *messages: Tensor) -> bool:
    values = vector.values
    alike = values.dtype == torch.float32 and vector.indices.dtype == torch.int64
    on_cpu = values.is_cpu and all(message.is_cpu for message in messages)
    return alike and on_cpu and native.chosen() != "torch"


def _deal_and_pack(
    codec: Packed, vector: SparseVector, world_size: int, rank: int, limit: int
) -> Parcels | None:
    """Do as ``encode_dealt`` in one pass; None where a share exceeds the limit."""
    width, nnz = -(-vector.size // world_size), vector.nnz
    limit = min(limit, nnz, width)
    stride = codec.nbytes(limit, width, torch.float32)
    messages, lengths = _room(world_size * stride, torch.uint8), _room(world_size, torch.int64)
    arriving, own_values = _room(nnz, torch.float32), _room(nnz, torch.float32)
    own_indices = _room(nnz, torch.int64)
    indices, values = vector.indices.contiguous(), vector.values.contiguous()
    try:
        mine = native.EXTENSION.deal_and_pack(
            indices.data_ptr(),
            values.data_ptr(),
            nnz,
            world_size,
            rank,
            limit,
            codec.style(width),
            (messages.data_ptr(), stride, lengths.data_ptr()),
            arriving.data_ptr(),
            own_indices.data_ptr(),
            own_values.data_ptr(),
            native.chosen(),
        )
    except ValueError as error:
        raise ConfigurationError(f"entries cannot be packed: {error}") from error
    if mine < 0:
        return None
    own = SparseVector(own_indices[:mine], own_values[:mine], width)
    cut = [messages[i * stride : i * stride + n] for i, n in enumerate(lengths.tolist())]
    return Parcels(cut, arriving, own)
