"""Exact global selection by one round: everyone tells everyone a histogram of its magnitudes.

Each rank then knows how many entries every rank keeps, so what follows needs no sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.transports.base import Communicator
from sparsync.transports.framing import Raw

__all__ = ["Choice", "choose"]

_PHASE = "threshold"
_ROUNDS = 3  # at most; the first step has no last threshold to look around
_COARSEST = 8  # the marginal bin may hold an 8th of what is wanted before it is divided again
_NARROWEST = 1 / 256  # octaves; half a step of bf16: narrower bins hold nothing but ties
_FINEST_OCTAVES, _WIDEST_OCTAVES = 1 / 512, 2.0  # distance of edges from where it is expected
_FIRST_OCTAVES = 32  # without a last threshold: magnitudes of 1 to 2^-32 are told apart first
_NARROW_LIMIT = 1 << 16  # counts below it travel in two bytes


class Choice(NamedTuple):
    """The outcome.

    Attributes:
        counts: how many entries each rank keeps: its largest.
        threshold_key: about the magnitude of the smallest kept entry; None if nothing is kept.
    """

    counts: list[int]
    threshold_key: int | None


class _Margin(NamedTuple):
    """Where the wanted number of entries is reached: between two edges of the histogram."""

    low: int
    high: int
    above: list[int]  # entries of each rank from ``high`` on
    inside: list[int]  # entries of each rank in ``[low, high)``


async def choose(
    comm: Communicator,
    values: Tensor,
    wanted: int,
    *,
    expected_key: int | None,
    message_bytes: int,
    most_held: int,
    most_kept: int,
) -> Choice:
    """Choose the ``wanted`` largest of all ranks' values, or all if they are fewer.

    The bins lie around the expected threshold, the finer the nearer.  All entries above the marginal bin
    are kept; its own places go to the ranks in rank order, on each rank to the largest.  Where the
    threshold jumped and the marginal bin holds more than an 8th of ``wanted``, it is divided in
    another round.

    Args:
        comm: the group.
        values: `[m]` this rank's.
        wanted: how many entries are to be kept on all ranks together.
        expected_key: where to look first; None: everywhere.
        message_bytes: what one rank may send to one other in all rounds.
        most_held: no rank holds more values than this.
        most_kept: no rank may keep more.

    Cost: P - 1 messages of half ``message_bytes`` in one round; at most two rounds of a quarter more.
    """
    width = 2 if most_held < _NARROW_LIMIT else 4
    stop, octave = kernels.key_range(values.dtype)
    edges = _edges_around(expected_key, octave, stop, message_bytes // 2 // width)
    table = await _tell(comm, values, edges, width)
    present = sum(counts[0] for counts in table)  # the first edge is 1: all that are not zero
    margin = _margin(edges, table, wanted, stop)
    for _ in range(_ROUNDS - 1):
        fine = margin.high - margin.low <= max(_NARROWEST * octave, 1)
        if fine or sum(margin.inside) * _COARSEST <= wanted or present <= wanted:
            break
        edges = _edges_between(margin, message_bytes // 4 // width)
        table = await _tell(comm, values, edges, width)
        margin = _margin(edges, table, wanted, margin.high)
    # what overfull ranks must leave, others may keep
    above = [min(count, most_kept) for count in margin.above]
    wishes = [min(i, most_kept - a) for i, a in zip(margin.inside, above, strict=True)]
    places = min(wanted, present) - sum(above)
    counts = [a + g for a, g in zip(above, _in_rank_order(places, wishes), strict=True)]
    return Choice(counts, _threshold(margin, wanted) if sum(counts) else None)


async def _tell(
    comm: Communicator, values: Tensor, edges: Sequence[int], width: int
) -> list[list[int]]:
    """Return every rank's counts from every edge on."""
    counts = kernels.count_from(values, torch.tensor(edges, device=values.device)).tolist()
    payload = b"".join(count.to_bytes(width, "little") for count in counts)
    mine = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    capacities = [len(payload)] * comm.world_size
    messages = await comm.alltoallv([mine] * comm.world_size, capacities, _PHASE, Raw("control"))
    everyone = [bytes(message.cpu().numpy()) for message in messages]
    return [
        [int.from_bytes(raw[at : at + width], "little") for at in range(0, len(raw), width)]
        for raw in everyone
    ]


def _edges_around(center: int | None, octave: int, stop: int, bins: int) -> list[int]:
    """Place edges at growing distances from the center; the first is 1: not zero."""
    bins = max(bins, 8)
    if center is None:
        top = int(octave * 0.5 * (stop // octave))  # the key of about 1
        low = max(top - _FIRST_OCTAVES * octave, 1)
        inner = [low + (top - low) * i // (bins - 2) for i in range(bins - 1)]
    else:
        half = (bins - 2) // 2
        growth = (_WIDEST_OCTAVES / _FINEST_OCTAVES) ** (1 / max(half - 1, 1))
        steps = [round(_FINEST_OCTAVES * octave * growth**i) for i in range(half)]
        inner = [center, *(center - d for d in steps), *(center + d for d in steps)]
    return sorted({1, *(min(max(edge, 1), stop) for edge in inner)})


def _edges_between(margin: _Margin, bins: int) -> list[int]:
    """Divide the marginal bin evenly; its own ends are the first and the last edge."""
    span, pieces = margin.high - margin.low, max(bins - 1, 4)
    pieces = min(pieces, span)
    return [margin.low + span * i // pieces for i in range(pieces + 1)]


def _margin(edges: Sequence[int], table: list[list[int]], wanted: int, stop: int) -> _Margin:
    """Find the bin in which the ``wanted``-th largest lies; the lowest if there are fewer."""
    totals = [sum(column) for column in zip(*table, strict=True)]
    at = max((i for i, total in enumerate(totals) if total >= wanted), default=0)
    last = at + 1 == len(edges)
    above = [0 if last else counts[at + 1] for counts in table]
    inside = [counts[at] - a for counts, a in zip(table, above, strict=True)]
    return _Margin(edges[at], stop if last else edges[at + 1], above, inside)


def _threshold(margin: _Margin, wanted: int) -> int:
    """Interpolate where in the marginal bin the ``wanted``-th largest lies."""
    inside = max(sum(margin.inside), 1)
    missing = min(max(wanted - sum(margin.above), 0), inside)
    return max(margin.high - (margin.high - margin.low) * missing // inside, 1)


def _in_rank_order(places: int, wishes: Sequence[int]) -> list[int]:
    """Grant places to rank 0 first, then 1, ... until none is left.

    Example:
        >>> _in_rank_order(4, [3, 2, 5])
        [3, 1, 0]
    """
    granted = []
    for wish in wishes:
        granted.append(min(wish, places))
        places -= granted[-1]
    return granted
