"""The hot loops in plain PyTorch: the specification that every faster kernel must equal bit for bit.

``kernels/__init__.py`` describes the functions.

Magnitudes are compared as the integer bits of ``|x|``.  That orders finite floats like ``abs``, puts
Inf above them and NaN above Inf: a NaN is selected (and seen), never silently lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError

__all__ = [
    "accumulate_",
    "count_from",
    "deal",
    "find",
    "key_range",
    "magnitude_keys",
    "merge",
    "restrict",
    "scatter_",
    "subtract_",
    "top",
    "undeal",
]

_INTEGER_OF = MappingProxyType(
    {
        torch.float32: torch.int32,
        torch.float64: torch.int64,
        torch.float16: torch.int16,
        torch.bfloat16: torch.int16,
    }
)
_MANTISSA_BITS = MappingProxyType(
    {torch.float32: 23, torch.float64: 52, torch.float16: 10, torch.bfloat16: 7}
)
# elements that ``accumulate_`` copies at a time: on a GPU one launch, in a CPU's cache one round
_BLOCK = 1 << 20
_LOW_32 = 0xFFFFFFFF


def accumulate_(
    residual: Tensor, gradient: Tensor, key: int | None = None, limit: int = 0
) -> tuple[Tensor, Tensor] | None:
    """``residual, gradient = residual + gradient, residual``, in place; find what reaches ``key``."""
    for start in range(0, residual.numel(), _BLOCK):
        new, old = residual[start : start + _BLOCK], gradient[start : start + _BLOCK]
        before = new.clone()
        new.add_(old)
        old.copy_(before)
    return None if key is None else find(residual, key, limit)


def find(x: Tensor, key: int, limit: int | None) -> tuple[Tensor, Tensor] | None:
    """Return all entries of magnitude key at least ``max(key, 1)``; None if more than ``limit``."""
    keys = magnitude_keys(x)
    if key > torch.iinfo(keys.dtype).max:  # above all keys, and no number of their dtype
        indices = torch.empty(0, dtype=torch.int64, device=x.device)
    else:
        indices = (keys >= max(key, 1)).nonzero().flatten()
    if limit is not None and indices.numel() > max(limit, 0):
        return None
    return indices, x[indices]


def restrict(indices: Tensor, among: Tensor) -> Tensor:
    """Return the positions within ``indices`` of those that occur in ``among``; both ascend."""
    if indices.numel() == 0 or among.numel() == 0:
        return indices.new_empty(0)
    at = torch.searchsorted(among, indices).clamp_(max=among.numel() - 1)
    return (among[at] == indices).nonzero().flatten()


def subtract_(dense: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """``dense[indices] -= values``, in place; indices are unique.  Returns ``dense``."""
    dense[indices] -= values
    return dense


def count_from(values: Tensor, keys: Tensor) -> Tensor:
    """Return, for each ascending magnitude key, how many values reach it; `[len(keys)]`, int64."""
    mine, keys = magnitude_keys(values).to(torch.int64), keys.to(torch.int64).contiguous()
    reached = torch.searchsorted(keys, mine, right=True)  # how many of the keys, by every value
    counts = keys.new_zeros(keys.numel() + 1)
    counts.index_add_(0, reached, torch.ones_like(reached))
    return counts.flip(0).cumsum(0).flip(0)[1:]


def magnitude_keys(x: Tensor) -> Tensor:
    """Return integers ordered as ``|x|``, same shape; 0 only for zero.

    Example:
        >>> keys = magnitude_keys(torch.tensor([0.0, -2.0, 1.0, float("nan"), float("inf")]))
        >>> keys.argsort().tolist()
        [0, 2, 1, 4, 3]
    """
    integer = _integer_of(x.dtype)
    return x.contiguous().view(integer) & torch.iinfo(integer).max


def key_range(dtype: torch.dtype) -> tuple[int, int]:
    """Return ``(largest, octave)``: no key is above ``largest``; doubling |x| adds ``octave``."""
    return torch.iinfo(_integer_of(dtype)).max, 1 << _MANTISSA_BITS[dtype]


def top(x: Tensor, k: int) -> Tensor:
    """See ``kernels.top``.  Cost: a ``torch.topk`` over all n elements."""
    k = min(k, x.numel())
    if k <= 0:
        return torch.empty(0, dtype=torch.int64, device=x.device)
    keys = magnitude_keys(x)
    kth = torch.topk(keys, k, sorted=False).values.min().clamp(min=1)  # zeros are never selected
    positions = (keys >= kth).nonzero().flatten()
    surplus = positions.numel() - k
    if surplus > 0:  # more elements tie at the k-th magnitude than fit: the highest positions go
        ties = (keys[positions] == kth).nonzero().flatten()
        keep = torch.ones(positions.numel(), dtype=torch.bool, device=x.device)
        keep[ties[ties.numel() - surplus :]] = False
        positions = positions[keep]
    return positions


def merge(
    streams: Sequence[tuple[Tensor, Tensor]], size: int, within: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Sum sorted ``(indices, values)`` streams as a left fold in the order given; drop zero sums.

    The fold is ``((s0 + s1) + s2) + ...`` per index, on every device: no atomics.
    """
    if within is not None:
        kept = [restrict(indices, within) for indices, _ in streams]
        streams = [(i[which], v[which]) for which, (i, v) in zip(kept, streams, strict=True)]
    union = torch.unique(torch.cat([indices for indices, _ in streams]))
    total = torch.zeros(union.numel(), dtype=streams[0][1].dtype, device=union.device)
    for indices, values in streams:
        at = torch.searchsorted(union, indices)
        total[at] = total[at] + values
    stored = total != 0
    if bool(stored.all()):
        return union, total
    return union[stored], total[stored]


def scatter_(dense: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """``dense = 0; dense[indices] = values``, in place.  Returns ``dense``."""
    dense.zero_()
    dense[indices] = values.to(dense.dtype)
    return dense


def _integer_of(dtype: torch.dtype) -> torch.dtype:
    """Return the integers of the same bits."""
    if dtype not in _INTEGER_OF:
        raise ConfigurationError(
            f"magnitudes of {dtype} are not defined; use one of "
            f"{', '.join(str(d).removeprefix('torch.') for d in _INTEGER_OF)}"
        )
    return _INTEGER_OF[dtype]


def deal(indices: Tensor, world_size: int) -> tuple[Tensor, Tensor, list[int]]:
    """Return order, local indices and counts: see ``kernels.deal``."""
    group = indices // world_size
    owner = (indices + _turn(group, world_size)) % world_size
    order = torch.argsort(owner, stable=True)
    return order, group[order], torch.bincount(owner, minlength=world_size).tolist()


def undeal(local: Tensor, owner: int, world_size: int) -> Tensor:
    """See ``kernels.undeal``."""
    return local * world_size + (owner - _turn(local, world_size)) % world_size


def _turn(group: Tensor, world_size: int) -> Tensor:
    """Hash a group's number to ``[0, world_size)``: MurmurHash3's 32-bit finaliser."""
    x = (group ^ (group >> 32)) & _LOW_32
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _LOW_32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _LOW_32
    return ((x ^ (x >> 16)) * world_size) >> 32
