"""The inputs that every algorithm must handle, and functions that compare results."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsync.sparse import Vector
from sparsync.transports.communicator import bytes_of

__all__ = [
    "STEPS",
    "WORLD_SIZES",
    "Case",
    "cancelling",
    "cases",
    "digest",
    "dominating",
    "integers",
    "masked",
    "noise",
    "own_region",
    "same",
    "within",
]

# one rank, powers of two, and numbers for which logarithmic collectives have irregular rounds
WORLD_SIZES = (1, 2, 3, 4, 7)
STEPS = 3  # steps per case: the first begins a period, the others reuse its thresholds


@dataclass(frozen=True)
class Case:
    """One kind of input; ``make(rank, world_size, step)`` is a rank's accumulated gradient at a step.

    ``exact`` means that float sums of such inputs are exact in any order.
    """

    name: str
    size: int
    k: int
    make: Callable[[int, int, int], Tensor]
    exact: bool = False
    dtype: torch.dtype = torch.float32


_SIZE = 499  # a prime number, which no world size divides


def noise(rank: int, world_size: int, step: int, size: int = _SIZE) -> Tensor:
    """Return normally distributed entries, independent for every rank and step."""
    # seed the generator, so that the digests of ``exercise_*`` are equal on every transport and machine
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(size, generator=generator, device="cpu")


def integers(rank: int, world_size: int, step: int) -> Tensor:
    """Return small whole numbers, whose sums are exact in any order."""
    return (3 * noise(rank, world_size, step)).round()


def masked(rank: int, world_size: int, step: int, low: int, high: int) -> Tensor:
    """Return noise in ``[low, high)`` and zeros elsewhere."""
    result = torch.zeros(_SIZE, device="cpu")
    result[low:high] = noise(rank, world_size, step, high - low)
    return result


def own_region(rank: int, world_size: int, step: int, shift: int = 0) -> Tensor:
    """Return noise in the even region of rank ``rank + shift``, so that supports are disjoint."""
    owner = (rank + shift) % world_size
    low, high = owner * _SIZE // world_size, (owner + 1) * _SIZE // world_size
    return masked(rank, world_size, step, low, high)


def dominating(rank: int, world_size: int, step: int) -> Tensor:
    """Return disjoint supports in which rank 0's values are the largest."""
    return own_region(rank, world_size, step, shift=1) * (100.0 if rank == 0 else 1.0)


def cancelling(rank: int, world_size: int, step: int) -> Tensor:
    """Return entries whose sum over ranks is zero."""
    # ranks cancel in pairs; if their number is odd, the last one contributes zeros
    sign = 0.0 if rank == world_size - 1 and world_size % 2 else (-1.0) ** rank
    return sign * noise(0, world_size, step)


def cases() -> list[Case]:
    """Return the inputs that every algorithm must handle: typical, adversarial and degenerate."""
    return [
        Case("noise", _SIZE, 40, noise),
        Case("integers", _SIZE, 40, integers, exact=True),
        Case("k = 1", _SIZE, 1, noise),
        Case("one region", _SIZE, 40, lambda r, p, s: masked(r, p, s, 0, 60)),
        Case("last elements", _SIZE, 40, lambda r, p, s: masked(r, p, s, 490, 499)),
        Case("matching regions", _SIZE, 40, own_region),
        Case("shifted regions", _SIZE, 40, lambda r, p, s: own_region(r, p, s, shift=1)),
        Case("one rank dominates", _SIZE, 40, dominating),
        Case("same everywhere", _SIZE, 40, lambda r, p, s: noise(0, p, s)),
        Case("cancelling", _SIZE, 40, cancelling),
        Case("one rank only", _SIZE, 40, lambda r, p, s: noise(r, p, s) * (r == p - 1)),
        Case("growing", _SIZE, 40, lambda r, p, s: noise(r, p, s) * 10.0**s),
        Case("shrinking", _SIZE, 40, lambda r, p, s: noise(r, p, s) * 10.0**-s),
        # degenerate
        Case("all zero", _SIZE, 40, lambda r, p, s: torch.zeros(_SIZE, device="cpu"), exact=True),
        Case("zero at first", _SIZE, 40, lambda r, p, s: integers(r, p, s) * (s > 0), exact=True),
        Case("empty", 0, 5, lambda r, p, s: torch.zeros(0, device="cpu"), exact=True),
        Case("k = 0", _SIZE, 0, integers, exact=True),
        Case("k = n", _SIZE, _SIZE, noise),
        Case("k > n", _SIZE, 2 * _SIZE, noise),
        Case("fewer elements than ranks", 3, 2, lambda r, p, s: noise(r, p, s, 3)),
        Case("one-hot", _SIZE, 40, lambda r, p, s: torch.eye(_SIZE, device="cpu")[r], exact=True),
        Case("constant", _SIZE, 40, lambda r, p, s: masked(r, p, s, 0, 0) + 2, exact=True),
        Case("denormal", _SIZE, 40, lambda r, p, s: noise(r, p, s) * 1e-42),
    ]


def within(difference: Tensor, scale: Tensor, world_size: int) -> bool:
    """Return whether ``|difference| <= (P + 2) 2^-24 scale + P 2^-149`` for every element."""
    # 2^-24 is the unit roundoff of float32, 2^-149 its smallest denormal
    smallest = 2.0**-149 * world_size
    tolerance = (world_size + 2) * 2.0**-24 * scale.double() + smallest
    return bool((difference.double().abs() <= tolerance).all())


def same(a: Vector, b: Vector) -> bool:
    """Return whether two vectors have equal elements."""
    return torch.equal(a.to_dense(), b.to_dense())


def digest(vector: Vector) -> str:
    """Return 16 hex digits that change with any bit of any element."""
    raw = bytes_of(vector.to_dense()).numpy().tobytes()
    return hashlib.sha256(raw).hexdigest()[:16]
