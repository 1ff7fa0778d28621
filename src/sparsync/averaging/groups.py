"""Assign ranks to groups step by step: WAGMA's dynamic groups, for any P and S.

Ranks stand in a row that is cut into groups of neighbours.  Before every step the row is shuffled, by
one and the same permutation: rank r stands at ``r * stride**-step mod modulus``.  With P and S powers
of two, stride S and modulus P - 1 rotate the bits of r, and that *is* Algorithm 1: step t merges along
the ``log2 S`` bits from ``(t * log2 S) mod log2 P`` on.  Multiplication is defined for any P.

Groups that never change (the ablation of section 5.2) are those of ``step=0``.
"""

from __future__ import annotations

from math import gcd, sqrt
from typing import NamedTuple

from sparsync.errors import ConfigurationError

__all__ = ["default_group_size", "group_of", "partition"]


def partition(world_size: int, group_size: int, step: int) -> list[tuple[int, ...]]:
    """Return the groups of a step: every rank is in one, members ascend.

    If S divides P, all groups have S members.  Else their sizes differ by one, as close to S as an
    equal share allows; nobody stays alone (unless S = 1).  With more than one group of more than
    one, the groups of no two consecutive steps are the same.

    Args:
        world_size: P >= 1.
        group_size: S, from 1 (nobody averages) to P (everybody with everybody).
        step: 0-based local step; equal on all ranks.

    Raises:
        ConfigurationError: a number out of its range.

    Example:
        >>> partition(8, 4, step=0), partition(8, 4, step=1)
        ([(0, 1, 2, 3), (4, 5, 6, 7)], [(0, 1, 4, 5), (2, 3, 6, 7)])
        >>> partition(5, 2, step=0), partition(5, 2, step=1)
        ([(0, 1, 2), (3, 4)], [(0, 2, 4), (1, 3)])

    References: Li et al., WAGMA-SGD, IEEE TPDS 2021, Algorithm 1, with ``mask = 1 << shift`` (as
    printed, a mask that is already shifted is shifted again; the paper's examples come out so).
    """
    row = _row(world_size, group_size, step)
    return [row.group(index) for index in range(row.groups)]


def group_of(rank: int, world_size: int, group_size: int, step: int) -> tuple[int, ...]:
    """Return the members of a rank's group, ascending, itself among them; as in ``partition``.

    Cost: that of sorting the group, whatever P is.

    Example:
        >>> group_of(5, 8, 4, step=1)
        (0, 1, 4, 5)
    """
    row = _row(world_size, group_size, step)
    if not 0 <= rank < world_size:
        raise ConfigurationError(
            f"rank is {rank}; with {world_size} ranks give 0 to {world_size - 1}"
        )
    return row.group(row.place(rank) * row.groups // world_size)


def default_group_size(world_size: int) -> int:
    """Return the divisor of P, other than 1, nearest to the square root of P (section 5.2).

    A power of two where P is one.  A prime P > 3 has no such divisor but itself, which would be a
    global average: there it is the whole number nearest to the root, as any S will do.

    Example:
        >>> [default_group_size(world_size) for world_size in (1, 2, 8, 12, 64, 13)]
        [1, 2, 2, 3, 8, 4]
    """
    _check(world_size, group_size=1, step=0)
    root = sqrt(world_size)
    divisors = [size for size in range(2, world_size + 1) if world_size % size == 0]
    if divisors == [world_size] and world_size > 3:
        return round(root)
    return min(divisors, key=lambda size: abs(size - root), default=1)


class _Row(NamedTuple):
    """Where the ranks stand on a step; group i has the places from ceil(i P / groups) on."""

    world_size: int
    groups: int
    modulus: int  # P: all move; P - 1: the last rank keeps its place
    to_place: int  # stride**-step
    to_rank: int  # stride**step

    def place(self, rank: int) -> int:
        return self._shuffled(rank, self.to_place)

    def group(self, index: int) -> tuple[int, ...]:
        start, stop = (-(-self.world_size * i // self.groups) for i in (index, index + 1))
        return tuple(sorted(self._shuffled(place, self.to_rank) for place in range(start, stop)))

    def _shuffled(self, number: int, factor: int) -> int:
        return number * factor % self.modulus if number < self.modulus else number


def _row(world_size: int, group_size: int, step: int) -> _Row:
    _check(world_size, group_size, step)
    # P / S rounded to the nearest, down if halfway: so nobody is ever alone with S = 2 and P odd
    groups = (2 * world_size + group_size - 1) // (2 * group_size)
    # The members of a group should spread over as many groups as possible, leaving none out between
    # them: a stride of the smallest group's size, or the next below that has an inverse.  Where S
    # divides P that is S, modulo P - 1; a stride of 2 always is one or the other.
    stride, modulus = next(
        (stride, modulus)
        for stride in range(world_size // groups, 0, -1)
        for modulus in (world_size, world_size - 1)
        if gcd(stride, modulus) == 1
    )
    return _Row(
        world_size, groups, modulus, pow(stride, -step, modulus), pow(stride, step, modulus)
    )


def _check(world_size: int, group_size: int, step: int) -> None:
    if world_size < 1:
        raise ConfigurationError(
            f"world_size is {world_size}; give the number of ranks, at least 1"
        )
    if not 1 <= group_size <= world_size:
        raise ConfigurationError(
            f"group_size is {group_size}; give 1 to {world_size}, the number of ranks"
        )
    if step < 0:
        raise ConfigurationError(f"step is {step}; steps count from 0")
