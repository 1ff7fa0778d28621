"""Packed format: 8 to 12 bits per index and 8 to 32 per value, where coo takes 64 together."""

from __future__ import annotations

from types import MappingProxyType
from typing import Literal, final

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError
from sparsync.kernels import packing
from sparsync.sparse import SparseVector
from sparsync.transports.ledger import Parts
from sparsync.wire.base import LONG_HEADER_BYTES, Codec, Encoded, Header

__all__ = ["Packed"]

_FORMS = MappingProxyType({"bf16": packing.BF16, "int8": packing.INT8, "fp32": packing.FP32})
_EXACT = MappingProxyType(
    {
        "bf16": (torch.bfloat16,),
        "int8": (),
        "fp32": (torch.float32, torch.bfloat16, torch.float16),
    }
)
_BLOCK_LIMIT = 1 << 16


@final
class Packed(Codec[SparseVector]):
    """Header, rounded values, Elias-Fano indices: see ``docs/wire-format.md``.

    Values of every floating dtype are sent as

    - ``"bf16"``: the nearest bfloat16, ties to even, but finite values stay finite;
    - ``"int8"``: multiples of ``max |x| / 127`` over ``block`` consecutive entries; an entry that is
      NaN or Inf arrives as NaN and leaves its block's scale alone;
    - ``"fp32"``: float32.

    ``decoded`` holds what the receiver sees, in the dtype that was given, zeros that rounding made
    included: what is missing is the caller's to keep in the residual.

    Args:
        values: how values are rounded.
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

    def __init__(
        self, values: Literal["bf16", "int8", "fp32"] = "bf16", *, block: int = 128
    ) -> None:
        if values not in _FORMS:
            raise ConfigurationError(
                f"values={values!r} is unknown; use one of {', '.join(_FORMS)}"
            )
        if not 1 <= block < _BLOCK_LIMIT:
            raise ConfigurationError(
                f"block={block} entries cannot share a scale; use 1 to {_BLOCK_LIMIT - 1}"
            )
        self.values, self.block = values, block

    def __repr__(self) -> str:
        return f"Packed(values={self.values!r}, block={self.block})"

    def is_exact(self, dtype: torch.dtype) -> bool:
        """Tell whether values of ``dtype`` arrive as they are."""
        return dtype in _EXACT[self.values]

    def encode(self, vector: SparseVector) -> Encoded[SparseVector]:
        """Encode; ``decoded`` has the same indices and rounded values."""
        start, size = self.start(vector), vector.size
        style = _FORMS[self.values], self.block
        payload, rounded = packing.pack(start, vector.indices, vector.values, size, *style)
        return Encoded(payload, SparseVector(vector.indices, rounded, size))

    def decode(self, payload: Tensor, size: int) -> SparseVector:
        """Decode and check every bit but the values', which may be anything.

        Raises:
            WireFormatError: the payload is not a packed message for ``size`` elements.
        """
        header, body = self.body(payload, size)
        indices, values = packing.unpack(body, header.entries, size, header.option, header.detail)
        return SparseVector(indices, values.to(header.dtype), size)

    def header(self, nnz: int, size: int, dtype: torch.dtype) -> Header:
        """Return the header of a message: the form of values as option, int8's block as detail."""
        form = _FORMS[self.values]
        return Header(
            self.format, dtype, nnz, form, size, self.block if form == packing.INT8 else 0
        )

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
