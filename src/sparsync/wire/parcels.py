"""Parcels: one message per owner at a time, for elements that are dealt (``kernels.deal``).

Three compositions of a codec with dealing and merging.  For packed float32 on the CPU each is one pass
in C++ (``native/exchange.cpp``), bit-equal: eight ranks that share two cores spend more time on the
intermediate tensors than on anything else.  Where C++ finds a share that exceeds its message, or a
malformed message (whose error the codec knows how to word), the composition does it again.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.errors import WireFormatError
from sparsync.kernels import native
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
    if _in_cpp(codec, vector):
        pair = vector.indices.contiguous(), vector.values.contiguous()
        most = min(limit, vector.nnz, width)
        stride, style = codec.nbytes(most, width), _style(codec, width)
        packed = native.deal_and_pack(*pair, world_size, rank, most, style, stride)
        if packed is not None:
            return Parcels(packed[0], packed[1], SparseVector(*packed[2], width))
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
    if _in_cpp(codec, own, messages):
        pair = own.indices.contiguous(), own.values.contiguous()
        summed = native.unpack_and_sum(messages, rank, *pair, _style(codec, own.size), k)
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
    if _in_cpp(codec, like, messages):
        joined = native.unpack_and_undeal(messages, _style(codec, width), size, k)
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


def _in_cpp(
    codec: Codec[SparseVector], vector: SparseVector, messages: Sequence[Tensor] = ()
) -> TypeGuard[Packed]:
    """Tell whether C++ has the codec, and takes the tensors."""
    return (
        isinstance(codec, Packed)
        and kernels.backend_of(vector.values) is native
        and kernels.backend_of(vector.indices, dtype=torch.int64) is native
        and all(message.is_cpu and message.dtype == torch.uint8 for message in messages)
    )


def _style(codec: Packed, width: int) -> native.Style:
    """Return how C++ writes messages of float32 values for regions of ``width`` elements."""
    header = codec.header(0, width, torch.float32)
    first, second = struct.unpack("<2Q", header.pack())
    return first, second, header.option, header.detail, width
