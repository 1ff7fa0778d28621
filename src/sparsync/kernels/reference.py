"""The hot loops in plain PyTorch: the specification that all faster kernels match bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError
from sparsync.kernels.keys import check_pair, magnitude_keys

__all__ = [
    "Dealt",
    "accumulate_",
    "count_from",
    "deal",
    "divide_",
    "find",
    "merge",
    "restrict",
    "scatter_",
    "subtract_",
    "top",
    "undeal",
]

# number of elements that ``accumulate_`` copies at a time: one launch on a GPU, and a piece that fits
# into the cache on a CPU
_BLOCK = 1 << 20
_LOW_32 = 0xFFFFFFFF


def accumulate_(
    residual: Tensor, gradient: Tensor, key: int | None = None, limit: int = 0
) -> tuple[Tensor, Tensor] | None:
    """``residual, gradient = residual + gradient, residual``, in place; find elements that reach ``key``.

    The swap keeps the former residual in the gradient's memory, for an exact undo without an additional
    buffer.  Both vectors are `[n]`, contiguous, and have the same dtype and device (otherwise
    ``ConfigurationError``).

    Returns:
        The ascending indices and the values of the new residual's elements with ``magnitude_keys`` of at
        least ``max(key, 1)``; None if there is no key or if there are more than ``limit`` elements.

    Example:
        >>> residual, gradient = torch.tensor([1.0, -4.0]), torch.tensor([0.5, 1.0])
        >>> accumulate_(residual, gradient, key=int(magnitude_keys(torch.tensor(2.0))), limit=2)
        (tensor([1]), tensor([-3.]))
        >>> residual.tolist(), gradient.tolist()
        ([1.5, -3.0], [1.0, -4.0])
    """
    check_pair(residual, gradient)
    for start in range(0, residual.numel(), _BLOCK):
        new, old = residual[start : start + _BLOCK], gradient[start : start + _BLOCK]
        before = new.clone()
        new.add_(old)
        old.copy_(before)
    return None if key is None else find(residual, key, limit)


def find(x: Tensor, key: int, limit: int | None) -> tuple[Tensor, Tensor] | None:
    """Return entries with a magnitude key of at least ``max(key, 1)``; None if more than ``limit``.

    Example:
        >>> find(torch.tensor([0.0, 3.0, -0.0]), 0, None)
        (tensor([1]), tensor([3.]))
    """
    keys = magnitude_keys(x)
    # a key above all others is too large for their dtype, so it cannot be compared with them
    if key > torch.iinfo(keys.dtype).max:
        indices = torch.empty(0, dtype=torch.int64, device=x.device)
    else:
        indices = (keys >= max(key, 1)).nonzero().flatten()
    if limit is not None and indices.numel() > max(limit, 0):
        return None
    return indices, x[indices]


def top(x: Tensor, k: int) -> Tensor:
    """Return the ascending positions of the ``min(k, nnz)`` non-zero elements of largest magnitude.

    Ties go to the lower position.

    Example:
        >>> top(torch.tensor([1.0, -3.0, 0.0, 1.0]), 2).tolist()
        [0, 1]
    """
    k = min(k, x.numel())
    if k <= 0:
        return torch.empty(0, dtype=torch.int64, device=x.device)
    keys = magnitude_keys(x)
    kth = torch.topk(keys, k, sorted=False).values.min().clamp(min=1)  # zeros are never selected
    positions = (keys >= kth).nonzero().flatten()
    surplus = positions.numel() - k
    # several elements tie at the k-th magnitude: drop those with the highest positions
    if surplus > 0:
        ties = (keys[positions] == kth).nonzero().flatten()
        keep = torch.ones(positions.numel(), dtype=torch.bool, device=x.device)
        keep[ties[ties.numel() - surplus :]] = False
        positions = positions[keep]
    return positions


def count_from(values: Tensor, keys: Tensor) -> Tensor:
    """Return for each of the ascending ``keys`` how many values reach it; `[len(keys)]`, int64.

    Example:
        >>> keys = magnitude_keys(torch.tensor([0.0, 1.0, 4.0]))
        >>> count_from(torch.tensor([2.0, 0.0, -4.0, 0.5]), keys).tolist()
        [4, 2, 1]
    """
    mine, keys = magnitude_keys(values).to(torch.int64), keys.to(torch.int64).contiguous()
    # a value that reaches a key also reaches all keys before it, so running sums from the end give the
    # counts
    reached = torch.searchsorted(keys, mine, right=True)
    counts = keys.new_zeros(keys.numel() + 1)
    counts.index_add_(0, reached, torch.ones_like(reached))
    return counts.flip(0).cumsum(0).flip(0)[1:]


# ---- indices and values -----------------------------------------------------------------------------


def merge(
    streams: Sequence[tuple[Tensor, Tensor]], size: int, within: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Sum ascending ``(indices, values)`` streams by a left fold in the given order; drop zero sums.

    The fold is ``((s0 + s1) + s2) + ...`` per index, on every device, without atomics.

    Args:
        streams: at least one; within each, indices are ascending and unique.
        size: all indices are in ``[0, size)``.
        within: ascending indices; entries at other indices are left out.

    Raises:
        ConfigurationError: there are no streams; in C++, also if the indices of a stream do not ascend
            within ``[0, size)``.  With ``within``, most entries are skipped, and C++ checks only a
            stream's first and last index, not the order.

    Example:
        >>> a = torch.tensor([0, 2]), torch.tensor([1.0, 4.0])
        >>> indices, values = merge([a, (torch.tensor([0]), torch.tensor([-1.0]))], 3)
        >>> indices.tolist(), values.tolist()
        ([2], [4.0])
        >>> merge([a], 3, within=torch.tensor([0, 1]))
        (tensor([0]), tensor([1.]))
    """
    if not streams:
        raise ConfigurationError(
            "merge: no streams were given; pass at least one, which may be empty"
        )
    if within is not None:
        kept = [restrict(indices, within) for indices, _ in streams]
        streams = [(i[which], v[which]) for which, (i, v) in zip(kept, streams, strict=True)]
    union = torch.unique(torch.cat([indices for indices, _ in streams]))
    total = torch.zeros(union.numel(), dtype=streams[0][1].dtype, device=union.device)
    # add one stream after the other; indices are unique within a stream, so the order of additions is
    # fixed
    for indices, values in streams:
        at = torch.searchsorted(union, indices)
        total[at] = total[at] + values
    stored = total != 0
    if bool(stored.all()):
        return union, total
    return union[stored], total[stored]


