"""Global selection: which of the reduced entries are among the k largest of all regions.

Three answers to Ok-Topk's Algorithm 1, lines 9-12.  Each returns what this rank keeps of its region
and how many entries every rank keeps (known to all, so that the allgatherv needs no sizes).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sparsync import kernels
from sparsync.collectives.base import most_entries
from sparsync.collectives.oktopk.quantiles import REFINING_BINS, bins_for, quantiles
from sparsync.collectives.oktopk.split_reduce import Share
from sparsync.sparse import SparseVector
from sparsync.transports.communicator import Communicator
from sparsync.wire.base import Codec, MessageFraming

__all__ = ["Kept", "by_allgather", "by_histogram", "by_threshold"]

_FINE = 64  # the marginal bin may hold k / 64 entries: finer changes nothing that training sees


class Kept(NamedTuple):
    """The outcome of a global selection.

    Attributes:
        entries: what this rank keeps of its region (relative indices).
        counts: how many entries each rank keeps.
        threshold_key: magnitude of the smallest kept entry or a bound of it, as a key.
        loads: entries that each rank summed; empty where nobody asked.
    """

    entries: SparseVector
    counts: list[int]
    threshold_key: int | None
    loads: Sequence[int] = ()


async def by_histogram(
    comm: Communicator,
    share: Share,
    k: int,
    *,
    cap: float | None,
    size: int,
    last_threshold_key: int | None,
) -> Kept:
    """Keep exactly ``min(cap * k, nnz)`` entries: a histogram of magnitudes, then one of counts.

    Bins lie around the last threshold (one octave either way), else everywhere, and are refined
    until the marginal bin holds at most k / 64 entries.  All above the marginal bin are kept; its
    own places go to the ranks in rank order, on each rank to the largest.  ``cap=None`` keeps the
    whole marginal bin.

    Cost: usually one allreduce of ``bins_for(k)`` words and one allgather of 3 words.
    """
    region = share.region
    stop, octave = kernels.key_range(region.values.dtype)  # one NaN pattern is ``stop``: clamped
    around, bins = None, REFINING_BINS
    if last_threshold_key is not None:
        bins = bins_for(k)
        around = max(last_threshold_key - octave, 1), min(last_threshold_key + octave, stop)
    wanted = most_entries(k, cap if cap is not None else 1.0, size)
    keys = kernels.magnitude_keys(region.values).to(torch.int64).clamp(max=stop - 1).sort().values
    total, (bracket,) = await quantiles(
        comm,
        keys,
        lambda total: [max(total - wanted, 0)],
        stop=stop,
        bins=bins,
        tolerance=lambda _: max(wanted // _FINE, 1),
        start_at=around,
        count_limit=size,
        phase="threshold",
    )
    bounds = torch.tensor([bracket.low, bracket.high], device=keys.device)
    from_low, from_high = (keys.numel() - torch.searchsorted(keys, bounds)).tolist()
    mine = torch.tensor([from_high, from_low - from_high, share.load])
    everyone = await comm.allgather(mine, "sizes")
    above, marginal, loads = zip(*(t.tolist() for t in everyone), strict=True)
    places = sum(marginal) if cap is None else min(wanted, total) - sum(above)
    counts = [a + m for a, m in zip(above, _in_rank_order(places, marginal), strict=True)]
    return Kept(region.top(counts[comm.rank]), counts, bracket.low or None, loads)


async def by_allgather(
    comm: Communicator,
    region: SparseVector,
    k: int,
    *,
    cap: float | None,
    boundaries: Sequence[int],
    codec: Codec[SparseVector],
) -> Kept:
    """Collect all reduced entries everywhere and take the k-th largest as threshold (Alg. 1, l. 10).

    Cost: one allgather of a word, then an allgatherv of all reduced entries: up to
    2 min(k P, n) words, which the paper's "< 6k" leaves out.
    """
    encoded = codec.encode(region)
    length = torch.tensor([encoded.payload.numel()])
    lengths = [int(t) for t in await comm.allgather(length, "sizes")]
    framing = MessageFraming(codec)
    messages = await comm.allgatherv(encoded.payload, lengths, "threshold", framing)
    everyone = [
        codec.decode(m, boundaries[r + 1] - boundaries[r]).values.to(region.values.device)
        for r, m in enumerate(messages)
    ]
    values = torch.cat(everyone)
    largest = kernels.top(values, k)
    if not largest.numel():
        return Kept(region.top(0), [0] * comm.world_size, None)
    threshold_key = int(kernels.magnitude_keys(values[largest]).min())
    counts = [int((kernels.magnitude_keys(v) >= max(threshold_key, 1)).sum()) for v in everyone]
    if not bool(torch.isfinite(values).all()):
        cap = None  # as in by_threshold
    return _within_cap(comm, region, counts, k, cap, threshold_key)


async def by_threshold(
    comm: Communicator,
    region: SparseVector,
    k: int,
    *,
    cap: float | None,
    threshold_key: int | None,
) -> Kept:
    """Keep what reaches a reused threshold; over the cap, each rank keeps its largest pro rata.

    Cost: one allgather of two words.
    """
    reach = 0
    if threshold_key is not None:
        key = torch.tensor([max(threshold_key, 1)], device=region.values.device)
        reach = int(kernels.count_from(region.values, key))
    broken = int((~region.isfinite()).sum())
    pairs = [t.tolist() for t in await comm.allgather(torch.tensor([reach, broken]), "sizes")]
    if any(pair[1] for pair in pairs):
        cap = None  # pro rata could drop the NaN that makes all ranks refuse the step
    return _within_cap(comm, region, [pair[0] for pair in pairs], k, cap, threshold_key)


def _within_cap(
    comm: Communicator,
    region: SparseVector,
    counts: list[int],
    k: int,
    cap: float | None,
    threshold_key: int | None,
) -> Kept:
    """Scale the counts down to ``cap * k`` entries, pro rata; what is cut off is not delivered."""
    total = sum(counts)
    if cap is not None and total > most_entries(k, cap, total):
        most = most_entries(k, cap, total)
        ends = [0]
        for count in counts:
            ends.append(ends[-1] + count)
        counts = [most * ends[i + 1] // total - most * ends[i] // total for i in range(len(counts))]
    return Kept(region.top(counts[comm.rank]), counts, threshold_key)


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
