"""Signs: one bit per element, and the mean magnitude of every block (1-bit SGD's family)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from sparsync.errors import WireFormatError
from sparsync.kernels.packing import in_blocks, spread
from sparsync.sparse import DenseVector
from sparsync.transports.ledger import Parts
from sparsync.wire.base import (
    LONG_HEADER_BYTES,
    Codec,
    Encoded,
    Header,
    check_block,
    pack_codes,
    unpack_codes,
)

__all__ = ["Signs"]

_SCALE_BYTES = 4


@final
@dataclass(eq=False)
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
    is_dense = True
    header_bytes = LONG_HEADER_BYTES
    block: int = 256

    def __post_init__(self) -> None:
        check_block(self.block)
        self.detail = self.block

    def encode(self, vector: DenseVector) -> Encoded[DenseVector]:
        """Encode; ``decoded`` has one magnitude per block."""
        start, values = self.start(vector), vector.values
        scales, signs = _scales(values, self.block), pack_codes((values < 0).view(torch.uint8), 1)
        decoded = _unpack(scales, signs, values.numel(), self.block, values.dtype)
        return Encoded(self.message(start, scales, signs), DenseVector(decoded))

    def decode(self, payload: Tensor, size: int) -> DenseVector:
        """Decode, with blocks as long as the message says."""
        header, body = self.body(payload, size)
        middle = _SCALE_BYTES * -(-size // header.detail)
        scales = body[:middle].clone().view(torch.float32)  # a copy is aligned
        if bool(scales.signbit().any()):
            raise WireFormatError("a signs message has a scale below zero; it is corrupt")
        return DenseVector(_unpack(scales, body[middle:], size, header.detail, header.dtype))

    def layout(self, header: Header) -> Parts:
        """Return 16 bytes of header, and the bytes of scales and signs."""
        count, blocks = header.entries, -(-header.entries // header.detail)
        return Parts(LONG_HEADER_BYTES, value=_SCALE_BYTES * blocks + (count + 7) // 8)


def _scales(values: Tensor, block: int) -> Tensor:
    """Return the float32 mean magnitude of each block; not finite where an element is not."""
    blocks = in_blocks(values.to(torch.promote_types(values.dtype, torch.float32)), block).abs_()
    count, rows = values.numel(), len(blocks)
    peaks = blocks.amax(1)
    # relative to the largest one, no sum overflows and no denormal vanishes
    sums = blocks.div_(torch.where(peaks == 0, 1.0, peaks)[:, None]).sum(1)
    lengths = (count - block * torch.arange(rows, device=values.device)).clamp(max=block)
    means = (sums / lengths * peaks).clamp(max=torch.finfo(torch.float32).max)
    return torch.where(peaks.isfinite(), means, peaks).to(torch.float32)


def _unpack(scales: Tensor, signs: Tensor, count: int, block: int, dtype: torch.dtype) -> Tensor:
    """Return every element: its block's scale with its sign."""
    meanings = torch.tensor([1, -1], dtype=dtype, device=signs.device)
    values = unpack_codes(signs, 1, meanings, count)
    return values.mul_(spread(scales.to(dtype), block, count))
