"""Quantise to the levels of a normal distribution with 1 to 4 bits per value, or uniformly with 8.

``quantise_plainly`` and ``decode_plainly_`` are the specification, in PyTorch on any device.  C++
(``native/levels_body.h``, for blocks of a multiple of 8 values) and Triton (for 2^j >= 8) are bit-equal.

The highest bit of a code is the sign; the other bits are the number of the level.  Code i of b bits is at
bit ``b i`` of the stream; bit j of a stream is bit ``j % 8`` (0 is lowest) of byte ``j // 8``.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, Final, final

import torch
from torch import Tensor

from sparsync.kernels import backend_of, divide_, native, packing, reference

__all__ = [
    "BITS",
    "SCALE_BYTES",
    "Codes",
    "decode_",
    "decode_plainly_",
    "pack_codes",
    "quantise",
    "quantise_plainly",
    "sums_of_halves",
    "top_level",
    "unpack_codes",
]

SCALE_BYTES: Final = 2
_UNIFORM: Final = 8  # bits with equally spaced levels

# thresholds in units of the root mean square; they minimise the mean square error for a normal
# distribution (Max, 1960, table I)
_THRESHOLDS = MappingProxyType(
    {
        1: (),
        2: (0.9816,),
        3: (0.5006, 1.050, 1.748),
        4: (0.2582, 0.5224, 0.7996, 1.099, 1.437, 1.844, 2.401),
        _UNIFORM: (),
    }
)
_LEVELS = MappingProxyType(
    {
        1: (1.0,),
        2: (0.4528, 1.510),
        3: (0.2451, 0.7560, 1.344, 2.152),
        4: (0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733),
        _UNIFORM: tuple(map(float, range(128))),
    }
)
BITS: Final = tuple(_LEVELS)
_EXPONENT, _SMALLEST, _LARGEST = 0x7F800000, 0x00800000, 0x7E800000  # floats as integers


def top_level(bits: int) -> float:
    """Return the largest level."""
    return _LEVELS[bits][-1]


@functools.cache
def _tables(bits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the thresholds and the levels."""
    pair = _THRESHOLDS[bits], _LEVELS[bits]
    first, second = (torch.tensor(row, dtype=torch.float32, device=device) for row in pair)
    return first, second


