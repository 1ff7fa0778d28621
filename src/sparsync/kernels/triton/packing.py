"""Packing on a CUDA device: the functions of ``kernels/packing.py`` in Triton, bit for bit.

Nothing waits for the device except the check of unpacked indices, once per message.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsync.kernels import packing as spec
from sparsync.kernels.packing import _LARGEST_SCALE, _LEVELS, _NOT_FINITE
from sparsync.kernels.triton import packing_device as device
from sparsync.kernels.triton.language import BLOCK, blocks_of, cover, launch

__all__ = ["pack_indices", "pack_values", "unpack_indices", "unpack_values"]


def pack_indices(indices: Tensor, size: int) -> Tensor:
    """See ``packing.pack_indices``."""
    nnz = indices.numel()
    low, bits = spec.low_bits(nnz, size), spec.index_bits(nnz, size)
    words = indices.new_zeros(bits // 32 + 2, dtype=torch.int32)
    cover(device.encode_indices, nnz, indices, words, nnz, low, nnz * low)
    return words.view(torch.uint8)[: (bits + 7) // 8]


def unpack_indices(packed: Tensor, nnz: int, size: int) -> Tensor:
    """See ``packing.unpack_indices``."""
    low = spec.low_bits(nnz, size)
    first, end = nnz * low, 8 * packed.numel()  # padding counts as unary, as in the specification
    counts = packed.new_empty(blocks_of(end - first), dtype=torch.int32)
    cover(device.count_ones, end - first, packed, counts, first, end)
    ends, indices = counts.cumsum(0), packed.new_zeros(nnz, dtype=torch.int64)
    cover(device.decode_indices, end - first, packed, ends, indices, first, end, nnz, low)
    disorder = (indices.diff() <= 0).sum() + (indices[-1:] >= size).sum()
    ones, wrong = torch.stack([counts.sum(), disorder]).tolist()  # the host waits here
    if ones != nnz:
        raise spec.miscounted(nnz, ones)
    if wrong:
        raise spec.unordered(size)
    return indices


def pack_values(values: Tensor, form: int, block: int) -> Tensor:
    """See ``packing.pack_values``."""
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
    """See ``packing.unpack_values``."""
    if form == spec.FP32:
        return spec.view_as(packed, torch.float32)
    values = packed.new_empty(nnz, dtype=torch.float32)
    if form == spec.BF16:
        rounded = spec.view_as(packed, torch.int16)
        cover(device.decode_bf16, nnz, rounded, values.view(torch.int32), nnz)
        return values
    rows = -(-nnz // block)
    scales = spec.view_as(packed[: 4 * rows], torch.float32)
    codes = packed[4 * rows :].view(torch.int8)
    cover(device.decode_int8, nnz, scales, codes, values, nnz, block, _NOT_FINITE)
    return values
