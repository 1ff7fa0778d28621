"""Dealing elements to ranks like cards: every P consecutive ones go to P different owners.

Element i lies in group g = i // P and belongs to owner ``(i + h(g)) mod P``, where h is a hash: who
gets which card changes from group to group, so that no stride of the support (a column of a matrix)
meets one owner only.  Within its owner the element has the index g: order is kept.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparsync.kernels import native
from sparsync.kernels.dispatch import backend_of

__all__ = ["Dealt", "deal", "undeal"]

_LOW_32 = 0xFFFFFFFF


class Dealt(NamedTuple):
    """Elements grouped by owner, ascending within each.

    Attributes:
        order: `[nnz]` their positions among the dealt elements.
        local: `[nnz]` their indices within their owners.
        counts: number of elements of each owner.
    """

    order: Tensor
    local: Tensor
    counts: list[int]


def deal(indices: Tensor, world_size: int) -> Dealt:
    """Group ascending indices by owner.

    Example:
        >>> deal(torch.arange(6), 3).counts
        [2, 2, 2]
    """
    if backend_of(indices, dtype=torch.int64) is native:
        return Dealt(*native.deal(indices.contiguous(), world_size))
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
    if backend_of(local, dtype=torch.int64) is native:
        return native.undeal(local.contiguous(), owner, world_size)
    return local * world_size + (owner - _turn(local, world_size)) % world_size


def _turn(group: Tensor, world_size: int) -> Tensor:
    """Hash a group's number to ``[0, world_size)``: MurmurHash3's 32-bit finaliser."""
    x = (group ^ (group >> 32)) & _LOW_32
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _LOW_32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _LOW_32
    return ((x ^ (x >> 16)) * world_size) >> 32