def quantise(values: Tensor, bits: int, block: int, limit: float) -> Tensor:
    """Return the bytes of the bf16 scales, followed by the bytes of the codes.

    Thresholds are multiples of a block's root mean square.  A block's scale is ``<q, x> / <q, q>``, where
    q is the vector of its levels, so the decoded block is the projection of x onto q.  If a block has NaN
    or Inf, all of its values become NaN.

    Args:
        values: any number of float32 values.
        bits: one of ``BITS``.
        block: number of values that share a scale.
        limit: the largest scale, a bf16; decoded values are at most ``top_level(bits) * limit``.
    """
    middle = SCALE_BYTES * -(-values.numel() // block)
    raw = values.new_empty(middle - -values.numel() * bits // 8, dtype=torch.uint8)
    Codes(raw[:middle], raw[middle:], values.numel(), bits, block, limit).write_(values, 0)
    return raw


def quantise_plainly(values: Tensor, bits: int, block: int, limit: float) -> Tensor:
    """Compute the same as ``quantise`` in plain PyTorch."""
    thresholds, levels = _tables(bits, values.device)
    count = values.numel()
    blocks = packing.in_blocks(values, block)
    magnitudes = blocks.abs()
    peaks = magnitudes.amax(1, keepdim=True)
    # after division by a power of two near the largest value, no square overflows, and no square that
    # matters underflows
    units = (peaks.view(torch.int32) & _EXPONENT).clamp(_SMALLEST, _LARGEST).view(torch.float32)
    scaled = magnitudes / units
    if bits == _UNIFORM:
        largest = torch.where(peaks > 0, peaks / units, 1.0)
        number = (scaled * (torch.full_like(largest, 127.0) / largest)).round()
        number = torch.where(peaks.isfinite(), number, 0.0).to(torch.uint8)
    else:
        lengths = torch.full_like(peaks, block)
        lengths[-1:] -= blocks.numel() - count
        squares = sums_of_halves(scaled * scaled) / lengths
        # take the root in float64 and round it once, because PyTorch's float32 square root may be off by
        # one bit
        spread = squares.double().sqrt().float()
        number = torch.zeros_like(blocks, dtype=torch.uint8)
        for threshold in thresholds:
            number += scaled > threshold * spread
    nearest = levels[number.int()]
    nearest.view(-1)[count:] = 0.0
    # the projection's error is orthogonal to q, so the decoded block is never longer than x
    scales = sums_of_halves(nearest * scaled) / sums_of_halves(nearest * nearest) * units
    scales = torch.where(peaks == 0, 0.0, scales.clamp(max=limit))
    scales = torch.where(peaks.isfinite(), scales, torch.nan)
    raw = packing.pack_values(scales.flatten(), packing.BF16, 1)
    scales = packing.unpack_values(raw, len(blocks), packing.BF16, 1)[:, None]
    negative = (blocks < 0) & (nearest > 0)
    codes = number | negative.to(torch.uint8) << (bits - 1)
    # blocks of zeros and of NaN have only one encoding each, so that equal vectors give equal bytes
    codes = torch.where(scales > 0, codes, 0)
    return torch.cat([raw, pack_codes(codes.view(-1)[:count], bits)])


def decode_(
    into: Tensor, raw: Tensor, bits: int, block: int, divisor: float = 1.0, *, keep: bool = True
) -> None:
    """Decode the result of ``quantise``, divide, and write to ``into`` (float32) or add to it."""
    count, raw = into.numel(), raw.contiguous()
    middle = SCALE_BYTES * -(-count // block)
    Codes(raw[:middle], raw[middle:], count, bits, block).decode_(into, 0, divisor, keep=keep)


def decode_plainly_(
    into: Tensor, raw: Tensor, bits: int, block: int, divisor: float = 1.0, *, keep: bool = True
) -> None:
    """Compute the same as ``decode_`` in plain PyTorch."""
    levels = _tables(bits, raw.device)[1]
    count, middle = into.numel(), SCALE_BYTES * -(-into.numel() // block)
    scales = packing.unpack_values(raw[:middle], middle // SCALE_BYTES, packing.BF16, 1)
    levels = torch.cat([levels, -levels])[unpack_codes(raw[middle:], bits, count).int()]
    values = levels * packing.spread(scales, block, count) / torch.full_like(into, divisor)
    torch.add(into if keep else torch.zeros_like(into), values, out=into)


@final
class Codes:
    """The scales and codes of ``size`` values, in two separate tensors, written and read in runs.

    A run begins where a block begins, and ends at the end of a block or at the last value.  ``limit`` is
    the largest scale that is written.
    """

    def __init__(
        self, scales: Tensor, codes: Tensor, size: int, bits: int, block: int, limit: float = 0.0
    ) -> None:
        self.scales, self.bits, self.block, self.limit = scales, bits, block, limit
        self._codes, self._native = codes, None
        in_cpp = native.EXTENSION is not None and block % 8 == 0 and scales.is_cpu
        if in_cpp and scales.is_contiguous() and codes.is_contiguous():
            self._native = native.Codes(scales, codes, size, self._levels_on(scales.device))

    def write_(self, values: Tensor, start: int, more: Tensor | None = None) -> None:
        """Quantise float32 values, or their sum with ``more``, into the elements from ``start`` on."""
        vectors = (values,) if more is None else (values, more)
        backend = _backend_for((self,), *vectors)
        if backend is native and self._native is not None:
            self._native.write_(values, start, more)
            return
        scales, codes = self.run(start, values.numel())
        if backend is not None and scales.device == values.device:
            backend.quantise_(scales, codes, values, more, self._levels_on(values.device))
            return
        values = values if more is None else values + more
        raw = quantise_plainly(values, self.bits, self.block, self.limit)
        scales.copy_(raw[: scales.numel()])
        codes.copy_(raw[scales.numel() :])

    def decode_(self, into: Tensor, start: int, divisor: float = 1.0, *, keep: bool = True) -> None:
        """Decode elements from ``start`` on like ``decode_``; ``into`` may be on a different device."""
        self.add_difference_(into, start, (), divisor, keep=keep)

    def _levels_on(self, device: torch.device) -> native.Levels:
        return self.bits, self.block, self.limit, *_tables(self.bits, device)

    def run(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """Return the scales and the codes of the elements ``[start, start + count)``."""
        stop = start + count
        scales = slice(SCALE_BYTES * (start // self.block), SCALE_BYTES * -(-stop // self.block))
        codes = slice(start * self.bits // 8, (stop * self.bits + 7) // 8)
        return self.scales[scales], self._codes[codes]

    def add_difference_(
        self,
        into: Tensor,
        start: int,
        less: Sequence[Codes],
        divisor: float,
        *,
        keep: bool,
        plus: Tensor | None = None,
    ) -> None:
        """Write ``(self - sum(less)) / divisor`` or, with ``keep``, add it and ``plus`` to ``into``."""
        messages, more = (self, *less), () if plus is None else (plus,)
        backend = _backend_for(messages, into, *more)
        if backend is native and self._native is not None:
            others = [other._native for other in less if other._native is not None]
            self._native.decode_(into, start, divisor, keep=keep, plus=plus, less=others)
            return
        if backend is not None:
            terms = (into, *more) if keep else ()
            rows, levels = _rows(messages, into, start), self._levels_on(into.device)
            backend.decode_levels_(into, rows, levels, divisor, sign=-1, terms=terms)
            return
        if plus is not None:
            into.add_(plus)
        if not less:
            raw = _rows(messages, into, start)[0]
            decode_plainly_(into, raw, self.bits, self.block, divisor, keep=keep)
            return
        made, others_sum = into.new_empty(into.numel()), into.new_empty(into.numel())
        self.decode_(made, start, keep=False)
        Codes.sum_to_(others_sum, less, start)
        divide_(made.sub_(others_sum), divisor)
        torch.add(into if keep else torch.zeros_like(into), made, out=into)

    @staticmethod
    def sum_to_(into: Tensor, messages: Sequence[Codes], start: int, *own: Tensor) -> None:
        """Write the sum of the messages, from element ``start`` on, plus ``own``, to ``into``.

        Messages are added in the given order.  ``own`` is at most two vectors; if there are two, their
        sum may overwrite the first.
        """
        backend = _backend_for(messages, into, *own)
        if backend is not None and backend is not native:
            rows, levels = _rows(messages, into, start), messages[0]._levels_on(into.device)
            backend.decode_levels_(into, rows, levels, terms=own)
            return
        mine = own[0].add_(own[1]) if len(own) > 1 else next(iter(own), None)
        if backend is native:
            known = [message._native for message in messages if message._native is not None]
            native.sum_codes_(into, known, start, mine)
            return
        into.zero_()
        for message in messages:
            message.decode_(into, start)
        if mine is not None:
            into.add_(mine)


def _rows(messages: Sequence[Codes], into: Tensor, start: int) -> Tensor:
    """Return the bytes for the elements of ``into``, a row per message, on the device of ``into``."""
    # a rank's own messages are on its device, but other ranks' messages are in host memory
    runs = [torch.cat(message.run(start, into.numel())).to(into.device) for message in messages]
    return torch.stack(runs)


def _backend_for(messages: Sequence[Codes], *vectors: Tensor) -> Any:
    """Return the backend that can handle all these messages and vectors; None for the specification."""
    first, backend = messages[0], backend_of(*vectors)
    if backend is reference or first.block % 8 or not all(v.is_contiguous() for v in vectors):
        return None
    if any((message.bits, message.block) != (first.bits, first.block) for message in messages):
        return None
    if backend is native:
        return None if any(message._native is None for message in messages) else native
    whole = first.block & (first.block - 1) == 0
    return importlib.import_module("sparsync.kernels.triton_levels") if whole else None


def sums_of_halves(rows: Tensor) -> Tensor:
    """Return the sum of each row, computed by adding its halves until one number is left.

    This fixes the order of additions; with ``sum``, it would depend on the machine and its threads.
    """
    while rows.shape[1] > 1:
        half = (rows.shape[1] + 1) // 2
        folded = rows[:, :half].clone()
        folded[:, : rows.shape[1] - half] += rows[:, half:]
        rows = folded
    return rows


# ---- codes of few bits ----------------------------------------------------------------------------


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack the lowest 1, 2, 3, 4 or 8 bits of uint8 ``codes``; a byte's first code is in its lowest bits.

    Example:
        >>> pack_codes(torch.tensor([1, 0, 3, 2, 1], dtype=torch.uint8), bits=2).tolist()
        [177, 1]
    """
    count = codes.numel()
    padded = codes.new_zeros(-(-count // 8) * 8)
    padded[:count] = codes & ((1 << bits) - 1)
    # a word holds eight codes, one per byte; three rounds merge them into pairs, fours and eights
    words = padded.view(torch.int64)
    for width in (8, 16, 32) if bits < 8 else ():
        kept = bits * width // 8
        mask = sum(((1 << 2 * kept) - 1) << at for at in range(0, 64, 2 * width))
        words = (words | words >> (width - kept)) & mask
    packed = words.view(torch.uint8).view(-1, 8)[:, :bits]
    return packed.reshape(-1)[: -(-count * bits // 8)]


def unpack_codes(raw: Tensor, bits: int, count: int) -> Tensor:
    """Return ``count`` codes as uint8."""
    padded = raw.new_zeros(-(-count // 8) * bits)
    padded[: raw.numel()] = raw
    words = raw.new_zeros(-(-count // 8), 8)
    words[:, :bits] = padded.view(-1, bits)
    shifts = torch.arange(0, 8 * bits, bits, device=raw.device)
    codes = words.view(torch.int64) >> shifts & ((1 << bits) - 1)
    return codes.to(torch.uint8).view(-1)[:count]
