"""Parcels: one message per owner at a time, for elements that are dealt (``kernels/dealing.py``).

Three compositions of a codec with dealing and merging.  For packed float32 on the CPU each is one
pass in C++ (``kernels/fused.py``), bit-equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.errors import WireFormatError
from sparsync.kernels import fused
from sparsync.sparse import SparseVector
from sparsync.wire.base import Codec
from sparsync.wire.packed import Packed

__all__ = ["Parcels", "decode_sum", "decode_undealt", "encode_dealt"]


class Parcels(NamedTuple):
    """The messages of a rank to all owners, and the share that it keeps.

    Attributes:
        messages: one per owner; empty for the rank itself.
        arriving: `[nnz]` the values that owners see, in the order of the entries; 0 where an entry
            did not fit its message.
        own: the share of the rank itself, indexed within its owner, not rounded.
    """

    messages: list[Tensor]
    arriving: Tensor
    own: SparseVector


def encode_dealt(
    codec: Codec[SparseVector], vector: SparseVector, world_size: int, rank: int, limit: int
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
    width = -(-vector.size // world_size)
    if isinstance(codec, Packed):
        pair, style = (vector.indices, vector.values), _style(codec, width)
        packed = fused.deal_and_pack(*pair, world_size, rank, limit, style)
        if packed is not None:
            own = SparseVector(packed.own_indices, packed.own_values, width)
            return Parcels(packed.messages, packed.arriving, own)
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
    codec: Codec[SparseVector], messages: Sequence[Tensor], rank: int, own: SparseVector, k: int
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
    if isinstance(codec, Packed):
        style = _style(codec, own.size)
        summed = fused.unpack_and_sum(messages, rank, own.indices, own.values, style, k)
        if summed is not None:
            return SparseVector(*summed, own.size)
    device = own.values.device
    shares = [
        own if source == rank else codec.decode(message, own.size).to(device)
        for source, message in enumerate(messages)
    ]
    return SparseVector.merge(shares).top(k)


def decode_undealt(
    codec: Codec[SparseVector], messages: Sequence[Tensor], size: int, k: int, like: SparseVector
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
    if isinstance(codec, Packed):
        joined = fused.unpack_and_undeal(messages, like.values, _style(codec, width), size, k)
        if joined is not None:
            return SparseVector(*joined, size)
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


def _style(codec: Packed, width: int) -> fused.Style:
    """Return the style of messages of float32 values for regions of ``width`` elements."""
    header = codec.header(0, width, torch.float32)
    return fused.Style(header.pack(), header.option, header.detail, width)
