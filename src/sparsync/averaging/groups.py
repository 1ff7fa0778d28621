"""Assign ranks to groups step by step: WAGMA's dynamic groups, for any P and S.

Ranks stand in a row that is cut into groups of neighbours.  Before every step the row is shuffled, by
one and the same permutation: rank r stands at ``r * stride**-step mod modulus``.  With P and S powers
of two, stride S and modulus P - 1 rotate the bits of r, and that *is* Algorithm 1: step t merges along
the ``log2 S`` bits from ``(t * log2 S) mod log2 P`` on.  Multiplication is defined for any P.

Groups that never change (the ablation of section 5.2) are those of ``step=0``.
"""

from __future__ import annotations

from math import gcd, sqrt

from sparsync.errors import require

__all__ = ["default_group_size", "group_of"]


def group_of(rank: int, world_size: int, group_size: int, step: int) -> tuple[int, ...]:
    """Return the members of a rank's group, ascending, itself among them.

    If S divides P, all groups have S members.  Else their sizes differ by one, as close to S as an
    equal share allows; nobody stays alone (unless S = 1).  With more than one group of more than
    one, the groups of no two consecutive steps are the same.

    Args:
        rank: 0 to P - 1.
        world_size: P >= 1.
        group_size: S, from 1 (nobody averages) to P (everybody with everybody).
        step: 0-based local step; equal on all ranks.

    Raises:
        ConfigurationError: a number out of its range.

    Cost: that of sorting the group, whatever P is.

    Example:
        >>> group_of(5, 8, 4, step=0), group_of(5, 8, 4, step=1)
        ((4, 5, 6, 7), (0, 1, 4, 5))
        >>> group_of(0, 5, 2, step=0), group_of(0, 5, 2, step=1)
        ((0, 1, 2), (0, 2, 4))

    References: Li et al., WAGMA-SGD, IEEE TPDS 2021, Algorithm 1, with ``mask = 1 << shift`` (as
    printed, a mask that is already shifted is shifted again; the paper's examples come out so).
    """
    _check(world_size, group_size, step)
    require(
        0 <= rank < world_size,
        f"rank is {rank}; with {world_size} ranks give 0 to {world_size - 1}",
    )
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

    def shuffled(number: int, exponent: int) -> int:
        moves = number < modulus  # modulo P - 1 the last rank keeps its place
        return number * pow(stride, exponent, modulus) % modulus if moves else number

    index = shuffled(rank, -step) * groups // world_size
    # group i has the places from ceil(i P / groups) on
    start, stop = (-(-world_size * i // groups) for i in (index, index + 1))
    return tuple(sorted(shuffled(place, step) for place in range(start, stop)))


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


def _check(world_size: int, group_size: int, step: int) -> None:
    require(world_size >= 1, f"world_size is {world_size}; give the number of ranks, at least 1")
    require(
        1 <= group_size <= world_size,
        f"group_size is {group_size}; give 1 to {world_size}, the number of ranks",
    )
    require(step >= 0, f"step is {step}; steps count from 0")
