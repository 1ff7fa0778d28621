"""The inputs that every algorithm must handle, and how results are compared."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsync.sparse import Vector

__all__ = ["STEPS", "WORLD_SIZES", "Case", "cases", "digest", "same", "within"]

WORLD_SIZES = (1, 2, 3, 4, 7)
STEPS = 3  # per case: an opening one, one that reuses, one more


@dataclass(frozen=True)
class Case:
    """One kind of input.

    Attributes:
        name: for messages.
        size: number of elements n.
        k: entries asked for.
        make: the accumulated gradient of a rank at a step, given ``(rank, world_size, step)``.
        exact: float sums of it are exact in any order.
    """

    name: str
    size: int
    k: int
    make: Callable[[int, int, int], Tensor]
    exact: bool = False


def cases() -> list[Case]:
    """Return the inputs that every algorithm must handle: typical, adversarial and degenerate."""

    def noise(rank: int, world_size: int, step: int, size: int = 499) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        return torch.randn(size, generator=generator)

    def integers(rank: int, world_size: int, step: int) -> Tensor:
        return (3 * noise(rank, world_size, step)).round()

    def masked(rank: int, world_size: int, step: int, low: int, high: int) -> Tensor:
        result = torch.zeros(499)
        result[low:high] = noise(rank, world_size, step, high - low)
        return result

    def own_region(rank: int, world_size: int, step: int, shift: int = 0) -> Tensor:
        owner = (rank + shift) % world_size
        low, high = owner * 499 // world_size, (owner + 1) * 499 // world_size
        return masked(rank, world_size, step, low, high)

    def dominating(rank: int, world_size: int, step: int) -> Tensor:
        return own_region(rank, world_size, step, shift=1) * (100.0 if rank == 0 else 1.0)

    def cancelling(rank: int, world_size: int, step: int) -> Tensor:
        sign = 0.0 if rank == world_size - 1 and world_size % 2 else (-1.0) ** rank
        return sign * noise(0, world_size, step)

    return [
        Case("noise", 499, 40, noise),
        Case("integers", 499, 40, integers, exact=True),
        Case("all zero", 499, 40, lambda r, p, s: torch.zeros(499), exact=True),
        Case("zero at first", 499, 40, lambda r, p, s: integers(r, p, s) * (s > 0), exact=True),
        Case("empty", 0, 5, lambda r, p, s: torch.zeros(0), exact=True),
        Case("k = 0", 499, 0, integers, exact=True),
        Case("k = 1", 499, 1, noise),
        Case("k = n", 499, 499, noise),
        Case("k > n", 499, 1000, noise),
        Case("fewer elements than ranks", 3, 2, lambda r, p, s: noise(r, p, s, 3)),
        Case("one region", 499, 40, lambda r, p, s: masked(r, p, s, 0, 60)),
        Case("last elements", 499, 40, lambda r, p, s: masked(r, p, s, 490, 499)),
        Case("matching regions", 499, 40, own_region),
        Case("shifted regions", 499, 40, lambda r, p, s: own_region(r, p, s, shift=1)),
        Case("one rank dominates", 499, 40, dominating),
        Case("same everywhere", 499, 40, lambda r, p, s: noise(0, p, s)),
        Case("cancelling", 499, 40, cancelling),
        Case("one rank only", 499, 40, lambda r, p, s: noise(r, p, s) * (r == p - 1)),
        Case("one-hot", 499, 40, lambda r, p, s: torch.eye(499)[r], exact=True),
        Case("constant", 499, 40, lambda r, p, s: torch.full((499,), 2.0), exact=True),
        Case("growing", 499, 40, lambda r, p, s: noise(r, p, s) * 10.0**s),
        Case("shrinking", 499, 40, lambda r, p, s: noise(r, p, s) * 10.0**-s),
        Case("denormal", 499, 40, lambda r, p, s: noise(r, p, s) * 1e-42),
    ]


def within(difference: Tensor, scale: Tensor, world_size: int) -> bool:
    """Tell whether |difference| <= (P + 2) 2^-24 scale (and a denormal's unit), element-wise."""
    smallest = 2.0**-149 * world_size
    tolerance = (world_size + 2) * 2.0**-24 * scale.double() + smallest
    return bool((difference.double().abs() <= tolerance).all())


def same(a: Vector, b: Vector) -> bool:
    """Tell whether two vectors have equal elements."""
    return torch.equal(a.to_dense(), b.to_dense())


def digest(vector: Vector) -> str:
    """Return 16 hex digits that differ when any bit of any element does."""
    raw = vector.to_dense().contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(raw).hexdigest()[:16]
