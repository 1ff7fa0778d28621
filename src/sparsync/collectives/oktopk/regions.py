"""Pure integer planning: boundaries, schedules, the balance plan.  No tensor, no network."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from sparsync.transports.communicator import rounds

__all__ = [
    "Move",
    "balance_plan",
    "balanced_counts",
    "dissemination_sends",
    "equal_count_cuts",
    "even_boundaries",
    "holders",
    "is_crowded",
    "schedule",
    "spans",
]


class Move(NamedTuple):
    """``entries`` consecutive ones that ``source`` hands to ``dest``, from its ``start``-th on."""

    source: int
    dest: int
    start: int
    entries: int


def even_boundaries(size: int, parts: int) -> list[int]:
    """Cut ``[0, size)`` into ``parts`` regions whose widths differ by at most one.

    Example:
        >>> even_boundaries(10, 4)
        [0, 2, 5, 7, 10]
    """
    return [size * i // parts for i in range(parts + 1)]


def equal_count_cuts(indices: Sequence[int], size: int, parts: int) -> list[int]:
    """Return the ``parts - 1`` cuts with equally many of the ascending ``indices`` between them.

    Example:
        >>> equal_count_cuts([1, 2, 3, 90], size=100, parts=2)
        [3]
        >>> equal_count_cuts([], size=100, parts=4)
        [25, 50, 75]
    """
    if not len(indices):
        return even_boundaries(size, parts)[1:-1]
    return [int(indices[len(indices) * i // parts]) for i in range(1, parts)]


def schedule(rank: int, world_size: int, *, rotate: bool) -> Iterator[tuple[int, int]]:
    """Yield ``(dest, source)`` for each of P - 1 turns, a pairing where every message has its turn.

    With ``rotate`` rank r sends to r + 1, r + 2, ...: in every turn each rank receives from one
    (Ok-Topk, Figure 2b).  Without, all ranks send to 0, then 1, ...: turn i floods rank i (2a).

    Example:
        >>> list(schedule(1, 4, rotate=True))
        [(2, 0), (3, 3), (0, 2)]
        >>> list(schedule(1, 4, rotate=False))
        [(0, 0), (2, 2), (3, 3)]
    """
    if rotate:
        for shift in range(1, world_size):
            yield (rank + shift) % world_size, (rank - shift) % world_size
    else:
        for peer in range(world_size):
            if peer != rank:
                yield peer, peer


def holders(counts: Sequence[int], trigger: float) -> list[int]:
    """Return the ranks that share the entries when balancing: all that are not overfull.

    A rank is overfull when it holds more than ``trigger`` times the mean.

    Example:
        >>> holders([9, 0, 1, 0, 0], trigger=4.0)
        [1, 2, 3, 4]
    """
    total, world_size = sum(counts), len(counts)
    return [r for r, count in enumerate(counts) if count * world_size <= trigger * total]


def is_crowded(loads: Sequence[int], trigger: float) -> bool:
    """Tell whether a region was so full that its boundaries should be agreed on again.

    More than ``trigger`` times the mean, and more than cuts cannot help: an index that all ranks
    selected is a load of P by itself.

    Example:
        >>> is_crowded([40, 0, 0, 0], trigger=1.5), is_crowded([4, 0, 0, 0], trigger=1.5)
        (True, False)
    """
    world_size = len(loads)
    return bool(loads) and max(loads) > trigger * sum(loads) / world_size + 2 * world_size


def balanced_counts(counts: Sequence[int], trigger: float) -> list[int]:
    """Return how many entries each rank should hold: equally many, but none on overfull ranks.

    An overfull rank hands over everything: it knows its own entries, so giving it a share back would
    only cost volume.

    Example:
        >>> balanced_counts([9, 0, 1, 0, 0], trigger=4.0)
        [0, 2, 3, 2, 3]
    """
    ranks = holders(counts, trigger)
    ends = even_boundaries(sum(counts), len(ranks))
    targets = [0] * len(counts)
    for i, rank in enumerate(ranks):
        targets[rank] = ends[i + 1] - ends[i]
    return targets


def balance_plan(counts: Sequence[int], targets: Sequence[int]) -> list[Move]:
    """Plan who hands which entries to whom so that rank j ends with ``targets[j]``, order kept.

    The entries of all ranks, one after the other, are cut into pieces of the target lengths; piece
    j goes to rank j.  A move from a rank to itself stays where it is.

    Cost: at most 2 P - 1 moves; a rank sends at most its own entries.

    Example:
        >>> [tuple(move) for move in balance_plan([4, 0, 0, 0], [1, 1, 1, 1])]
        [(0, 0, 0, 1), (0, 1, 1, 1), (0, 2, 2, 1), (0, 3, 3, 1)]
    """
    ends = _ends(targets)
    moves, start, dest = [], 0, 0
    for source, count in enumerate(counts):
        low, stop = start, start + count
        while low < stop:
            while ends[dest + 1] <= low:
                dest += 1
            high = min(stop, ends[dest + 1])
            moves.append(Move(source, dest, low - start, high - low))
            low = high
        start = stop
    return moves


def dissemination_sends(lengths: Sequence[int]) -> int:
    """Return the most bytes that any rank sends when messages of these lengths are disseminated.

    Example:
        >>> dissemination_sends([1, 1, 1, 1]), dissemination_sends([4, 0, 0, 0])
        (3, 8)
    """
    world_size = len(lengths)
    ends = _ends([*lengths, *lengths])
    return max(
        sum(ends[rank + count] - ends[rank] for _, count in rounds(world_size))
        for rank in range(world_size)
    )


def spans(
    counts: Sequence[int], targets: Sequence[int], boundaries: Sequence[int]
) -> list[tuple[int, int]]:
    """Return, per balanced piece, the narrowest ``[start, stop)`` of whole regions that holds it.

    Everyone can compute them from the counts, so indices travel relative to them.

    Example:
        >>> spans([4, 0, 4], [2, 4, 2], [0, 10, 20, 30])
        [(0, 10), (0, 30), (20, 30)]
    """
    held, result = _ends(counts), []
    for low, high in pairwise(_ends(targets)):
        if low == high:
            result.append((0, 0))
        else:
            first, last = bisect_right(held, low) - 1, bisect_left(held, high)
            result.append((boundaries[first], boundaries[last]))
    return result


def _ends(counts: Sequence[int]) -> list[int]:
    return [0, *accumulate(counts)]
