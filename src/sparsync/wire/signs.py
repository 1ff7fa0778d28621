"""Signs: one bit per element, and the mean magnitude of every block (1-bit SGD's family)."""

from __future__ import annotations

import struct
from typing import NamedTuple, final

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError, WireFormatError
from sparsync.transports.ledger import Parts
from sparsync.wire.base import HEADER_BYTES, Header, first_bytes, pack_header, parse_header
from sparsync.wire.whole import DenseCodec, EncodedDense

__all__ = ["Signs"]

_SHAPE = struct.Struct("<Q")  # the size in 48 bits, the block in 16
_START_BYTES = HEADER_BYTES + _SHAPE.size
_SCALE_BYTES = 4
_BLOCK_LIMIT = 1 << 16


class _Shape(NamedTuple):
    """What the first 16 bytes say."""

    header: Header
    block: int

    def parts(self) -> Parts:
        return _parts(self.header.count, self.block)


@final
class Signs(DenseCodec):
    """Header, shape, a scale per block, a bit per element: see ``docs/wire-format.md``.

    An element arrives as its block's mean magnitude with its own sign (that of 0 is +), a projection:
    ``|x - Q(x)|^2 = |x|^2 - m scale^2`` over a block of m elements.  So no input grows by being sent,
    and the error may be kept in the residual.  It is small where magnitudes are alike.

    Finite elements have a finite scale; NaN or Inf makes its whole block NaN or Inf.

    Args:
        block: consecutive elements that share a float32 scale, 1 to 65535 (ours: 256 add an eighth to
            the bits; the papers have a scale per column or per tensor).

    Cost: 16 bytes, n / 8 of signs and 4 per block; about 10 passes over the values.   State: none.
    Differs from the paper: a scale per block; 1-bit SGD has two means per column, one for either sign,
    and EF-SignSGD one mean magnitude per layer.

    Example:
        >>> encoded = Signs(block=2).encode(torch.tensor([1.0, -3.0, 0.5]))
        >>> encoded.payload[16:].tolist(), encoded.decoded.tolist()
        ([0, 0, 0, 64, 0, 0, 0, 63, 2], [2.0, -2.0, 0.5])

    References: Seide et al., 1-bit SGD, Interspeech 2014; Karimireddy et al., EF-SignSGD, ICML 2019,
    section 4 (the scale); Tang et al., 1-bit Adam, ICML 2021.
    """

    format = 7

    def __init__(self, block: int = 256) -> None:
        if not 1 <= block < _BLOCK_LIMIT:
            raise ConfigurationError(
                f"block={block} elements cannot share a scale; use 1 to {_BLOCK_LIMIT - 1}"
            )
        self.block = block

    def __repr__(self) -> str:
        return f"Signs(block={self.block})"

    def encode(self, values: Tensor) -> EncodedDense:
        """Encode; the same values give the same bytes."""
        if values.dim() != 1 or not values.dtype.is_floating_point:
            raise ConfigurationError(
                f"signs take a flat vector of floats, not {values.dtype} of shape "
                f"{tuple(values.shape)}; flatten it, or use Whole for integers"
            )
        count = values.numel()
        header = pack_header(Header(self.format, values.dtype, count))
        start = bytearray(header + _SHAPE.pack(count | self.block << 48))
        scales, signs = _scales(values, self.block), _pack(values < 0)
        pieces = [torch.frombuffer(start, dtype=torch.uint8).to(values.device), scales, signs]
        payload = torch.cat([piece.view(torch.uint8) for piece in pieces])
        return EncodedDense(payload, _unpack(scales, signs, count, self.block, values.dtype))

    def decode(self, payload: Tensor, size: int) -> Tensor:
        """Decode, with blocks as long as the message says.

        Raises:
            WireFormatError: the payload is not a signs message of ``size`` elements.
        """
        header, block = shape = _shape(payload)
        parts = shape.parts()
        if header.count != size or payload.numel() != parts.nbytes:
            raise WireFormatError(
                f"a signs message of {payload.numel()} bytes says that it has {header.count} values, "
                f"expected {size}, in {parts.nbytes} bytes; it is truncated or corrupt"
            )
        middle = _START_BYTES + _SCALE_BYTES * -(-size // block)
        scales = payload[_START_BYTES:middle].clone().view(torch.float32)  # a copy is aligned
        if bool(scales.signbit().any()):
            raise WireFormatError("a signs message has a scale below zero; it is corrupt")
        signs = payload[middle:]
        if size % 8 and int(signs[-1]) >> size % 8:
            raise WireFormatError(
                f"a message of {size} signs has bits set behind the last; it is corrupt"
            )
        return _unpack(scales, signs, size, block, header.dtype)

    def parts(self, size: int, dtype: torch.dtype) -> Parts:
        """Return 16 bytes of header and shape, and the bytes of scales and signs."""
        return _parts(size, self.block)

    def measure(self, buffer: Tensor) -> Parts:
        """Read count and block.

        Raises:
            WireFormatError: the buffer does not start with a signs header.
        """
        return _shape(buffer).parts()

    def is_exact(self, dtype: torch.dtype) -> bool:
        """Say that everything is rounded."""
        return False


def _parts(size: int, block: int) -> Parts:
    return Parts(header=_START_BYTES, value=_SCALE_BYTES * -(-size // block) + (size + 7) // 8)


def _shape(buffer: Tensor) -> _Shape:
    raw = first_bytes(buffer, _START_BYTES)
    header = parse_header(raw)
    if header.format != Signs.format:
        raise WireFormatError(
            f"a message has format {header.format}, expected signs ({Signs.format}); "
            "do all ranks use the same codec?"
        )
    if len(raw) < _START_BYTES:
        raise WireFormatError(f"{len(raw)} bytes cannot hold a signs header of {_START_BYTES}")
    (word,) = _SHAPE.unpack_from(raw, HEADER_BYTES)
    size, block = word & ((1 << 48) - 1), word >> 48
    if header.option or size != header.count or not block or not header.dtype.is_floating_point:
        raise WireFormatError(
            f"a message claims {header.count} of {size} values of {header.dtype} in blocks of {block} "
            f"with option {header.option}, which signs never write; it is corrupt"
        )
    return _Shape(header, block)


def _scales(values: Tensor, block: int) -> Tensor:
    """Return the float32 mean magnitude of each block; not finite where an element is not."""
    count, rows = values.numel(), -(-values.numel() // block)
    wide = torch.promote_types(values.dtype, torch.float32)
    padded = values.new_zeros(rows * block, dtype=wide)
    padded[:count] = values
    blocks = padded.view(rows, block).abs_()
    peaks = blocks.amax(1)
    # relative to the largest one, no sum overflows and no denormal vanishes
    sums = blocks.div_(torch.where(peaks == 0, 1.0, peaks)[:, None]).sum(1)
    lengths = (count - block * torch.arange(rows, device=values.device)).clamp(max=block)
    means = (sums / lengths * peaks).clamp(max=torch.finfo(torch.float32).max)
    return torch.where(peaks.isfinite(), means, peaks).to(torch.float32)


def _pack(bits: Tensor) -> Tensor:
    """Pack booleans into bytes, the first one lowest."""
    padded = bits.new_zeros((bits.numel() + 7) // 8 * 8)
    padded[: bits.numel()] = bits
    words = padded.view(torch.int64)  # bit i of the byte stands at 8 i: fold pairs, fours, halves
    for shift in (7, 14, 28):
        words |= words >> shift
    return words.to(torch.uint8)


def _unpack(scales: Tensor, signs: Tensor, count: int, block: int, dtype: torch.dtype) -> Tensor:
    """Return every element: its block's scale with its sign."""
    bits = torch.arange(256, device=signs.device)[:, None] >> torch.arange(8, device=signs.device)
    table = (1 - 2 * (bits & 1)).to(dtype)  # the eight signs of every byte
    values = table.index_select(0, signs.to(torch.int32)).flatten()[:count]
    spread = scales.to(dtype).repeat_interleave(block, output_size=scales.numel() * block)
    return values.mul_(spread[:count])