def restrict(indices: Tensor, among: Tensor) -> Tensor:
    """Return the positions of the ``indices`` that occur in ``among``; both ascend.

    Example:
        >>> restrict(torch.tensor([1, 4, 9]), torch.tensor([0, 4, 9, 12])).tolist()
        [1, 2]
    """
    if indices.numel() == 0 or among.numel() == 0:
        return indices.new_empty(0)
    at = torch.searchsorted(among, indices).clamp_(max=among.numel() - 1)
    return (among[at] == indices).nonzero().flatten()


def subtract_(dense: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """``dense[indices] -= values``, in place; indices are unique.  Returns ``dense``.

    Raises:
        ConfigurationError: in C++, if an index is out of range; then nothing is subtracted.
    """
    dense[indices] -= values
    return dense


def scatter_(dense: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """``dense = 0; dense[indices] = values``, in place; indices ascend.  Returns ``dense``.

    Raises:
        ConfigurationError: in C++, if indices do not ascend within ``dense``; then nothing is written.
    """
    dense.zero_()
    dense[indices] = values.to(dense.dtype)
    return dense


def divide_(values: Tensor, divisor: float) -> Tensor:
    """``values /= divisor``, in place, with every quotient rounded once on every device.

    Example:
        >>> divide_(torch.tensor([3.0, 1.0]), 2).tolist()
        [1.5, 0.5]
    """
    if values.is_cpu:
        return values.div_(divisor)
    # If the divisor is a number, or a CPU tensor with one element, CUDA multiplies by its rounded
    # reciprocal, which can change the last bit.  Only a divisor on the device is divided by exactly.
    # It has a dimension, because torch would round a 0-dimensional one to a 16-bit dtype first.
    wide = torch.promote_types(values.dtype, torch.float32)
    return values.div_(values.new_full((1,), divisor, dtype=wide))


# ---- dealing ----------------------------------------------------------------------------------------


class Dealt(NamedTuple):
    """Elements grouped by owner, in ascending order within each group.

    Attributes:
        order: `[nnz]`, positions among the dealt elements.
        local: `[nnz]`, indices at the owner.
        counts: number of elements of each owner.
    """

    order: Tensor
    local: Tensor
    counts: list[int]


def deal(indices: Tensor, world_size: int) -> Dealt:
    """Deal ascending indices to owners like cards: any aligned group of P elements has P owners.

    Element i is in group g = i // P and belongs to owner ``(i + h(g)) mod P``, where h is a hash.  The
    order of owners changes from group to group, so the entries of a strided support (such as a matrix
    column) do not all go to one owner.  The element's index at its owner is g, which preserves the order.

    Example:
        >>> deal(torch.arange(6), 3).counts
        [2, 2, 2]
    """
    # the sort by owner is stable, so that each owner's indices still ascend
    group = indices // world_size
    owner = (indices + _turn(group, world_size)) % world_size
    order = torch.argsort(owner, stable=True)
    return Dealt(order, group[order], torch.bincount(owner, minlength=world_size).tolist())


def undeal(local: Tensor, owner: int, world_size: int) -> Tensor:
    """Return the indices of an owner's elements: the inverse of ``deal``.

    Example:
        >>> dealt = deal(torch.arange(6), 3)
        >>> mine = dealt.local.split(dealt.counts)[1]
        >>> torch.equal(undeal(mine, 1, 3), dealt.order.split(dealt.counts)[1])
        True
    """
    return local * world_size + (owner - _turn(local, world_size)) % world_size


def _turn(group: Tensor, world_size: int) -> Tensor:
    """Hash a group's number to ``[0, world_size)``: MurmurHash3's 32-bit finaliser."""
    # the last product maps the 32-bit number to the range without a division
    x = (group ^ (group >> 32)) & _LOW_32
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _LOW_32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _LOW_32
    return ((x ^ (x >> 16)) * world_size) >> 32
