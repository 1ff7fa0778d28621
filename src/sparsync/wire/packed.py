"""Packed format: 8 to 12 bits per index and 8 to 32 per value, where coo takes 64 together."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, final

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError
from sparsync.kernels import packing
from sparsync.sparse import SparseVector
from sparsync.transports.ledger import Parts
from sparsync.wire.base import LONG_HEADER_BYTES, Codec, Encoded, Header, check_block

__all__ = ["Packed"]

_FORMS = MappingProxyType({"bf16": packing.BF16, "int8": packing.INT8, "fp32": packing.FP32})
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
    """Header, rounded values, Elias-Fano indices: see ``docs/wire-format.md``.

    ``decoded`` holds what the receiver sees, in the dtype that was given, zeros that rounding made
    included: what is missing is the caller's to keep in the residual.

    Args:
        values: "bf16": the nearest bfloat16, ties to even, but finite values stay finite; "int8":
            multiples of ``max |x| / 127`` over ``block`` consecutive entries, where an entry that is NaN
            or Inf arrives as NaN and leaves its block's scale alone; "fp32": float32.
        block: entries that share a scale under int8, 1 to 65535.

    Cost: 16 bytes; nnz (l + 1) + ceil(size / 2^l) bits of indices, l = floor(log2(size / nnz)); 16, 8
    (and 32 per block) or 32 bits per value.   State: none.
    Differs from the paper: 23 to 28 bits per entry at 1 % instead of two words (Ok-Topk's COO).

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
        """Tell whether values of ``dtype`` arrive as they are."""
        return dtype in _EXACT[self.values]

    def encode(self, vector: SparseVector) -> Encoded[SparseVector]:
        """Encode; ``decoded`` has the same indices and rounded values."""
        start, size = self.start(vector), vector.size
        style = size, self.option, self.block
        payload, rounded = packing.pack(start, vector.indices, vector.values, *style)
        return Encoded(payload, SparseVector(vector.indices, rounded, size))

    def decode(self, payload: Tensor, size: int) -> SparseVector:
        """Decode and check every bit but the values', which may be anything."""
        header, body = self.body(payload, size)
        indices, values = packing.unpack(body, header.entries, size, header.option, header.detail)
        return SparseVector(indices, values.to(header.dtype), size)

    def is_legal(self, header: Header) -> bool:
        """Tell whether there is a block length exactly where values are int8."""
        return (header.detail > 0) == (header.option == packing.INT8)

    def layout(self, header: Header) -> Parts:
        """Return 16 bytes of header, and the bytes of indices and values."""
        _, _, nnz, form, size, block = header
        assert size is not None
        return Parts(
            LONG_HEADER_BYTES, packing.index_bytes(nnz, size), packing.value_bytes(nnz, form, block)
        )
