"""Packed format: 8 to 12 bits per index and 8 to 32 per value, where coo uses 64 per entry.

``encode_dealt``, ``decode_sum`` and ``decode_undealt`` combine a codec with dealing (``kernels.deal``)
and merging.  For packed float32 on the CPU, each of them is a single C++ pass (``native/exchange.cpp``)
with the same bits, because eight ranks on two cores would spend most of their time on the intermediate
tensors.  If C++ finds a malformed message, or more entries than a message may hold, the Python code
repeats the work.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeGuard, final

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.errors import ConfigurationError, WireFormatError
from sparsync.kernels import native, packing
from sparsync.sparse import SparseVector
from sparsync.transports.ledger import Parts
from sparsync.wire.codec import (
    LONG_HEADER_BYTES,
    Codec,
    Encoded,
    Header,
    check_block,
    decode_as,
)

__all__ = ["Packed", "Parcels", "decode_sum", "decode_undealt", "encode_dealt", "in_cpp"]

_FORMS = MappingProxyType({"bf16": packing.BF16, "int8": packing.INT8, "fp32": packing.FP32})
# dtypes whose values arrive unchanged
_EXACT = MappingProxyType(
    {
        "bf16": (torch.bfloat16,),
        "int8": (),
        "fp32": (torch.float32, torch.bfloat16, torch.float16),
    }
)


@final
@dataclass(eq=False)
class Packed(Codec[SparseVector]):
    """Writes a header, rounded values and Elias-Fano indices; see ``docs/wire-format.md``.

    ``decoded`` holds the values that the receiver sees, in the vector's own dtype; entries that round to
    zero are kept.  The caller keeps the difference in the residual.

    Args:
        values: "bf16" sends the nearest bfloat16 (ties go to even), but keeps finite values finite;
            "int8" sends multiples of ``max |x| / 127`` over ``block`` consecutive entries, where a
            NaN or Inf entry arrives as NaN and does not affect its block's scale; "fp32" sends
            float32.
        block: entries that share a scale under int8, 1 to 65535.

    Cost: 16 bytes for the header.  The indices take nnz (l + 1) + ceil(size / 2^l) bits, where l =
    floor(log2(size / nnz)).  A value takes 16 bits (bf16), 32 bits (fp32), or 8 bits plus 32 per block
    (int8).   State: none.
    Differs from the paper: 23 to 28 bits per entry at a density of 1 %, instead of two words (Ok-Topk's
    COO).

    Example:
        >>> v = SparseVector.from_dense(torch.tensor([0.0, 1.0, 3.0, 0.0]))
        >>> encoded = Packed().encode(v)
        >>> encoded.payload[16:].tolist(), Packed().decode(encoded.payload, 4).values.tolist()
        ([128, 63, 64, 64, 21], [1.0, 3.0])

    References: Elias, JACM 21, 1974; Fano, MIT memo 61, 1971; Dettmers, ICLR 2016, for 8-bit values.
    """

    format = 2
    options = tuple(_FORMS.values())
    header_bytes = LONG_HEADER_BYTES

    values: Literal["bf16", "int8", "fp32"] = "bf16"
    block: int = field(default=128, kw_only=True)

    def __post_init__(self) -> None:
        if self.values not in _FORMS:
            raise ConfigurationError(
                f"values={self.values!r} is unknown; use one of {', '.join(_FORMS)}"
            )
        check_block(self.block)
        self.option = _FORMS[self.values]
        self.detail = self.block if self.option == packing.INT8 else 0

    def is_exact(self, dtype: torch.dtype) -> bool:
        """Return whether values of ``dtype`` arrive unchanged."""
        return dtype in _EXACT[self.values]

    def encode(self, vector: SparseVector) -> Encoded[SparseVector]:
        """Encode a vector; ``decoded`` has the same indices and rounded values."""
        start, size = self.start(vector), vector.size
        style = size, self.option, self.block
        payload, rounded = packing.pack(start, vector.indices, vector.values, *style)
        return Encoded(payload, SparseVector(vector.indices, rounded, size))

    def decode(self, payload: Tensor, size: int) -> SparseVector:
        """Decode a message; check all bits except the bits of the values, which may be anything."""
        header, body = self.body(payload, size)
        indices, values = packing.unpack(body, header.entries, size, header.option, header.detail)
        return SparseVector(indices, values.to(header.dtype), size)

    def is_legal(self, header: Header) -> bool:
        """Return whether the header is legal: it has a block length if and only if values are int8."""
        return (header.detail > 0) == (header.option == packing.INT8)

    def layout(self, header: Header) -> Parts:
        """Return 16 bytes of header, and the numbers of bytes of indices and values."""
        _, _, nnz, form, size, block = header
        assert size is not None
        return Parts(
            LONG_HEADER_BYTES, packing.index_bytes(nnz, size), packing.value_bytes(nnz, form, block)
        )


# ---- messages to the owners of dealt elements --------------------------------------------------------


class Parcels(NamedTuple):
    """A rank's messages to all owners, and the share that it keeps."""

    messages: list[Tensor]  # one per owner; empty for the rank itself
    arriving: Tensor  # [nnz] the values that owners see; 0 for entries that did not fit a message
    own: SparseVector  # the rank's own share, not rounded, with indices within the share


