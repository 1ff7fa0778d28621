"""Coordinate format: 4 bytes of index and the value as it is, per entry (two words in float32)."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError, WireFormatError
from sparsync.sparse import SparseVector
from sparsync.transports.ledger import Parts
from sparsync.wire.base import HEADER_BYTES, Codec, Encoded, Header, first_bytes, pack_header

__all__ = ["Coo"]

_INDEX_BYTES = 4
_INDEX_LIMIT = 1 << 32


@final
class Coo(Codec):
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

    def encode(self, vector: SparseVector) -> Encoded:
        """Encode; ``decoded`` is the vector itself."""
        if vector.size > _INDEX_LIMIT:
            raise ConfigurationError(
                f"coo indices have 32 bits but the region has {vector.size} elements; "
                "use smaller units or more regions"
            )
        header = pack_header(Header(self.format, vector.values.dtype, vector.nnz))
        start = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        indices = _to_unsigned(vector.indices).view(torch.uint8)
        values = vector.values.contiguous().view(-1, 1).view(torch.uint8).flatten()
        payload = torch.cat([start.to(values.device), indices, values])
        return Encoded(payload, vector)

    def decode(self, payload: Tensor, size: int) -> SparseVector:
        """Decode and check count, order and range.

        Raises:
            WireFormatError: the payload is not a coo message for ``size`` elements.
        """
        header = self.check_header(first_bytes(payload, HEADER_BYTES))
        expected = self.nbytes(header.count, size, header.dtype)
        if payload.numel() != expected:
            raise WireFormatError(
                f"a message of {payload.numel()} bytes says that it has {header.count} entries, "
                f"which take {expected} bytes; it is truncated or corrupt"
            )
        middle = HEADER_BYTES + _INDEX_BYTES * header.count
        body = payload.clone() if payload.storage_offset() % 8 else payload  # align the views
        indices = _from_unsigned(body[HEADER_BYTES:middle].view(torch.int32))
        values = _aligned(body[middle:], header.dtype)
        if header.count and (int(indices[-1]) >= size or bool((indices.diff() <= 0).any())):
            raise WireFormatError(
                f"a message's indices are not strictly ascending within [0, {size})"
            )
        return SparseVector(indices, values, size)

    def parts(self, nnz: int, size: int, dtype: torch.dtype) -> Parts:
        """Return 8 bytes of header, 4 per index, the dtype's width per value."""
        return Parts(header=HEADER_BYTES, index=_INDEX_BYTES * nnz, value=dtype.itemsize * nnz)

    def measure(self, buffer: Tensor) -> Parts:
        """Read count and dtype.

        Raises:
            WireFormatError: the buffer does not start with a coo header.
        """
        header = self.check_header(first_bytes(buffer, HEADER_BYTES))
        return self.parts(header.count, 0, header.dtype)


def _to_unsigned(indices: Tensor) -> Tensor:
    """Wrap int64 in [0, 2^32) to the int32 of the same bits."""
    return torch.where(indices >= 1 << 31, indices - _INDEX_LIMIT, indices).to(torch.int32)


def _from_unsigned(bits: Tensor) -> Tensor:
    return bits.to(torch.int64) & (_INDEX_LIMIT - 1)


def _aligned(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """View bytes as ``dtype``, copying where the offset does not suit it (8-byte values)."""
    return (raw.clone() if raw.storage_offset() % dtype.itemsize else raw).view(dtype)
