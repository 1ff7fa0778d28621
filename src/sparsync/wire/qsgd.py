"""QSGD: values at 2, 4 or 8 bits, rounded at random so that the expectation is exact."""

from __future__ import annotations

import copy
import struct
from dataclasses import replace
from typing import Literal, NamedTuple, TypeVar, final

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError, WireFormatError
from sparsync.kernels import packing
from sparsync.sparse import SparseVector
from sparsync.transports.ledger import Parts
from sparsync.wire.base import (
    HEADER_BYTES,
    Codec,
    Encoded,
    Header,
    first_bytes,
    pack_header,
    parse_header,
)
from sparsync.wire.quantiser import BITS, Quantiser
from sparsync.wire.whole import DenseCodec, EncodedDense

__all__ = ["Qsgd", "SparseQsgd"]

_SHAPE = struct.Struct("<Q")  # the size in 48 bits, the block in 16
_START_BYTES = HEADER_BYTES + _SHAPE.size
_SIZE_LIMIT = 1 << 32
AnyQsgd = TypeVar("AnyQsgd", "Qsgd", "SparseQsgd")
_OPTIONS = tuple(bits + flags for bits in BITS for flags in (0, 16, 32, 48))


@final
class Qsgd(DenseCodec):
    """Dense vectors, quantised at random: see ``docs/wire-format.md`` and ``Quantiser``.

    Unbiased: the expectation of what is decoded is the float32 that was given, to 2^-24 of its
    block's scale, without ``shrink``; that of a 16-bit dtype is then rounded to it.  An entry that is NaN
    or Inf arrives as NaN and leaves its block's scale alone.

    Args:
        bits: per value, sign included: 2, 4 or 8.
        block: consecutive entries that share a float32 scale (SparCML, section 6: "in the order of
            1024").
        scale: "l2" (QSGD's own; unbounded noise where blocks are long) or "max" (less noise).
        shrink: multiply by ``1 / (1 + omega)``, omega being the bound of the variance: not unbiased
            any more, but ``contractive``.
        seed: of the draws, with the rank and the step that ``seeded`` sets.

    Cost: 16 bytes, ``bits`` per value and 32 per block; about 10 passes over the values.   State: none.
    Differs from the paper: codes of fixed width, not Elias's; scale "max"; shrink; NaN and Inf survive.

    Example:
        >>> encoded = Qsgd(bits=4, scale="max").encode(torch.tensor([7.0, -3.0, 0.0]))
        >>> encoded.payload[16:].tolist(), encoded.decoded.tolist()
        ([0, 0, 224, 64, 215, 0], [7.0, -3.0, 0.0])

    References: Alistarh et al., QSGD, NeurIPS 2017, section 3; Renggli et al., SparCML, SC 2019,
    section 6.
    """

    format = 4

    def __init__(
        self,
        bits: int = 4,
        *,
        block: int = 1024,
        scale: Literal["l2", "max"] = "l2",
        shrink: bool = False,
        seed: int = 0,
    ) -> None:
        self.quantiser = Quantiser(bits, block, scale, shrink, seed)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.quantiser.arguments})"

    @property
    def contractive(self) -> bool:
        """``E |x - Q(x)|^2 < |x|^2``: the error may be kept in the residual."""
        return self.quantiser.contractive

    def seeded(self, rank: int, step: int) -> Qsgd:
        """Return a copy that draws for this rank and step."""
        return _seeded(self, rank, step)

    def encode(self, values: Tensor) -> EncodedDense:
        """Encode; the same values, seed, rank and step give the same bytes."""
        if values.dim() != 1:
            raise ConfigurationError(f"a dense message of shape {tuple(values.shape)}; flatten it")
        start = _start(self.format, self.quantiser, values, values.numel())
        raw, decoded = _quantised(self.quantiser, values)
        return EncodedDense(torch.cat([start, raw]), decoded)

    def decode(self, payload: Tensor, size: int) -> Tensor:
        """Decode, as the message says that it was quantised.

        Raises:
            WireFormatError: the payload is not a qsgd message of ``size`` elements.
        """
        shape = _checked(payload, self.format, size)
        values = shape.quantiser.dequantise(payload[_START_BYTES:], shape.header.count)
        return values.to(shape.header.dtype)

    def parts(self, size: int, dtype: torch.dtype) -> Parts:
        """Return 16 bytes of header and shape, and the bytes of scales and codes."""
        return Parts(header=_START_BYTES, value=self.quantiser.value_bytes(size))

    def measure(self, buffer: Tensor) -> Parts:
        """Read count, block and option.

        Raises:
            WireFormatError: the buffer does not start with a qsgd header.
        """
        return _shape(buffer, self.format).parts()

    def is_exact(self, dtype: torch.dtype) -> bool:
        """Say that everything is rounded."""
        return False