def encode_dealt(
    codec: Codec[SparseVector], vector: SparseVector, world_size: int, rank: int, limit: int
) -> Parcels:
    """Deal a vector's entries to their owners, and encode a message for every owner except ``rank``.

    Each of the P owners has ``ceil(size / P)`` elements.  A message holds at most ``limit`` entries: if
    there are more, the largest.

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
        entries = SparseVector(dealt.local[part], values[part], width)
        start += count
        if owner == rank:
            own, seen[part] = entries, values[part]
            messages.append(torch.empty(0, dtype=torch.uint8, device="cpu"))
            continue
        # entries that do not fit stay 0 in ``seen``, i.e. undelivered, so the residual keeps them
        fitting = kernels.top(entries.values, limit) if count > limit else slice(None)
        encoded = codec.encode(entries.keep(fitting))
        seen[part][fitting] = encoded.decoded.values
        messages.append(encoded.payload)
    arriving = torch.empty_like(seen)
    arriving[dealt.order] = seen
    return Parcels(messages, arriving, own)


def decode_sum(
    codec: Codec[SparseVector], messages: Sequence[Tensor], rank: int, own: SparseVector, k: int
) -> SparseVector:
    """Sum all ranks' messages and this rank's own share, and keep the k largest sums.

    The sum is a left fold in rank order, with this rank's share in place of its message.  The bits of
    the sum depend neither on the order in which messages arrive nor on the rank that owns the region.
    """
    # a single share may store zeros, which C++ would drop and ``SparseVector.merge`` keeps
    if len(messages) > 1 and _in_cpp(codec, own, messages):
        pair = own.indices.contiguous(), own.values.contiguous()
        summed = native.unpack_and_sum(messages, rank, *pair, _style(codec, own.size), k)
        if summed is not None:
            return SparseVector(*summed, own.size)
    device, dtype = own.values.device, own.values.dtype
    shares = [
        own if source == rank else decode_as(codec, message, own.size, dtype).to(device)
        for source, message in enumerate(messages)
    ]
    return SparseVector.merge(shares).top(k)


def decode_undealt(
    codec: Codec[SparseVector],
    messages: Sequence[Tensor],
    k: int,
    rank: int,
    share: SparseVector,
    sent: SparseVector,
) -> tuple[SparseVector, SparseVector]:
    """Join the messages of all owners into one vector, and keep its k largest entries; drop zeros.

    Returns:
        The total, and the part of it that ``rank`` delivered.  This part consists of two vectors: the
        entries that it ``sent``, as the owners decoded them, and the rounding error of its own message,
        which holds the sums of its region (``share``).  So the owner of a region accounts for the
        rounding of that region's sums.
    """
    size, width, device = sent.size, share.size, share.values.device
    if _in_cpp(codec, share, messages):
        pair, sums = (sent.indices.contiguous(), sent.values), share.values.contiguous()
        style = _style(codec, width)
        joined = native.unpack_and_undeal(messages, style, size, k, rank, sums, pair)
        if joined is not None:
            return SparseVector(*joined[0], size), SparseVector(*joined[1], size)
    pieces = []
    for owner, message in enumerate(messages):
        piece = decode_as(codec, message, width, share.values.dtype).to(device)
        if owner == rank:
            added = piece.values - share.values
        indices = kernels.undeal(piece.indices, owner, len(messages))
        # P regions of ceil(size / P) elements have up to P - 1 elements too many, so a message's last
        # index may lie beyond the end of the vector
        if indices.numel() and int(indices[-1]) >= size:
            raise WireFormatError(
                f"rank {owner} sent an element beyond the vector's {size}; it is corrupt or hostile"
            )
        stored = piece.values != 0
        pieces.append(SparseVector(indices[stored], piece.values[stored], size))
    total = SparseVector.merge(pieces).top(k)
    error = SparseVector(kernels.undeal(share.indices, rank, len(messages)), added, size)
    return total, SparseVector.merge([sent, error], within=total.indices)


def _in_cpp(
    codec: Codec[SparseVector], vector: SparseVector, messages: Sequence[Tensor] = ()
) -> TypeGuard[Packed]:
    """Return whether the C++ kernels can handle this codec and these tensors."""
    return isinstance(codec, Packed) and in_cpp([vector], messages)


def in_cpp(vectors: Sequence[SparseVector], messages: Sequence[Tensor]) -> bool:
    """Return whether the C++ kernels can handle these vectors and messages."""
    return all(
        kernels.backend_of(vector.values) is native
        and kernels.backend_of(vector.indices, dtype=torch.int64) is native
        for vector in vectors
    ) and all(m.is_cpu and m.dtype == torch.uint8 and m.is_contiguous() for m in messages)


def _style(codec: Packed, width: int) -> native.Style:
    """Return the parameters for C++ to write float32 messages for regions of ``width`` elements."""
    header = codec.header(0, width, torch.float32)
    first, second = struct.unpack("<2Q", header.pack())
    return first, second, header.option, header.detail, width
