"""Distributed order statistics: cut positions of a sorted multiset that is spread over ranks.

One histogram allreduce narrows every wanted cut to one bin; bins that still hold too much are
divided again.  Used for region boundaries (keys are indices) and for the global threshold (keys are
magnitudes).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparsync.transports.communicator import Communicator

__all__ = ["REFINING_BINS", "Bracket", "bins_for", "quantiles"]

REFINING_BINS = 64  # per bracket that is divided again: three rounds tell 2^18 magnitudes apart


class Bracket(NamedTuple):
    """Keys below ``low`` number ``below``; keys in ``[low, high)`` number ``inside``."""

    low: int
    high: int
    below: int
    inside: int


def bins_for(k: int) -> int:
    """Return the histogram's size: k / 16, within [32, 1024], so that it costs little."""
    return min(max(k // 16, 32), 1024)


async def quantiles(
    comm: Communicator,
    keys: Tensor,
    ranks_of: Callable[[int], Sequence[int]],
    *,
    stop: int,
    bins: int,
    tolerance: Callable[[int], int],
    start_at: tuple[int, int] | None = None,
    count_limit: int,
    phase: str,
) -> tuple[int, list[Bracket]]:
    """Bracket the keys at given positions of the sorted union of all ranks' keys.

    Args:
        comm: the group.
        keys: `[m]` with ``torch.int64``, ascending, in ``[0, stop)``; this rank's share.
        ranks_of: given the total number of keys, the wanted 0-based positions, ascending.
        stop: all keys are smaller.
        bins: words of the first histogram; later ones take 64 per bracket that is divided again.
        tolerance: given the total, how many keys a bracket may hold before it is divided again.
        start_at: where to look first, ``(low, high)``; default everywhere.
        count_limit: an upper bound of the total, the same on all ranks: decides 4 or 8 bytes a bin.
        phase: the ledger's name for this.

    Returns:
        The total number of keys and one bracket per wanted position: ``below <= position`` and
        ``position < below + inside``, or an empty bracket at the end for a position past the last.

    Cost: one allreduce of ``bins`` words per round; rounds until every bracket holds at most
    ``tolerance`` keys or is one key wide; usually 1 or 2.
    """
    dtype = torch.int32 if count_limit < 1 << 31 else torch.int64
    low, high = start_at or (0, stop)
    edges = _edges([(low, high)], bins, stop)
    brackets: list[Bracket] = []
    wanted: list[int] = []
    total = 0
    while True:
        at = torch.searchsorted(keys, torch.tensor(edges, dtype=torch.int64, device=keys.device))
        counts = await comm.allreduce(at.diff().to(dtype), phase)
        ends = [0, *counts.to(torch.int64).cumsum(0).tolist()]
        if not brackets:  # the first histogram covers everything: it tells the total
            total = ends[-1]
            wanted = list(ranks_of(total))
            brackets = [_find(position, 0, edges, ends) for position in wanted]
        else:
            brackets = _narrow(brackets, wanted, edges, ends)
        enough = tolerance(total)
        open_ones = sorted(
            {(b.low, b.high) for b in brackets if b.inside > enough and b.high - b.low > 1}
        )
        if not open_ones:
            return total, brackets
        edges = _edges(open_ones, min(bins, REFINING_BINS * len(open_ones)), None)


def _edges(spans: Sequence[tuple[int, int]], bins: int, stop: int | None) -> list[int]:
    """Divide ``bins`` among the spans; with ``stop``, add the outer ends 0 and ``stop``."""
    per_span = max(2, bins // len(spans))
    edges = set() if stop is None else {0, stop}
    for low, high in spans:
        pieces = max(min(per_span, high - low), 1)
        edges.update(low + (high - low) * i // pieces for i in range(pieces + 1))
    return sorted(edges)


def _find(position: int, below: int, edges: Sequence[int], ends: Sequence[int]) -> Bracket:
    """Return the bin that holds ``position``; ``below`` keys lie under the first edge."""
    i = bisect_right(ends, position - below) - 1
    if i >= len(edges) - 1:
        return Bracket(edges[-1], edges[-1], below + ends[-1], 0)
    return Bracket(edges[i], edges[i + 1], below + ends[i], ends[i + 1] - ends[i])


def _narrow(
    brackets: Sequence[Bracket], wanted: Sequence[int], edges: Sequence[int], ends: Sequence[int]
) -> list[Bracket]:
    """Replace each bracket that the finer edges divide by the bin that holds its position."""
    place = {edge: i for i, edge in enumerate(edges)}
    result = []
    for position, bracket in zip(wanted, brackets, strict=True):
        first, last = place.get(bracket.low), place.get(bracket.high)
        if first is None or last is None or last - first < 2:
            result.append(bracket)
            continue
        base = bracket.below - ends[first]
        result.append(_find(position, base, edges[first : last + 1], ends[first : last + 1]))
    return result
