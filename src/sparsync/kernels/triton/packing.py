"""Packing on a CUDA device: the functions of ``kernels/packing.py`` in Triton, bit for bit.

Nothing waits for the device except the check of unpacked indices, once per message.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsync.errors import WireFormatError
from sparsync.kernels import packing as spec
from sparsync.kernels.packing import _LARGEST_SCALE, _LEVELS, _NOT_FINITE
from sparsync.kernels.triton import packing_device as device
from sparsync.kernels.triton.language import BLOCK, blocks_of, cover, launch

__all__ = ["pack_indices", "pack_values", "unpack_indices", "unpack_values"]


def pack_indices(indices: Tensor, size: int) -> Tensor:
    """Pack ascending int64 ``indices`` below ``size`` into the fewest whole bytes, uint8."""
    nnz = indices.numel()
    low, bits = spec.low_bits(nnz, size), spec.index_bits(nnz, size)
    words = indices.new_zeros(bits // 32 + 2, dtype=torch.int32)
    cover(device.encode_indices, nnz, indices, words, nnz, low, nnz * low)
    return words.view(torch.uint8)[: (bits + 7) // 8]


def unpack_indices(packed: Tensor, nnz: int, size: int) -> Tensor:
    """Unpack what ``pack_indices`` packed, and check every bit.

    Raises:
        WireFormatError: not ``nnz`` strictly ascending indices below ``size``, or padding is set.
    """
    low = spec.low_bits(nnz, size)
    first, end = nnz * low, 8 * packed.numel()  # padding counts as unary, as in the specification
    counts = packed.new_empty(blocks_of(end - first), dtype=torch.int32)
    cover(device.count_ones, end - first, packed, counts, first, end)
    ends, indices = counts.cumsum(0), packed.new_zeros(nnz, dtype=torch.int64)
    cover(device.decode_indices, end - first, packed, ends, indices, first, end, nnz, low)
    disorder = (indices.diff() <= 0).sum() + (indices[-1:] >= size).sum()
    ones, wrong = torch.stack([counts.sum(), disorder]).tolist()  # the host waits here
    if ones != nnz:
        raise WireFormatError(
            f"a message of {nnz} entries has {ones} bits set where its indices stand; it is corrupt"
        )
    if wrong:
        raise WireFormatError(f"a message's indices are not strictly ascending within [0, {size})")
    return indices


def pack_values(values: Tensor, form: int, block: int) -> Tensor:
    """Pack float32 ``values`` into uint8; finite values stay finite, others non-finite."""
    n = values.numel()
    if form == spec.FP32:
        return values.view(torch.uint8)
    packed = values.new_empty(spec.value_bytes(n, form, block), dtype=torch.uint8)
    if form == spec.BF16:
        cover(device.encode_bf16, n, values.view(torch.int32), packed.view(torch.int16), n)
        return packed
    rows = -(-n // block)
    scales, codes = packed[: 4 * rows].view(torch.float32), packed[4 * rows :].view(torch.int8)
    width = 1 << (block - 1).bit_length()  # what a program sees is as wide as a power of two
    height = max(BLOCK // width, 1)
    arguments = (values, scales, codes, n, block, _LEVELS, _LARGEST_SCALE, _NOT_FINITE)
    launch(device.encode_int8, -(-rows // height), *arguments, ROWS=height, WIDTH=width)
    return packed


def unpack_values(packed: Tensor, nnz: int, form: int, block: int) -> Tensor:
    """Unpack ``nnz`` float32 values; any bytes give some values, -128 of INT8 gives NaN."""
    if form == spec.FP32:
        return _aligned(packed, torch.float32)
    values = packed.new_empty(nnz, dtype=torch.float32)
    if form == spec.BF16:
        cover(device.decode_bf16, nnz, _aligned(packed, torch.int16), values.view(torch.int32), nnz)
        return values
    rows = -(-nnz // block)
    scales, codes = _aligned(packed[: 4 * rows], torch.float32), packed[4 * rows :].view(torch.int8)
    cover(device.decode_int8, nnz, scales, codes, values, nnz, block, _NOT_FINITE)
    return values


def _aligned(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """View bytes as ``dtype``, copying where the offset does not suit it."""
    return (raw.clone() if raw.storage_offset() % dtype.itemsize else raw).view(dtype)