@final
class SparseQsgd(Codec):
    """Sparse vectors: values quantised at random, blocks of consecutive entries; Elias-Fano indices.

    Arguments and promises are those of ``Qsgd``.  Zeros that rounding made still travel.

    Cost: 16 bytes; ``bits`` per value and 32 per block; indices as in ``Packed``.   State: none.
    Differs from the paper: as ``Qsgd``; SparCML quantises dense messages alone (section 6), though its
    Algorithm 1 reads as if sparse ones were, too.

    Example:
        >>> v = SparseVector.from_dense(torch.tensor([0.0, 7.0, -3.0, 0.0]))
        >>> encoded = SparseQsgd(bits=4, scale="max").encode(v)
        >>> encoded.payload[16:].tolist(), encoded.decoded.values.tolist()
        ([0, 0, 224, 64, 215, 21], [7.0, -3.0])

    References: Alistarh et al., QSGD, NeurIPS 2017; Renggli et al., SparCML, SC 2019, Algorithm 1.
    """

    format = 5
    exact = False
    options = _OPTIONS

    def __init__(
        self,
        bits: int = 4,
        *,
        block: int = 1024,
        scale: Literal["l2", "max"] = "l2",
        shrink: bool = False,
        seed: int = 0,
    ) -> None:
        self.quantiser = Quantiser(bits, block, scale, shrink, seed)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.quantiser.arguments})"

    @property
    def contractive(self) -> bool:
        """``E |x - Q(x)|^2 < |x|^2``: the error may be kept in the residual."""
        return self.quantiser.contractive

    def seeded(self, rank: int, step: int) -> SparseQsgd:
        """Return a copy that draws for this rank and step."""
        return _seeded(self, rank, step)

    def encode(self, vector: SparseVector) -> Encoded:
        """Encode; ``decoded`` has the same indices and rounded values."""
        start = _start(self.format, self.quantiser, vector.values, vector.size)
        raw, rounded = _quantised(self.quantiser, vector.values)
        indices = packing.pack_indices(vector.indices.contiguous(), vector.size)
        payload = torch.cat([start, raw, indices])
        return Encoded(payload, SparseVector(vector.indices, rounded, vector.size))

    def decode(self, payload: Tensor, size: int) -> SparseVector:
        """Decode, as the message says that it was quantised.

        Raises:
            WireFormatError: the payload is not a sparse qsgd message for ``size`` elements.
        """
        shape = _checked(payload, self.format, size)
        count, middle = shape.header.count, _START_BYTES + shape.parts().value
        indices = packing.unpack_indices(payload[middle:], count, size)
        values = shape.quantiser.dequantise(payload[_START_BYTES:middle], count)
        return SparseVector(indices, values.to(shape.header.dtype), size)

    def parts(self, nnz: int, size: int, dtype: torch.dtype) -> Parts:
        """Return 16 bytes of header and shape, and the bytes of values and indices."""
        return _sparse_parts(self.quantiser, nnz, size)

    def measure(self, buffer: Tensor) -> Parts:
        """Read count, size, block and option.

        Raises:
            WireFormatError: the buffer does not start with a sparse qsgd header.
        """
        return _shape(buffer, self.format).parts()


