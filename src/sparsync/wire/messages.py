"""Write, sum and join messages for regions.

Each function combines a codec with cutting, merging or joining vectors.  For float32 values in coo
and packed messages on the CPU, a C++ pass (``native/messages.cpp``) gives the same bits without the
intermediate vectors.  If C++ finds a malformed message, the Python code repeats the work and raises a
detailed error.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from sparsync.kernels import native
from sparsync.sparse import SparseVector
from sparsync.wire.codec import Codec, decode_as
from sparsync.wire.coo import Coo
from sparsync.wire.packed import Packed, in_cpp

__all__ = ["encode_regions", "join_messages", "sum_messages"]


def encode_regions(
    codec: Codec[SparseVector], vector: SparseVector, boundaries: Sequence[int], own: int
) -> tuple[list[Tensor], SparseVector]:
    """Return a message per region, empty for ``own``, and the unrounded entries in region ``own``.

    Example:
        >>> v = SparseVector.from_dense(torch.ones(4))
        >>> messages, mine = encode_regions(Coo(), v, [0, 1, 4], own=0)
        >>> [m.numel() for m in messages], mine.size
        ([0, 32], 1)
    """
    # only exact codecs use C++: a codec that rounds must return the rounded values for the sender's
    # residual, but the C++ code does not
    layout = _layout(codec, [vector])
    if layout is None or not codec.is_exact(torch.float32):
        parts = vector.split(boundaries)
        none = torch.empty(0, dtype=torch.uint8, device="cpu")
        messages = [
            none if region == own else codec.encode(part).payload
            for region, part in enumerate(parts)
        ]
        return messages, parts[own]
    pair = vector.indices.contiguous(), vector.values.contiguous()
    messages = native.cut_messages(*pair, boundaries, own, layout)
    return messages, vector.split(boundaries[own : own + 2])[0]


def sum_messages(
    codec: Codec[SparseVector], shares: Sequence[SparseVector | Tensor], like: SparseVector
) -> SparseVector:
    """Sum one region's messages and vectors by a left fold in the given order; drop zero sums.

    ``like`` is any vector of the region, on the result's device.
    """
    vectors = [share for share in shares if isinstance(share, SparseVector)]
    messages = [share for share in shares if isinstance(share, Tensor)]
    layout = _layout(codec, [like, *vectors], messages)
    if layout is not None and len(shares) > 1:
        given: list[native.Share] = [
            share
            if isinstance(share, Tensor)
            else (share.indices.contiguous(), share.values.contiguous())
            for share in shares
        ]
        # None means that a message is malformed; the Python code below decodes it again and raises the
        # error
        summed = native.fold_messages(given, layout, like.size)
        if summed is not None:
            return SparseVector(*summed, like.size)
    device = like.values.device
    dtype = like.values.dtype
    decoded = [
        decode_as(codec, s, like.size, dtype) if isinstance(s, Tensor) else s for s in shares
    ]
    return SparseVector.merge([vector.to(device) for vector in decoded])


def join_messages(
    codec: Codec[SparseVector],
    messages: Sequence[Tensor],
    spans: Sequence[tuple[int, int]],
    like: SparseVector,
) -> SparseVector:
    """Decode one message per region ``[start, stop)``, in ascending order, into one vector.

    ``like`` is any vector of the result's size, dtype and device.
    """
    layout = _layout(codec, [like], messages)
    if layout is not None:
        joined = native.join_messages(messages, layout, spans)
        if joined is not None:
            return SparseVector(*joined, like.size)
    pieces = [
        decode_as(codec, message, stop - start, like.values.dtype).embed(start, like.size)
        for message, (start, stop) in zip(messages, spans, strict=True)
    ]
    return SparseVector.join(pieces).to(like.values.device)


def _layout(
    codec: Codec[SparseVector], vectors: Sequence[SparseVector], messages: Sequence[Tensor] = ()
) -> native.Layout | None:
    """Return the message layout for C++, or None if C++ does not support the codec or the tensors."""
    if not isinstance(codec, Coo | Packed) or not in_cpp(vectors, messages):
        return None
    header = codec.header(0, 0, torch.float32)
    return struct.unpack_from("<Q", header.pack())[0], header.option, header.detail
