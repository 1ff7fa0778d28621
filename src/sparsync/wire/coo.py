"""Coordinate format: 4 bytes of index and the value as it is, per entry (two words in float32)."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from sparsync.kernels.packing import unordered, view_as
from sparsync.sparse import SparseVector
from sparsync.transports.ledger import Parts
from sparsync.wire.base import HEADER_BYTES, Codec, Encoded, Header

__all__ = ["INDEX_BYTES", "Coo", "pack_words", "unpack_words"]

INDEX_BYTES = 4


@final
class Coo(Codec[SparseVector]):
    """Header, then all indices (u32, ascending), then all values: the papers' format.

    Cost: 8 + 8 nnz bytes for float32.   State: none.
    Differs from the paper: indices are relative to the region, so regions may exceed what 32 bits
    address in the whole vector; one header word more than "2k words".

    Example:
        >>> v = SparseVector.from_dense(torch.tensor([0.0, 1.0, 0.0]))
        >>> Coo().encode(v).payload.tolist()
        [81, 1, 1, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 128, 63]

    References: Li & Hoefler, Ok-Topk, PPoPP 2022, section 2 ("COO").
    """

    format = 1
    exact = True

    def encode(self, vector: SparseVector) -> Encoded[SparseVector]:
        """Encode; ``decoded`` is the vector itself."""
        start = self.start(vector)
        return Encoded(self.message(start, pack_words(vector.indices), vector.values), vector)

    def decode(self, payload: Tensor, size: int) -> SparseVector:
        """Decode and check count, order and range."""
        header, body = self.body(payload, size)
        middle = INDEX_BYTES * header.entries
        indices = unpack_words(body[:middle], size)
        return SparseVector(indices, view_as(body[middle:], header.dtype), size)

    def layout(self, header: Header) -> Parts:
        """Return 8 bytes of header, 4 per index, the dtype's width per value."""
        count = header.entries
        return Parts(HEADER_BYTES, INDEX_BYTES * count, header.dtype.itemsize * count)


def pack_words(indices: Tensor) -> Tensor:
    """Return int64 indices below 2^32 as u32."""
    return indices.to(torch.uint32)


def unpack_words(raw: Tensor, size: int) -> Tensor:
    """Read u32 indices as int64.

    Raises:
        WireFormatError: they do not ascend strictly within ``[0, size)``.
    """
    indices = view_as(raw, torch.uint32).to(torch.int64)
    if indices.numel() and (int(indices[-1]) >= size or bool((indices.diff() <= 0).any())):
        raise unordered(size)
    return indices
