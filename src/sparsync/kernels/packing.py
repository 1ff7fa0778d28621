"""Pack sparse vectors into few bits, with Elias-Fano indices and bf16, int8 or float32 values.

``pack`` and ``unpack`` dispatch to C++ (``native/packing.cpp``) or Triton.  The other functions are the
specification, in plain PyTorch on any device; both backends are bit-equal to it.

Elias-Fano splits each of ``nnz`` ascending indices below ``size`` into two parts.  The ``low_bits`` low
bits are written verbatim.  The high part is written in unary, as the difference from the previous high
part: the i-th index sets bit ``high + i``.  Bit b of the stream is bit ``b % 8`` of byte ``b // 8``.  The
low bits of all entries come first, the unary part follows at the next bit, and zero bits fill the last
byte.
"""

from __future__ import annotations

import sys
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError, WireFormatError
from sparsync.kernels import backend_of, native, reference

__all__ = [
    "BF16",
    "FP32",
    "INT8",
    "in_blocks",
    "index_bits",
    "index_bytes",
    "low_bits",
    "miscounted",
    "pack",
    "pack_indices",
    "pack_values",
    "spread",
    "to_float32",
    "unordered",
    "unpack",
    "unpack_indices",
    "unpack_values",
    "value_bytes",
    "view_as",
]

BF16: Final = 1
INT8: Final = 2
FP32: Final = 3

_WORD = (1 << 32) - 1
_INF, _LARGEST_BF16, _NAN_BF16 = 0x7F800000, 0x7F7F, 0x7FC0  # magnitudes as integers
_LEVELS = 127.0  # int8 codes are -127 ... 127
_NOT_FINITE = -128
_LARGEST_SCALE = float.fromhex("0x1.020406p+121")  # 127 times the next float32 is infinite
_LARGEST = MappingProxyType(  # values up to these stay finite through both conversions
    {torch.float64: torch.finfo(torch.float32).max, torch.float16: 65280.0}
)


# ---- sizes ----------------------------------------------------------------------------------------


