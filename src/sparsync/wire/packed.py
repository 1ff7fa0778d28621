"""Packed format: 8 to 12 bits per index and 8 to 32 per value, where coo takes 64 together."""

from __future__ import annotations

import struct
from types import MappingProxyType
from typing import Literal, NamedTuple, final

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError, WireFormatError
from sparsync.kernels import packing
from sparsync.sparse import SparseVector
from sparsync.transports.ledger import Parts
from sparsync.wire.base import HEADER_BYTES, Codec, Encoded, Header, first_bytes, pack_header

__all__ = ["Packed"]

_FORMS = MappingProxyType({"bf16": packing.BF16, "int8": packing.INT8, "fp32": packing.FP32})
_EXACT = MappingProxyType(
    {
        "bf16": (torch.bfloat16,),
        "int8": (),
        "fp32": (torch.float32, torch.bfloat16, torch.float16),
    }
)
_SHAPE = struct.Struct("<Q")  # the size in 48 bits, the block in 16
_START_BYTES = HEADER_BYTES + _SHAPE.size
_SIZE_LIMIT = 1 << 32
_BLOCK_LIMIT = 1 << 16


class _Shape(NamedTuple):
    """What the first 16 bytes say."""

    header: Header
    size: int
    block: int

    def parts(self) -> Parts:
        return _parts(self.header.count, self.size, self.header.option, self.block)


@final
class Packed(Codec):
    """Header, shape, rounded values, Elias-Fano indices: see ``docs/wire-format.md``.

    Values of every floating dtype are sent as

    - ``"bf16"``: the nearest bfloat16, ties to even, but finite values stay finite;
    - ``"int8"``: multiples of ``max |x| / 127`` over ``block`` consecutive entries; an entry that is
      NaN or Inf arrives as NaN and leaves its block's scale alone;
    - ``"fp32"``: float32.

    ``decoded`` holds what the receiver sees, in the dtype that was given, zeros that rounding made
    included: what is missing is the caller's to keep in the residual.

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
    exact = False
    options = tuple(_FORMS.values())

    def __init__(
        self, values: Literal["bf16", "int8", "fp32"] = "bf16", *, block: int = 128
    ) -> None:
        """Set how values are rounded, and the number of entries that share a scale under int8.

        Raises:
            ConfigurationError: an unknown form of values, or a block that 16 bits do not hold.
        """
        if values not in _FORMS:
            raise ConfigurationError(
                f"values={values!r} is unknown; use one of {', '.join(_FORMS)}"
            )
        if not 1 <= block < _BLOCK_LIMIT:
            raise ConfigurationError(
                f"block={block} entries cannot share a scale; use 1 to {_BLOCK_LIMIT - 1}"
            )
        self.values, self.block = values, block
        self._form = _FORMS[values]

    def __repr__(self) -> str:
        return f"Packed(values={self.values!r}, block={self.block})"

    def is_exact(self, dtype: torch.dtype) -> bool:
        """Tell whether values of ``dtype`` arrive as they are."""
        return dtype in _EXACT[self.values]

    def encode(self, vector: SparseVector) -> Encoded:
        """Encode; ``decoded`` has the same indices and rounded values."""
        values, size = vector.values, vector.size
        if not values.dtype.is_floating_point:
            raise ConfigurationError(
                f"packed rounds values and takes floats, not {values.dtype}; use Coo for integers"
            )
        if not vector.nnz <= size <= _SIZE_LIMIT:
            raise ConfigurationError(
                f"packed takes regions of up to 2^32 elements and no more entries than elements, "
                f"not {vector.nnz} of {size}; use smaller units or more regions"
            )
        start = self.start(vector.nnz, size, values.dtype)
        payload, rounded = packing.pack(start, vector.indices, values, size, *self.form_and_block)
        return Encoded(payload, SparseVector(vector.indices, rounded, size))

    @property
    def form_and_block(self) -> tuple[int, int]:
        """How values are packed, for the kernels; blocks matter to int8 alone."""
        return self._form, self.block if self._form == packing.INT8 else 0

    def start(self, nnz: int, size: int, dtype: torch.dtype) -> bytes:
        """Return the first 16 bytes of a message."""
        header = pack_header(Header(self.format, dtype, nnz, self._form))
        return header + _SHAPE.pack(size | self.form_and_block[1] << 48)

    def style(self, size: int) -> tuple[int, int, int, int, int]:
        """Return what the kernels need to write and read messages of float32 values.

        These are the first 16 bytes without a count, as two numbers, form, block and the region's size.
        """
        first, second = struct.unpack("<2Q", self.start(0, size, torch.float32))
        return first, second, *self.form_and_block, size

    def decode(self, payload: Tensor, size: int) -> SparseVector:
        """Decode and check every bit but the values', which may be anything.

        Raises:
            WireFormatError: the payload is not a packed message for ``size`` elements.
        """
        header, block = self._checked(payload, size)
        body = payload[_START_BYTES:]
        indices, values = packing.unpack(body, header.count, size, header.option, block)
        return SparseVector(indices, values.to(header.dtype), size)

    def _checked(self, payload: Tensor, size: int) -> tuple[Header, int]:
        """Read what stands before the values, and check it against the payload."""
        header, sender_size, block = shape = self._shape(payload)
        expected = shape.parts().nbytes
        if payload.numel() != expected:
            raise WireFormatError(
                f"a message of {payload.numel()} bytes says that it has {header.count} entries, "
                f"which take {expected} bytes; it is truncated or corrupt"
            )
        if sender_size != size:
            raise WireFormatError(
                f"a message is for a region of {sender_size} elements, expected {size}; "
                "do all ranks cut the same regions?"
            )
        return header, block

    def parts(self, nnz: int, size: int, dtype: torch.dtype) -> Parts:
        """Return 16 bytes of header and shape, and the bytes of values and indices."""
        return _parts(nnz, size, self._form, self.block)

    def measure(self, buffer: Tensor) -> Parts:
        """Read count, size and form.

        Raises:
            WireFormatError: the buffer does not start with a packed header.
        """
        return self._shape(buffer).parts()

    def _shape(self, buffer: Tensor) -> _Shape:
        raw = first_bytes(buffer, _START_BYTES)
        header = self.check_header(raw)
        if len(raw) < _START_BYTES:
            raise WireFormatError(f"{len(raw)} bytes cannot hold a packed header of {_START_BYTES}")
        (word,) = _SHAPE.unpack_from(raw, HEADER_BYTES)
        size, block = word & ((1 << 48) - 1), word >> 48
        if not header.count <= size <= _SIZE_LIMIT:
            raise WireFormatError(
                f"a message claims {header.count} entries of {size} elements; it is corrupt"
            )
        if not header.dtype.is_floating_point or (block > 0) != (header.option == packing.INT8):
            raise WireFormatError(
                f"a message of {header.dtype} has value form {header.option} with blocks of {block}, "
                "which packed never writes; it is corrupt"
            )
        return _Shape(header, size, block)


def _parts(nnz: int, size: int, form: int, block: int) -> Parts:
    return Parts(
        header=_START_BYTES,
        index=(packing.index_bits(nnz, size) + 7) // 8,
        value=packing.value_bytes(nnz, form, block),
    )
