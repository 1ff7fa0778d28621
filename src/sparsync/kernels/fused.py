"""Exchanges of packed messages in one C++ pass each (``native/exchange.cpp``).

``wire/parcels.py`` composes the same results, bit for bit, of a codec, dealing and merging; eight ranks
that share two cores spend more time on its intermediate tensors than on anything else.  Every function
here returns None where the composition must be used: no native kernels, other dtypes or devices, a
share that exceeds its message, a malformed message (whose error the codec knows how to word).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsync.kernels import native, packing
from sparsync.kernels.dispatch import backend_of
from sparsync.kernels.native import empty, guarded

__all__ = ["Dealt", "Style", "deal_and_pack", "unpack_and_sum", "unpack_and_undeal"]


class Style(NamedTuple):
    """How packed messages of float32 values are written and read.

    Attributes:
        start: the 16 bytes of their header, with a count of 0.
        form: of the values; see ``kernels/packing.py``.
        block: values that share a scale.
        width: elements of one owner.
    """

    start: bytes
    form: int
    block: int
    width: int

    def raw(self) -> tuple[int, int, int, int, int]:
        """Return the style as C++ takes it: the start as two numbers."""
        first, second = struct.unpack("<2Q", self.start)
        return first, second, self.form, self.block, self.width


class Dealt(NamedTuple):
    """A message per owner (empty for the rank itself), the values that arrive, the rank's entries."""

    messages: list[Tensor]
    arriving: Tensor
    own_indices: Tensor
    own_values: Tensor


def deal_and_pack(
    indices: Tensor, values: Tensor, world_size: int, rank: int, limit: int, style: Style
) -> Dealt | None:
    """Deal entries to owners and pack a message for each but ``rank``.

    Raises:
        ConfigurationError: indices do not ascend.
    """
    if not _takes(indices, values):
        return None
    nnz, header = values.numel(), len(style.start)
    limit = min(limit, nnz, style.width)
    body = packing.value_bytes(limit, style.form, style.block)
    stride = header + body + packing.index_bytes(limit, style.width)
    messages, lengths = empty(world_size * stride, torch.uint8), empty(world_size, torch.int64)
    arriving, own_values = empty(nnz, torch.float32), empty(nnz, torch.float32)
    own_indices = empty(nnz, torch.int64)
    indices, values = indices.contiguous(), values.contiguous()
    mine = guarded(
        native.EXTENSION.deal_and_pack,
        indices.data_ptr(),
        values.data_ptr(),
        nnz,
        world_size,
        rank,
        limit,
        style.raw(),
        (messages.data_ptr(), stride, lengths.data_ptr()),
        arriving.data_ptr(),
        own_indices.data_ptr(),
        own_values.data_ptr(),
        native.chosen(),
    )
    if mine < 0:
        return None
    cut = [messages[i * stride : i * stride + n] for i, n in enumerate(lengths.tolist())]
    return Dealt(cut, arriving, own_indices[:mine], own_values[:mine])


def unpack_and_sum(
    messages: Sequence[Tensor], rank: int, indices: Tensor, values: Tensor, style: Style, k: int
) -> tuple[Tensor, Tensor] | None:
    """Sum messages and the entries of ``rank``, in rank order; return the k largest sums."""
    if not _takes(indices, values, messages):
        return None
    indices, values = indices.contiguous(), values.contiguous()
    own = rank, indices.data_ptr(), values.data_ptr(), values.numel()
    capacity = max(min(k, style.width), 0)
    return _received(native.EXTENSION.unpack_and_sum, messages, (*own, style.raw(), k), capacity)


def unpack_and_undeal(
    messages: Sequence[Tensor], like: Tensor, style: Style, size: int, k: int
) -> tuple[Tensor, Tensor] | None:
    """Join the messages of all owners to a vector of ``size`` elements; return its k largest.

    ``like`` is any tensor of the result's dtype and device.
    """
    if backend_of(like) is not native or backend_of(*messages, dtype=torch.uint8) is not native:
        return None
    # C++ writes a tile whole, and then drops what ties at its end
    tile: int = native.EXTENSION.slots_per_tile
    capacity = min(size, max(k, 0) + tile, sum(message.numel() for message in messages))
    return _received(native.EXTENSION.unpack_and_undeal, messages, (style.raw(), size, k), capacity)


def _takes(indices: Tensor, values: Tensor, messages: Sequence[Tensor] = ()) -> bool:
    """Whether entries and messages can be passed to C++."""
    return (
        backend_of(values) is native
        and backend_of(indices, dtype=torch.int64) is native
        and all(message.is_cpu and message.dtype == torch.uint8 for message in messages)
    )


def _received(
    kernel: Any, messages: Sequence[Tensor], arguments: tuple[object, ...], capacity: int
) -> tuple[Tensor, Tensor] | None:
    """Call a kernel that reads messages, with room for its entries; None if one is malformed."""
    messages = [message.contiguous() for message in messages]
    raw = [(message.data_ptr(), message.numel()) for message in messages]
    indices, values = empty(capacity, torch.int64), empty(capacity, torch.float32)
    room = indices.data_ptr(), values.data_ptr(), capacity
    count = guarded(kernel, raw, *arguments, room, native.chosen())
    return None if count < 0 else (indices[:count], values[:count])