def low_bits(nnz: int, size: int) -> int:
    """Return ``floor(log2(size / nnz))``, computed with integers; 0 if there are no entries."""
    return (size // nnz).bit_length() - 1 if nnz else 0


def index_bits(nnz: int, size: int) -> int:
    """Return the exact number of bits for ``nnz`` indices below ``size``; it grows with ``nnz``."""
    if nnz == 0:
        return 0
    low = low_bits(nnz, size)
    return nnz * (low + 1) - (-size >> low)  # subtracting the floor of -x adds the ceiling of x


def index_bytes(nnz: int, size: int) -> int:
    """Return the exact number of bytes for ``nnz`` indices below ``size``."""
    return (index_bits(nnz, size) + 7) // 8


def value_bytes(nnz: int, form: int, block: int) -> int:
    """Return the exact number of bytes for ``nnz`` values; int8 adds a float32 scale per ``block``."""
    if form == INT8:
        return nnz + 4 * -(-nnz // block)
    return nnz * (2 if form == BF16 else 4)


# ---- whole messages -------------------------------------------------------------------------------


def pack(
    header: bytes, indices: Tensor, values: Tensor, size: int, form: int, block: int
) -> tuple[Tensor, Tensor]:
    """Return header, values and indices as one uint8 payload, and the values that the receiver sees.

    C++ requires one int64 index per value, and indices that ascend strictly below ``size``.
    """
    exact = to_float32(values, form)
    on = _functions(exact)
    if on is native:
        payload, rounded = _pack_natively(header, indices.contiguous(), exact, size, form, block)
    else:
        raw = on.pack_values(exact, form, block)
        rounded = exact if form == FP32 else on.unpack_values(raw, values.numel(), form, block)
        start = torch.frombuffer(bytearray(header), dtype=torch.uint8).to(values.device)
        payload = torch.cat([start, raw, on.pack_indices(indices.contiguous(), size)])
    return payload, rounded.to(values.dtype)


def unpack(body: Tensor, nnz: int, size: int, form: int, block: int) -> tuple[Tensor, Tensor]:
    """Return the indices and float32 values of a message's ``body``, whose length was already checked."""
    on, middle = _functions(body), value_bytes(nnz, form, block)
    if on is native:
        body = body.contiguous()
        indices, values = native.empty(nnz, torch.int64), native.empty(nnz, torch.float32)
        message = body.data_ptr(), body.numel(), nnz, size, form, block
        found = native.EXTENSION.unpack(*message, indices.data_ptr(), values.data_ptr())
        if found != nnz:
            raise unordered(size) if found < 0 else miscounted(nnz, found)
        return indices, values
    values = on.unpack_values(body[:middle], nnz, form, block)
    return on.unpack_indices(body[middle:], nnz, size), values


def _functions(tensor: Tensor) -> Any:
    """Return the module that handles the tensor: ``native``, ``triton``, or this one."""
    backend = backend_of(tensor, dtype=tensor.dtype)
    return sys.modules[__name__] if backend is reference else backend


def _pack_natively(
    header: bytes, indices: Tensor, values: Tensor, size: int, form: int, block: int
) -> tuple[Tensor, Tensor]:
    nnz, start = values.numel(), len(header)
    body = value_bytes(nnz, form, block) + index_bytes(nnz, size)
    payload = native.empty(start + body, torch.uint8)
    payload.numpy().data[:start] = header
    rounded = values if form == FP32 else torch.empty_like(values)
    ends = payload.data_ptr() + start, body, rounded.data_ptr()
    shape = nnz, size, form, block
    alike = indices.is_cpu and indices.dtype == torch.int64 and indices.shape == values.shape
    if not alike or not native.EXTENSION.pack(indices.data_ptr(), values.data_ptr(), *shape, *ends):
        raise ConfigurationError(
            f"indices ({tuple(indices.shape)}, {indices.dtype}) must be int64, one per value and "
            f"strictly ascending within [0, {size}); coalesce duplicates and sort first"
        )
    return payload, rounded


def miscounted(nnz: int, found: int) -> WireFormatError:
    """Return the error for an index stream that does not have one bit per entry."""
    return WireFormatError(
        f"a message of {nnz} entries has {found} bits set where its indices stand; it is corrupt"
    )


def unordered(size: int) -> WireFormatError:
    """Return the error for a message whose indices do not ascend."""
    return WireFormatError(f"a message's indices are not strictly ascending within [0, {size})")


# ---- indices --------------------------------------------------------------------------------------


def pack_indices(indices: Tensor, size: int) -> Tensor:
    """Pack ascending int64 ``indices`` below ``size`` into the fewest whole bytes, uint8.

    Example:
        >>> pack_indices(torch.tensor([1, 2, 7]), 8).tolist()  # low bits 1, 0, 1; then 1 01 001 0
        [45, 1]
    """
    nnz = indices.numel()
    low = low_bits(nnz, size)
    bits = index_bits(nnz, size)
    words = indices.new_zeros(bits // 32 + 2)  # 32 bits per int64, so no sum turns negative
    order = torch.arange(nnz, device=indices.device)
    _put_(words, order * low, indices & ((1 << low) - 1))
    _put_(words, nnz * low + (indices >> low) + order, torch.ones_like(indices))
    return words.view(torch.int32)[::2].contiguous().view(torch.uint8)[: (bits + 7) // 8]


def _put_(words: Tensor, at: Tensor, bits: Tensor) -> None:
    """Combine ``bits`` (at most 32 each) with the stream at bit positions ``at`` by "or", in place."""
    shifted = bits << (at & 31)
    words.index_add_(0, at >> 5, shifted & _WORD)  # entries share no bits, so adding equals or-ing
    words.index_add_(0, (at >> 5) + 1, shifted >> 32)


def unpack_indices(packed: Tensor, nnz: int, size: int) -> Tensor:
    """Invert ``pack_indices``; raise WireFormatError for bits that ``pack_indices`` never writes."""
    low = low_bits(nnz, size)
    order = torch.arange(nnz, device=packed.device)
    # read the padding as unary too: a bit that is set there is an extra index, or one beyond the size
    unary = packed[nnz * low // 8 :, None] >> torch.arange(8, device=packed.device)
    ones = (unary & 1).flatten()[nnz * low % 8 :].nonzero().flatten()
    if ones.numel() != nnz:
        raise miscounted(nnz, ones.numel())
    indices = ((ones - order) << low) | _get(packed, order * low, low)
    if nnz and bool((indices[-1] >= size) | (indices.diff() <= 0).any()):
        raise unordered(size)
    return indices


def _get(packed: Tensor, at: Tensor, width: int) -> Tensor:
    """Read ``width`` bits (at most 32) at each of the bit positions ``at``."""
    padded = packed.new_zeros((packed.numel() // 4 + 2) * 4)
    padded[: packed.numel()] = packed
    words = padded.view(torch.int32).to(torch.int64) & _WORD
    pair = words[at >> 5] | (words[(at >> 5) + 1] << 32)
    return (pair >> (at & 31)) & ((1 << width) - 1)


# ---- values ---------------------------------------------------------------------------------------


def to_float32(values: Tensor, form: int) -> Tensor:
    """Convert to float32 for ``pack_values``; finite values stay finite through both conversions."""
    if values.dtype == torch.float64 or (values.dtype == torch.float16 and form != FP32):
        largest = _LARGEST[values.dtype]
        values = torch.where(values.isinf(), values, values.clamp(-largest, largest))
    # set the stride: torch considers a single value contiguous whatever its stride is, but with a stride
    # other than 1, ``view`` refuses a dtype of a different width
    return values.to(torch.float32).contiguous().as_strided(values.shape, (1,))


def pack_values(values: Tensor, form: int, block: int) -> Tensor:
    """Pack float32 ``values`` into uint8; finite values stay finite, and nonfinite values nonfinite.

    BF16 rounds to nearest, ties to even, but never up to Inf; every NaN becomes a quiet NaN.  INT8
    writes the scales of all blocks, ``max |x| / 127`` over a block's finite values, then one code per
    value: ``x / scale`` rounded (ties to even), or -128 for NaN and Inf.
    """
    if form == BF16:
        return _to_bf16(values).view(torch.uint8)
    if form == FP32:
        return values.view(torch.uint8)
    blocks, count = in_blocks(values, block), values.numel()
    finite = blocks.isfinite()
    peaks = torch.where(finite, blocks.abs(), 0.0).amax(1)
    # the divisor is a tensor, because CUDA replaces a scalar divisor with its rounded reciprocal
    scales = (peaks / torch.full_like(peaks, _LEVELS)).clamp_(max=_LARGEST_SCALE)
    divisors = torch.where(scales == 0, 1.0, scales)[:, None]
    # clamp the quotients, which may exceed 127, because denormal scales are inaccurate
    codes = (blocks / divisors).round().clamp(-_LEVELS, _LEVELS)
    codes = torch.where(finite, codes, float(_NOT_FINITE)).to(torch.int8).flatten()[:count]
    return torch.cat([scales.view(torch.uint8), codes.view(torch.uint8)])


def _to_bf16(values: Tensor) -> Tensor:
    """Round to bf16 as int16, in integers, because the NaN bits of torch's own conversion vary."""
    bits = values.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    # round to nearest, ties to even: add 0x7FFF, and one more if the bit that becomes the last is odd
    rounded = (magnitude + (0x7FFF + ((magnitude >> 16) & 1))) >> 16
    rounded = torch.where(magnitude < _INF, rounded.clamp(max=_LARGEST_BF16), rounded)
    rounded = torch.where(magnitude > _INF, _NAN_BF16, rounded)
    # the shift copies the sign into the upper bits; with these, the int32 fits into an int16
    return (rounded | ((bits >> 16) & -0x8000)).to(torch.int16)


def unpack_values(packed: Tensor, nnz: int, form: int, block: int) -> Tensor:
    """Unpack ``nnz`` float32 values; all bytes are legal, and the INT8 code -128 becomes NaN."""
    if form == FP32:
        return view_as(packed, torch.float32)
    if form == BF16:
        return (view_as(packed, torch.int16).to(torch.int32) << 16).view(torch.float32)
    rows = -(-nnz // block)
    scales = view_as(packed[: 4 * rows], torch.float32)
    codes = packed[4 * rows :].view(torch.int8)
    values = codes.to(torch.float32) * spread(scales, block, nnz)
    return torch.where(codes == _NOT_FINITE, torch.nan, values)


def in_blocks(values: Tensor, block: int) -> Tensor:
    """Return a copy of the values as `[rows, block]`, padded with zeros."""
    count, rows = values.numel(), -(-values.numel() // block)
    padded = values.new_zeros(rows * block)
    padded[:count] = values
    return padded.view(rows, block)


def spread(scales: Tensor, block: int, count: int) -> Tensor:
    """Return the scale of each of ``count`` values; ``block`` consecutive values share one."""
    return scales.repeat_interleave(block, output_size=scales.numel() * block)[:count]


def view_as(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """View bytes as ``dtype``; copy them if they do not start at a multiple of its width."""
    return (raw.clone() if raw.storage_offset() % dtype.itemsize else raw).view(dtype)
