"""Ok-Topk's O(k) sparse allreduce (Li & Hoefler, PPoPP 2022, Algorithm 1), and its cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple, final

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.collectives.collective import (
    Collective,
    Reduced,
    capped,
    check_cap,
    less,
    most_entries,
)
from sparsync.collectives.costs import (
    COUNT_BYTES,
    ENTRY_BYTES,
    WORD_BYTES,
    Cost,
    Job,
    Result,
    allgatherv,
    allreduce,
    lower_bound_words,
)
from sparsync.errors import require
from sparsync.published.oktopk import regions
from sparsync.sparse import SparseVector, Vector, even_boundaries
from sparsync.transports.communicator import Communicator
from sparsync.wire.codec import HEADER_BYTES, Codec, MessageFraming, decode_as
from sparsync.wire.coo import Coo

__all__ = [
    "OkTopk",
    "OkTopkState",
    "averaged_cuts_cost",
    "bound_words",
    "counts_cost",
    "equation_3",
    "gather_cost",
    "histogram_cost",
    "split_cost",
]

# The marginal bin may hold up to k / 64 entries.  These are kept in rank order, not by magnitude, so up
# to this fraction of the total may differ from the exact top-k.
_FINE = 64
# Fitted to benchmarks/fidelity.md at P = 4 and 8, in units of a decoding pass and of a budgeted turn.
_PASSES = 4  # for each of k entries: sorting, histograms, and finding the delivered entries
_COUNTS_TURN = 1 / 3  # fraction of a turn, because exchanging counts involves almost no work


@dataclass(frozen=True)
class OkTopkState:
    """The state that is kept from step to step, equal on every rank.

    Attributes:
        boundaries: P + 1 cuts of ``[0, n)``; None before the first step, and after a step in which a
            region was crowded.
        threshold_key: the last global threshold as a magnitude key.
    """

    boundaries: tuple[int, ...] | None = None
    threshold_key: int | None = None


@final
class OkTopk(Collective):
    """Top-k of the sum of the ranks' top-k entries, with O(k) volume for any P.

    The phases, with the lines of Algorithm 1: 1. agree on P regions that hold equally many selected
    entries, every ``repartition_period`` steps (5-7);  2. split and reduce: each region's owner sums its
    entries (8);  3. select the k largest globally (9-12);  4. balance, if counts are uneven, and
    allgatherv (13);  5. count a rank's selected entries as delivered if their index is in the total (14).

    Args:
        codec: wire format (default: coo).  A lossy codec rounds entries on their way to a region's
            owner, and the owner's sums on their way to all ranks.
        keep_error: whether the rank that rounds a value keeps the error, which requires a contractive
            codec; if False, the error is lost and reported.
        repartition_period: tau in steps (paper: 64).
        repartition_trigger: cut the regions again in the next step if a region held more than this
            multiple of the mean (1.5 keeps the words received in phase 2 below 3k).  With None, regions
            are never cut early, as published.  A number needs ``global_threshold="histogram"``, whose
            messages carry the loads.
        threshold_period: tau' in steps, for ``global_threshold="allgather"`` (paper: 32, BERT 128).
        boundaries: "histogram" (quantiles of the summed counts) or "average" (means of the cuts that suit
            each rank, as published in section 3.1.1; this assumes that the ranks' supports are alike).
        global_threshold: "histogram" (exactly k, every step) or "allgather" (as published: exact
            every ``threshold_period`` steps at up to 2 min(kP, n) words, reused in between).
        cap: at most ``cap * k`` entries are sent, locally and globally; None sets no limit.
        buckets: number of buckets of messages in the split; each is reduced while the next one is in
            flight (section 3.1.1, which gives no number).  With 1, there is no bucketing.
        rotate: whether every rank begins with a different destination (Figure 2b).
        balanced_split: with False, regions have equal widths (the "naive reduce" of Figure 7a).
        balance: with False, entries are never balanced before the allgatherv (Figure 7b).
        balance_trigger: balance if the largest count exceeds this multiple of the mean (section 5.3:
            4).

    Cost: 2 k (P - 1) / P words if supports match the regions (Theorem 3.1 is tight), at most
    6 k (P - 1) / P on exchangeable inputs (Equation 3), and at most 6 k - 4 k / P on all others, as long
    as supports do not change from one step to the next.  At most 2 P + 2 log2 P messages, and the small
    allreduces of phases 1 and 3.
    State: ``OkTopkState``.
    Differs from the paper: P may be any number; steps are 0-based; by default, there is a cap, and both
    cuts and threshold come from histograms (the preset "oktopk-paper" is as published); if counts are
    still uneven, the allgatherv runs on a ring, which sends nothing twice.

    Example:
        >>> from sparsync.transports.sim import simulate
        >>> async def program(comm):
        ...     mine = SparseVector.from_dense(torch.tensor([0.0, 1.0, 0.0, comm.rank + 2.0]))
        ...     reduced = await OkTopk().reduce(comm, mine, k=1, step=0)
        ...     return reduced.total.to_dense().tolist()
        >>> simulate(program, world_size=3).results[0]
        [0.0, 0.0, 0.0, 9.0]

    References: Li & Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning",
    PPoPP 2022, https://doi.org/10.1145/3503221.3508399.
    """

    result: Result = "top-k"
    order = "tree"

    def __init__(
        self,
        codec: Codec[SparseVector] | None = None,
        *,
        keep_error: bool = True,
        repartition_period: int = 64,
        repartition_trigger: float | None = 1.5,
        threshold_period: int = 32,
        boundaries: Literal["histogram", "average"] = "histogram",
        global_threshold: Literal["histogram", "allgather"] = "histogram",
        cap: float | None = 1.0,
        buckets: int = 2,
        rotate: bool = True,
        balanced_split: bool = True,
        balance: bool = True,
        balance_trigger: float = 4.0,
    ) -> None:
        for name, choice, known in (
            ("boundaries", boundaries, ("histogram", "average")),
            ("global_threshold", global_threshold, ("histogram", "allgather")),
        ):
            say = f"OkTopk: {name} is {choice!r}; choose one of {', '.join(known)}"
            require(choice in known, say)
        for name, number in (
            ("repartition_period", repartition_period),
            ("repartition_trigger", repartition_trigger),
            ("threshold_period", threshold_period),
            ("buckets", buckets),
            ("balance_trigger", balance_trigger),
        ):
            fits = number is None or number >= 1
            require(fits, f"OkTopk: {name} is {number}; give at least 1")
        check_cap(cap, "OkTopk")
        self.codec = codec or Coo()
        require(
            self.codec.contractive or not keep_error,
            f"OkTopk: the error of {self.codec!r} may exceed the vector, and would explode if kept; give "
            "keep_error=False, or a codec with shrink=True",
        )
        self.keep_error = keep_error
        self.repartition_period, self.threshold_period = repartition_period, threshold_period
        self.boundaries, self.global_threshold, self.cap = boundaries, global_threshold, cap
        self.repartition_trigger = repartition_trigger
        self.buckets, self.rotate, self.balanced_split = buckets, rotate, balanced_split
        self.balance_trigger = balance_trigger if balance else None
        self.state = OkTopkState()

    def cost(self, job: Job) -> Cost:
        """Return Equations 1 and 2 for equally full regions, plus the cost of agreeing on the regions.

        The cost is a mean over the steps of a period.  One of these steps cuts the regions again and,
        with ``global_threshold="allgather"``, one collects all reduced entries.  The cost assumes that
        reused thresholds select k entries.  Equation 3 is the paper's bound; ``bound_words`` holds for
        the default settings.

        Example:
            >>> cost = OkTopk().cost(Job(10**6, 10_000, 8))
            >>> round(cost.words / 10_000, 2)  # at most 6 * 7 / 8
            3.62
        """
        k, world_size, share = round(job.k), job.world_size, job.share
        message = self.codec.nbytes(round(job.k / world_size), -(-job.size // world_size))
        cost = split_cost(job.k, world_size, message) + gather_cost(job.k, world_size, message)
        encoded, decoded = job.k, 2 * job.k * share + _PASSES * job.k
        if self.global_threshold == "histogram":
            cost += histogram_cost(k, world_size) + counts_cost(3, world_size)
            agreeing = 3
        else:
            reduced = HEADER_BYTES + ENTRY_BYTES * round(job.summed / world_size)
            exact = allgatherv(reduced, world_size).times(1 / self.threshold_period)
            cost += counts_cost(2, world_size) + exact
            decoded += job.summed * share / self.threshold_period
            agreeing = 1
        histogram = self.boundaries == "histogram"
        cuts = histogram_cost(k, world_size) if histogram else averaged_cuts_cost(world_size)
        cost += cuts.times(1 / self.repartition_period)
        turns = 1 + (1 + _COUNTS_TURN * agreeing) * job.rounds
        return cost + Cost(0, 0, encoded=encoded, decoded=decoded, turns=turns)

    def promised_words(self, job: Job, *, exchangeable: bool) -> float | None:
        """Return ``bound_words`` if there is a cap; as published, Equation 3 (ignoring exact steps)."""
        if self.global_threshold == "allgather":
            return equation_3(job.k, job.world_size).words
        if self.cap == 1:
            return bound_words(job.k, job.world_size, exchangeable=exchangeable)
        return None

    async def reduce(self, comm: Communicator, selected: Vector, k: int, step: int) -> Reduced:
        """Run Algorithm 1."""
        # Apply the cap before sending any message: a threshold that is reused for 32 steps selects up
        # to 19 k entries (measured), but Equations 1 to 3 assume k.
        mine = capped(selected, k, self.cap)
        boundaries = await self._agree_on_boundaries(comm, mine, k, step)
        writer = regions.Writer(self.codec, comm, mine, step)
        share = await regions.split_reduce(
            comm,
            mine,
            boundaries,
            writer,
            most=most_entries(k, self.cap, mine.size),
            buckets=self.buckets,
            rotate=self.rotate,
        )
        if self.global_threshold == "histogram":
            kept = await self._by_histogram(comm, share, k, size=mine.size)
        elif step % self.threshold_period == 0 or self.state.threshold_key is None:
            kept = await self._by_allgather(comm, share.region, k, boundaries)
        else:
            kept = await self._by_threshold(comm, share.region, k)
        total = await regions.balance_and_allgatherv(
            comm,
            share.region.top(kept.counts[comm.rank]),
            kept.counts,
            boundaries,
            writer,
            balance_trigger=self.balance_trigger,
        )
        # The paper cuts regions every 64 steps, because supports change slowly.  After a sudden change,
        # an owner may receive 2 (P - 1) k words per step until the period ends.  Here, all ranks see the
        # loads, so they can agree to cut in the next step.
        trigger = self.repartition_trigger
        crowded = trigger is not None and regions.is_crowded(kept.loads, trigger)
        self.state = OkTopkState(None if crowded else tuple(boundaries), kept.threshold_key)
        # line 14 is the intersection of local and global indices; the rest stays in the residual
        delivered = mine.restrict(total.indices)
        if not writer.errors:
            return Reduced(total, delivered)
        error = SparseVector.merge(writer.errors, within=total.indices)
        if self.keep_error:
            return Reduced(total, less(delivered, [error]))
        return Reduced(total, delivered, error)

    async def _agree_on_boundaries(
        self, comm: Communicator, selected: SparseVector, k: int, step: int
    ) -> list[int]:
        """Return the boundaries of the regions (phase 1); renew them at the start of every period."""
        size, world_size = selected.size, comm.world_size
        if not self.balanced_split:
            return even_boundaries(size, world_size)
        known = self.state.boundaries
        # Algorithm 1, line 5, tests (t - 1) mod tau, because the paper's steps start at 1.
        if step % self.repartition_period and known and len(known) == world_size + 1:
            return list(known)
        if self.boundaries == "average":
            # In the tight case of Theorem 3.1, rank i selects entries only in region i, so the means of
            # the ranks' cuts suit no rank: at P = 16, one rank receives 13.1 words per k.
            cuts = regions.equal_count_cuts(selected.indices.tolist(), size, world_size)
            sums = await comm.allreduce(
                torch.tensor(cuts, dtype=torch.int64, device="cpu"), "boundaries"
            )
            return [0, *(total // world_size for total in sums.tolist()), size]
        total, brackets = await regions.quantiles(
            comm,
            lambda edges: torch.searchsorted(selected.indices, edges.to(selected.indices.device)),
            lambda total: [total * i // world_size for i in range(1, world_size)],
            stop=size,
            bins=regions.bins_for(k),
            tolerance=lambda total: max(total // (16 * world_size), 1),
            count_limit=size * world_size,
            phase="boundaries",
        )
        if total == 0:
            return even_boundaries(size, world_size)
        boundaries = [0]
        for i, bracket in enumerate(brackets, start=1):
            # cut at the edge of the bracket that leaves fewer entries on the wrong side
            past_low = total * i // world_size - bracket.below
            cut = bracket.low if 2 * past_low <= bracket.inside else bracket.high
            boundaries.append(max(cut, boundaries[-1]))
        return [*boundaries, size]

    # ---- phase 3, global selection: three ways to do lines 9-12 of Algorithm 1 -------------------

    async def _by_histogram(
        self, comm: Communicator, share: regions.Share, k: int, *, size: int
    ) -> _Kept:
        """Keep exactly ``min(cap * k, nnz)`` entries, using histograms of magnitudes.

        The bins cover one octave on either side of the last threshold, or all magnitudes if there is no
        last threshold.  All entries above the marginal bin are kept.  The remaining places are filled in
        rank order, with each rank's largest entries first.  ``cap=None`` keeps the whole marginal bin.
        """
        # A few hundred counts per step replace an allgather of all reduced entries every tau' steps: up
        # to 2 min(k P, n) words, which the paper's 6 k does not include.  Renewed on every step, the
        # threshold cannot drift.
        cap, last, values = self.cap, self.state.threshold_key, share.region.values
        # One bit pattern of NaN has the key ``stop`` itself.  ``below`` counts every element as being
        # below ``stop``, so that this NaN falls into the last bin.
        stop, octave = kernels.key_range(values.dtype)
        around, bins = None, regions.REFINING_BINS
        if last is not None:
            bins = regions.bins_for(k)
            around = max(last - octave, 1), min(last + octave, stop)
        wanted = most_entries(k, cap if cap is not None else 1.0, size)

        def below(edges: Tensor) -> Tensor:
            counts, inner = (edges > 0) * values.numel(), (edges > 0) & (edges < stop)
            reach = kernels.count_from(values, edges[inner].to(values.device))
            counts[inner] -= reach.to(counts.device)
            return counts

        total, (bracket,) = await regions.quantiles(
            comm,
            below,
            lambda total: [max(total - wanted, 0)],
            stop=stop,
            bins=bins,
            tolerance=lambda _: max(wanted // _FINE, 1),
            start_at=around,
            count_limit=size,
            phase="threshold",
        )
        bounds = below(torch.tensor([bracket.low, bracket.high], device="cpu"))
        from_low, from_high = (values.numel() - bounds).tolist()
        mine = torch.tensor([from_high, from_low - from_high, share.load], device="cpu")
        # This allgather decides which entries are kept, whether to balance, and whether to cut the
        # regions again.  After it, every rank knows the length of every message.
        everyone = await comm.allgather(mine, "sizes")
        above, marginal, loads = zip(*(t.tolist() for t in everyone), strict=True)
        places = sum(marginal) if cap is None else min(wanted, total) - sum(above)
        counts = []
        for over, wish in zip(above, marginal, strict=True):
            granted = min(wish, places)
            places -= granted
            counts.append(over + granted)
        return _Kept(counts, bracket.low or None, loads)

    async def _by_allgather(
        self, comm: Communicator, region: SparseVector, k: int, boundaries: Sequence[int]
    ) -> _Kept:
        """Allgather all reduced entries and take the k-th largest as the threshold (line 10).

        This takes up to 2 min(k P, n) words, which Equation 3 leaves out.
        """
        # use an exact codec: rounded sums would be equal so often that far more than k entries would
        # reach the k-th largest
        codec = self.codec if self.codec.is_exact(region.values.dtype) else Coo()
        encoded = codec.encode(region)
        length = torch.tensor([encoded.payload.numel()], device="cpu")
        lengths = [int(t) for t in await comm.allgather(length, "sizes")]
        framing = MessageFraming(codec)
        messages = await comm.allgatherv(encoded.payload, lengths, "threshold", framing)
        everyone = [
            decode_as(codec, message, stop - start, region.values.dtype).values.to(
                region.values.device
            )
            for message, (start, stop) in zip(messages, pairwise(boundaries), strict=True)
        ]
        values = torch.cat(everyone)
        largest = kernels.top(values, k)
        if not largest.numel():
            return _Kept([0] * comm.world_size, None)
        threshold_key = int(kernels.magnitude_keys(values[largest]).min())
        counts = [int((kernels.magnitude_keys(v) >= max(threshold_key, 1)).sum()) for v in everyone]
        finite = bool(torch.isfinite(values).all())
        return _Kept(self._within_cap(counts, k, finite=finite), threshold_key)

    async def _by_threshold(self, comm: Communicator, region: SparseVector, k: int) -> _Kept:
        """Keep entries that reach a reused threshold; beyond the cap, all ranks keep fewer, pro rata."""
        threshold_key = self.state.threshold_key
        key = torch.tensor([max(threshold_key or 0, 1)], device=region.values.device)
        reach = int(kernels.count_from(region.values, key))
        mine = torch.tensor([reach, int((~region.isfinite()).sum())], device="cpu")
        everyone = await comm.allgather(mine, "sizes")
        counts, broken = zip(*(t.tolist() for t in everyone), strict=True)
        return _Kept(self._within_cap(counts, k, finite=not any(broken)), threshold_key)

    def _within_cap(self, counts: Sequence[int], k: int, *, finite: bool) -> Sequence[int]:
        """Scale the counts down to ``cap * k`` entries pro rata; the entries cut off are not delivered.

        If a value is not finite, no cap applies, because a cap could drop the NaN that makes all ranks
        refuse the step.
        """
        total = sum(counts)
        most = most_entries(k, self.cap, total) if finite else total
        if total <= most:
            return counts
        ends = [most * sum(counts[:rank]) // total for rank in range(len(counts) + 1)]
        return [high - low for low, high in pairwise(ends)]


class _Kept(NamedTuple):
    """The number of its region's largest entries that each rank keeps, known to all ranks.

    ``loads`` holds the number of entries that each rank has summed; it is empty if the ranks have not
    exchanged these numbers.
    """

    counts: Sequence[int]
    threshold_key: int | None
    loads: Sequence[int] = ()


# ---- closed forms of the phases, and bounds of the whole (Equations 1 to 3) -------------------------


def bound_words(k: float, world_size: int, *, exchangeable: bool) -> float:
    """Return a bound on the words that a rank sends or receives in any step of the preset "oktopk".

    The bound is ``6 k (P - 1) / P`` (Equation 3) if the ranks' inputs are exchangeable.  For arbitrary
    inputs, it is ``6 k - 4 k / P = 2 k + 4 k (P - 1) / P``: Equation 2, plus Equation 1 without the
    assumption that a rank owns 1 / P of the entries that it selects (it may have to send all k).

    The bound holds if supports do not change from one step to the next (the paper: for 64 steps).
    Headers and histograms have no separate term.  If ``k / P >= 256``, the bound leaves room for them.
    There is one exception: if P = 2, supports are disjoint and one rank's values dominate, the entries
    alone take all 4 k words.

    Example:
        >>> [bound_words(1000, 4, exchangeable=e) for e in (True, False)]
        [4500.0, 5000.0]
    """
    if world_size == 1:
        return 0.0
    if exchangeable:
        return 6 * k * (world_size - 1) / world_size
    return 6 * k - 4 * k / world_size


def equation_3(k: float, world_size: int) -> Cost:
    """Bound Ok-Topk as published: ``(2 P + 2 log P) alpha + 6 k (P - 1) / P beta``.

    The bound leaves out headers, histograms and the exact steps, which allgather all reduced entries.

    Example:
        >>> equation_3(k=1000, world_size=8).words
        5250.0
    """
    words = 3 * lower_bound_words(k, world_size)
    return Cost(2 * world_size + 2 * (world_size - 1).bit_length(), WORD_BYTES * words)


def split_cost(k: float, world_size: int, message: float | None = None) -> Cost:
    """Return the cost of split and reduce, Equation 1: ``(P - 1) alpha + 2 k (P - 1) / P beta``.

    The cost includes the headers of P - 1 messages.  It assumes that every region holds equally many of
    every rank's entries.  ``message`` is the size in bytes of k / P entries; None counts them as coo.
    """
    peers, message = world_size - 1, _share_bytes(k, world_size) if message is None else message
    return Cost(peers, peers * message, together=max(peers - 1, 0))


def gather_cost(k: float, world_size: int, message: float | None = None) -> Cost:
    """Return the cost of balance and allgatherv for even counts, which need no balancing.

    This is an allgatherv of ``2 k (P - 1) / P`` words.  For arbitrary counts, Equation 2 gives at most
    ``(P + 2 log P) alpha + 4 k (P - 1) / P beta``.  ``message`` is as for ``split_cost``.

    Example:
        >>> gather_cost(1000, 8).words
        1764.0
    """
    return allgatherv(_share_bytes(k, world_size) if message is None else message, world_size)


def _share_bytes(k: float, world_size: int) -> float:
    return HEADER_BYTES + ENTRY_BYTES * k / world_size


def histogram_cost(k: int, world_size: int) -> Cost:
    """Return the cost of an allreduce of ``clamp(k / 16, 32, 1024)`` bins plus two outer ones.

    Each further division of the marginal bin (usually 0 or 1) adds 64 bins.
    """
    return allreduce(regions.bins_for(k) + 2, world_size)


def counts_cost(numbers: int, world_size: int) -> Cost:
    """Return the cost of an allgather of a few integers per rank: counts, and its region's load."""
    return allgatherv(numbers * COUNT_BYTES, world_size)


def averaged_cuts_cost(world_size: int) -> Cost:
    """Return the cost of an allreduce of P - 1 boundaries (section 3.1.1)."""
    return allreduce(world_size - 1, world_size, COUNT_BYTES)