class _Shape(NamedTuple):
    """What the first 16 bytes say."""

    header: Header
    size: int
    quantiser: Quantiser

    def parts(self) -> Parts:
        if self.header.format == Qsgd.format:
            return Parts(_START_BYTES, value=self.quantiser.value_bytes(self.header.count))
        return _sparse_parts(self.quantiser, self.header.count, self.size)


def _sparse_parts(quantiser: Quantiser, nnz: int, size: int) -> Parts:
    return Parts(
        header=_START_BYTES,
        index=(packing.index_bits(nnz, size) + 7) // 8,
        value=quantiser.value_bytes(nnz),
    )


def _seeded(codec: AnyQsgd, rank: int, step: int) -> AnyQsgd:
    twin = copy.copy(codec)
    twin.quantiser = replace(codec.quantiser, rank=rank, step=step)
    return twin


def _start(format_: int, quantiser: Quantiser, values: Tensor, size: int) -> Tensor:
    """Return the first 16 bytes, on the device of ``values``; refuse what has no such message."""
    if not values.dtype.is_floating_point:
        raise ConfigurationError(
            f"qsgd rounds values and takes floats, not {values.dtype}; use Coo or Whole for integers"
        )
    if not values.numel() <= size <= _SIZE_LIMIT:
        raise ConfigurationError(
            f"qsgd takes regions of up to 2^32 elements and no more entries than elements, not "
            f"{values.numel()} of {size}; use smaller units or more regions"
        )
    header = pack_header(Header(format_, values.dtype, values.numel(), quantiser.option))
    raw = bytearray(header + _SHAPE.pack(size | quantiser.block << 48))
    return torch.frombuffer(raw, dtype=torch.uint8).to(values.device)


def _quantised(quantiser: Quantiser, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and codes, and what the receiver makes of them, in the dtype of ``values``."""
    single = packing.to_float32(values, packing.FP32)
    raw = quantiser.quantise(single, torch.finfo(values.dtype).max)
    return raw, quantiser.dequantise(raw, values.numel()).to(values.dtype)


def _checked(payload: Tensor, format_: int, size: int) -> _Shape:
    """Read what stands before the values, and check it against the payload."""
    shape = _shape(payload, format_)
    expected = shape.parts().nbytes
    if payload.numel() != expected:
        raise WireFormatError(
            f"a message of {payload.numel()} bytes says that it has {shape.header.count} entries, "
            f"which take {expected} bytes; it is truncated or corrupt"
        )
    if shape.size != size:
        raise WireFormatError(
            f"a message is for a region of {shape.size} elements, expected {size}; "
            "do all ranks cut the same regions?"
        )
    return shape


def _shape(buffer: Tensor, format_: int) -> _Shape:
    raw = first_bytes(buffer, _START_BYTES)
    header = parse_header(raw)
    if header.format != format_:
        name = "qsgd" if format_ == Qsgd.format else "sparse qsgd"
        raise WireFormatError(
            f"a message has format {header.format}, expected {name} ({format_}); "
            "do all ranks use the same codec?"
        )
    if len(raw) < _START_BYTES:
        raise WireFormatError(f"{len(raw)} bytes cannot hold a qsgd header of {_START_BYTES}")
    (word,) = _SHAPE.unpack_from(raw, HEADER_BYTES)
    size, block = word & ((1 << 48) - 1), word >> 48
    if header.option not in _OPTIONS or block == 0 or not header.dtype.is_floating_point:
        raise WireFormatError(
            f"a message of {header.dtype} has option {header.option} and blocks of {block}, "
            "which qsgd never writes; it is corrupt"
        )
    whole = format_ == Qsgd.format
    if not header.count <= size <= _SIZE_LIMIT or (whole and header.count != size):
        raise WireFormatError(
            f"a message claims {header.count} entries of {size} elements; it is corrupt"
        )
    return _Shape(header, size, Quantiser.of_message(header.option, block))
