"""How many entries a sum has: the fill-in of sparse sums (pure arithmetic).

References: Renggli et al., SparCML, SC 2019, section 5.3 and appendix B.
"""

from __future__ import annotations

import math

__all__ = ["expected_union", "most_in_union"]


def expected_union(k: float, size: int, ranks: int) -> float:
    """Return the expected number of entries of a sum of uniformly random supports, E[K].

    ``N sum_i (-1)^(i-1) C(P, i) (k / N)^i``, which is ``N (1 - (1 - k / N)^P)``.

    Args:
        k: entries per rank.
        size: number of elements N.
        ranks: number of summands P.

    Example:
        >>> round(expected_union(10, 512, 2), 2), expected_union(512, 512, 3)
        (19.8, 512.0)

    References: SparCML, appendix B.1.
    """
    if size == 0 or k <= 0:
        return 0.0
    if k >= size:
        return float(size)
    return -size * math.expm1(ranks * math.log1p(-k / size))


def most_in_union(k: int, size: int, ranks: int) -> int:
    """Return the most entries that a sum can have: ``min(N, P k)`` (disjoint supports)."""
    return min(size, ranks * k)
