"""Lloyd-Max levels: dense vectors with 1 to 4 or 8 bits per element, and a bf16 scale per block."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError, WireFormatError
from sparsync.kernels import normal_levels, packing
from sparsync.kernels.normal_levels import Codes
from sparsync.sparse import DenseVector
from sparsync.transports.ledger import Parts
from sparsync.wire.codec import (
    LONG_HEADER_BYTES,
    Codec,
    Encoded,
    Header,
    Opened,
    Writer,
    check_block,
    check_end,
    written,
)

__all__ = ["LloydMax", "OpenedLevels", "difference_to", "sum_to"]


@final
@dataclass(eq=False)
class LloydMax(Codec[DenseVector]):
    """Writes one scale per block and a few bits per element, its level; see ``docs/wire-format.md``.

    An element is divided by its block's root mean square and rounded to the nearest level.  The levels
    minimise the mean square error for a normal distribution: with 1, 2, 3 or 4 bits, it is 36, 12, 3.5
    or 1 % of the mean square.  With 8 bits, levels are equally spaced up to the block's largest element.

    The scale is ``<q, x> / <q, q>``, where q is the vector of the block's levels, so the decoded vector
    is the projection of x onto q.  Neither the decoded vector nor the error is ever longer than x, so
    the residual may keep the error.  The scale is rounded to bf16, because the range of fp16 is too
    small for gradients.  The rounded scale is at most twice the exact one, so the error is still never
    longer than the vector; rounding adds less than 4e-6 of the squares.  A block whose scale is below
    2^-134 is decoded as zeros.  If a block has elements near the maximum of their dtype, its scale is
    reduced so that nothing overflows.

    Finite elements stay finite; a NaN or Inf makes its whole block NaN.

    Args:
        bits: bits per element: 1, 2, 3, 4 or 8.
        block: consecutive elements that share a scale, 1 to 65535 (C++ supports only multiples of 8).

    Cost: 16 bytes, plus ``bits`` bits per element and 16 bits per block.   State: none.
    Differs from the paper: the scale is a projection, not the deviation.

    Example:
        >>> encoded = LloydMax(bits=2).encode(DenseVector(torch.tensor([3.0, -1.0, 1.0, -3.0])))
        >>> encoded.payload[16:].tolist(), encoded.decoded.values.tolist()
        ([0, 64, 201], [3.0199..., -0.9056..., 0.9056..., -3.0199...])

    References: Max, "Quantizing for minimum distortion", 1960, table I; Lloyd, 1982.
    """

    format = 8
    is_dense = True
    options = normal_levels.BITS
    header_bytes = LONG_HEADER_BYTES

    bits: int = 2
    block: int = field(default=256, kw_only=True)

    def __post_init__(self) -> None:
        if self.bits not in normal_levels.BITS:
            raise ConfigurationError(f"bits={self.bits} per value is unknown; use 1, 2, 3, 4 or 8")
        check_block(self.block)
        self.option, self.detail = self.bits, self.block

    def encode(self, vector: DenseVector) -> Encoded[DenseVector]:
        """Encode a vector; ``decoded`` holds the products of levels and scales."""
        payload = self.written(vector.values)
        return Encoded(payload, self.decode(payload, vector.size))

    @property
    def step(self) -> int:
        """A run of a message must start at a multiple of this number of elements."""
        # a run must start both at the start of a block and at a byte boundary of the codes
        return self.block if self.block % 8 == 0 else 8 * self.block

    def blank(self, size: int, like: Tensor) -> Tensor:
        """Return a message for ``size`` elements, still to be written, for the dtype of ``like``."""
        start = self.start(DenseVector(like.new_empty(1).expand(size)))  # takes no memory
        body = self.nbytes(size, size, like.dtype) - len(start)
        return self.message(start, like.new_empty(body, dtype=torch.uint8))

    def write_(self, payload: Tensor, start: int, values: Tensor) -> None:
        """Write elements ``[start, start + len(values))`` of a message; change no others."""
        self.writer(payload)(start, values)

    def writer(self, payload: Tensor) -> Writer:
        """Return a ``Writer`` for one blank message, which writes like ``write_``."""
        header = self.read_header(payload)
        codes = _codes_of(header, payload[header.nbytes :], _largest_scale(header.dtype, self.bits))

        def write(start: int, values: Tensor, more: Tensor | None = None) -> None:
            if more is not None and not values.dtype == more.dtype == torch.float32:
                # round the sum to the dtype of the values, and widen it only then
                values, more = values + more, None
            codes.write_(packing.to_float32(values, packing.FP32), start, more)

        return write

    def written(self, values: Tensor) -> Tensor:
        """Return the message of ``values``, without decoding it."""
        self.start(DenseVector(values))  # refuses anything but a vector
        payload = self.blank(values.numel(), values)
        self.write_(payload, 0, values)
        return payload

    def decode(self, payload: Tensor, size: int) -> DenseVector:
        """Decode a message with the bits and the block length that its header states."""
        opened = self.open(payload, size)
        values = torch.empty(size, dtype=opened.dtype, device=payload.device)
        opened.decode_to(values)
        return DenseVector(values)

    def decode_to(
        self,
        payload: Tensor,
        into: Tensor,
        divisor: float = 1.0,
        *,
        add: bool = False,
        start: int = 0,
        size: int | None = None,
    ) -> None:
        """Decode a message of ``size`` elements, or a run from ``start`` on, into ``into``.

        The values are divided by ``divisor``.  With ``add``, they are added to ``into``; otherwise, they
        overwrite it.  This takes one pass if the message and ``into`` are float32.
        """
        opened = self.open(payload, into.numel() if size is None else size)
        opened.decode_to(into, divisor, add=add, start=start)

    def open(self, payload: Tensor, size: int) -> OpenedLevels:
        """Check a whole message of ``size`` elements; return it for decoding in runs."""
        header, raw = self.body(payload, size)
        return OpenedLevels(header, raw)

    def layout(self, header: Header) -> Parts:
        """Return the numbers of bytes of header, scales and codes."""
        count, scales = header.entries, -(-header.entries // header.detail)
        codes = (count * header.option + 7) // 8
        return Parts(LONG_HEADER_BYTES, value=normal_levels.SCALE_BYTES * scales + codes)


@final
class OpenedLevels(Opened):
    """A checked message of levels; decoding a run does not check its bytes again."""

    def __init__(self, header: Header, raw: Tensor) -> None:
        self.header, self.dtype = header, header.dtype
        self.codes = _codes_of(header, raw)
        # Levels are signed, so a negative scale would be a second encoding of the same block, and is
        # refused.  The sign of a little-endian bf16 is the top bit of its second byte.
        if bool((self.codes.scales[1::2] >= 0x80).any()):
            raise WireFormatError("a message of levels has a scale below zero; it is corrupt")
        check_end(raw, header.option, header.entries)

    def decode_to(
        self, into: Tensor, divisor: float = 1.0, *, add: bool = False, start: int = 0
    ) -> None:
        """Decode elements from ``start`` on, divide them, and write them to ``into`` or add them.

        This takes one pass if the message and ``into`` are float32.
        """
        self.check_run(start, into.numel())
        if self.dtype == into.dtype == torch.float32:
            self.codes.decode_(into, start, divisor, keep=add)
            return
        values = into.new_empty(into.numel(), dtype=torch.float32)
        self.codes.decode_(values, start, keep=False)
        written(values.to(self.dtype), into, divisor, add=add)

    def check_run(self, start: int, count: int) -> None:
        """Raise WireFormatError unless a run consists of whole blocks."""
        bits, block, stop = self.header.option, self.header.detail, start + count
        end_fits = stop % block == 0 or stop == self.header.entries
        if start % block or start * bits % 8 or not end_fits:
            raise WireFormatError(
                f"a message of levels has blocks of {block}, of which no run goes from element {start} "
                f"to {stop}; do all ranks use the same codec?"
            )

    def is_finite(self) -> bool:
        """Return whether the message contains neither NaN nor Inf, judging by its scales."""
        # the levels need not be decoded: NaN and Inf make a block's scale NaN, and finite scales are
        # limited so that no level overflows
        largest = _largest_scale(self.dtype, self.header.option)
        return bool((packing.view_as(self.codes.scales, torch.bfloat16) <= largest).all())


def difference_to(
    into: Tensor,
    message: Opened,
    less: Sequence[Opened],
    start: int,
    divisor: float,
    *,
    add: bool,
    plus: Tensor | None = None,
) -> None:
    """Write ``(message - sum(less)) / divisor``, from element ``start`` on, to ``into``.

    With ``add``, ``into`` is not overwritten: ``plus`` and then this quotient are added to it.  If all
    messages are float32 and have the same bits and block length, this takes one pass.
    """
    levels = [m for m in (message, *less) if isinstance(m, OpenedLevels)]
    all_levels = len(levels) == 1 + len(less) and all(m.dtype == torch.float32 for m in levels)
    if all_levels and into.dtype == torch.float32:
        for one in levels:
            one.check_run(start, into.numel())
        codes, *others = (one.codes for one in levels)
        codes.add_difference_(into, start, others, divisor, keep=add, plus=plus)
        return
    if plus is not None:
        into.add_(plus)
    if not less:
        message.decode_to(into, divisor, add=add, start=start)
        return
    made = into.new_empty(into.numel())
    message.decode_to(made, start=start)
    others_sum = made.new_empty(made.numel(), dtype=torch.promote_types(made.dtype, torch.float32))
    sum_to(others_sum, less, start)
    written(made.sub_(others_sum), into, divisor, add=add)


def sum_to(into: Tensor, messages: Sequence[Opened], start: int = 0, *own: Tensor) -> None:
    """Write the sum of the messages, from element ``start`` on, plus ``own``, to ``into``.

    Messages are added in the given order.  ``own`` is at most two vectors; if there are two, their sum
    may overwrite the first.  If all messages are float32 and have the same bits and block length, this
    takes one pass.
    """
    levels = [m for m in messages if isinstance(m, OpenedLevels) and m.dtype == torch.float32]
    if levels and len(levels) == len(messages) and into.dtype == torch.float32:
        for message in levels:
            message.check_run(start, into.numel())
        Codes.sum_to_(into, [message.codes for message in levels], start, *own)
        return
    into.zero_()
    for other in messages:
        other.decode_to(into, add=True, start=start)
    if own:
        into.add_(own[0].add_(own[1]) if len(own) > 1 else own[0])


def _codes_of(header: Header, raw: Tensor, limit: float = 0.0) -> Codes:
    """Return the scales and codes of a message, given the bytes that follow its header."""
    middle = normal_levels.SCALE_BYTES * -(-header.entries // header.detail)
    sizes = header.entries, header.option, header.detail
    return Codes(raw[:middle], raw[middle:], *sizes, limit)


@functools.cache
def _largest_scale(dtype: torch.dtype, bits: int) -> float:
    """Return the largest bf16 scale for which no level overflows ``dtype`` or float32."""
    finite = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    limit = torch.tensor(finite / normal_levels.top_level(bits), dtype=torch.float32, device="cpu")
    return float((limit.view(torch.int32) & -(1 << 16)).view(torch.float32))
