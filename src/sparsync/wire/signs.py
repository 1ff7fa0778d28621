"""Signs: one bit per element, and the mean magnitude of every block (1-bit SGD's family)."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError, WireFormatError
from sparsync.sparse import DenseVector
from sparsync.transports.ledger import Parts
from sparsync.wire.base import LONG_HEADER_BYTES, Codec, Encoded, Header

__all__ = ["Signs"]

_SCALE_BYTES = 4
_BLOCK_LIMIT = 1 << 16


@final
class Signs(Codec[DenseVector]):
    """Header, a scale per block, a bit per element: see ``docs/wire-format.md``.

    An element arrives as its block's mean magnitude with its own sign (that of 0 is +), a projection:
    ``|x - Q(x)|^2 = |x|^2 - m scale^2`` over a block of m elements.  So no input grows by being sent,
    and the error may be kept in the residual.  It is small where magnitudes are alike.

    Finite elements have a finite scale; NaN or Inf makes its whole block NaN or Inf.

    Args:
        block: consecutive elements that share a float32 scale, 1 to 65535 (256 add an eighth to the
            bits; the papers have a scale per column or per tensor).

    Cost: 16 bytes, n / 8 of signs and 4 per block; about 10 passes over the values.   State: none.
    Differs from the paper: a scale per block; 1-bit SGD has two means per column, one for either sign,
    and EF-SignSGD one mean magnitude per layer.

    Example:
        >>> encoded = Signs(block=2).encode(DenseVector(torch.tensor([1.0, -3.0, 0.5])))
        >>> encoded.payload[16:].tolist(), encoded.decoded.values.tolist()
        ([0, 0, 0, 64, 0, 0, 0, 63, 2], [2.0, -2.0, 0.5])

    References: Seide et al., 1-bit SGD, Interspeech 2014; Karimireddy et al., EF-SignSGD, ICML 2019,
    section 4 (the scale); Tang et al., 1-bit Adam, ICML 2021.
    """

    format = 7
    header_bytes = LONG_HEADER_BYTES

    def __init__(self, block: int = 256) -> None:
        if not 1 <= block < _BLOCK_LIMIT:
            raise ConfigurationError(
                f"block={block} elements cannot share a scale; use 1 to {_BLOCK_LIMIT - 1}"
            )
        self.block = block

    def __repr__(self) -> str:
        return f"Signs(block={self.block})"

    def encode(self, vector: DenseVector) -> Encoded[DenseVector]:
        """Encode; the same values give the same bytes."""
        start, values = self.start(vector), vector.values
        scales, signs = _scales(values, self.block), _pack(values < 0)
        decoded = _unpack(scales, signs, values.numel(), self.block, values.dtype)
        return Encoded(self.message(start, scales, signs), DenseVector(decoded))

    def decode(self, payload: Tensor, size: int) -> DenseVector:
        """Decode, with blocks as long as the message says.

        Raises:
            WireFormatError: the payload is not a signs message of ``size`` elements.
        """
        header, body = self.body(payload, size)
        middle = _SCALE_BYTES * -(-size // header.detail)
        scales = body[:middle].clone().view(torch.float32)  # a copy is aligned
        if bool(scales.signbit().any()):
            raise WireFormatError("a signs message has a scale below zero; it is corrupt")
        signs = body[middle:]
        if size % 8 and int(signs[-1]) >> size % 8:
            raise WireFormatError(
                f"a message of {size} signs has bits set after the last; it is corrupt"
            )
        return DenseVector(_unpack(scales, signs, size, header.detail, header.dtype))

    def header(self, nnz: int, size: int, dtype: torch.dtype) -> Header:
        """Return the header of a message, with the block as detail."""
        return Header(self.format, dtype, size, size=size, detail=self.block)

    def is_legal(self, header: Header) -> bool:
        """Tell whether there is a block length, and a sign per element."""
        return header.size == header.entries and header.detail > 0

    def layout(self, header: Header) -> Parts:
        """Return 16 bytes of header, and the bytes of scales and signs."""
        count, blocks = header.entries, -(-header.entries // header.detail)
        return Parts(LONG_HEADER_BYTES, value=_SCALE_BYTES * blocks + (count + 7) // 8)


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
