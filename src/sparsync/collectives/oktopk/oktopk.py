"""Ok-Topk: O(k) sparse allreduce (Li & Hoefler, PPoPP 2022, Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

import torch

from sparsync.collectives.base import Collective, Reduced, capped, check_cap, most_entries
from sparsync.collectives.costs import ENTRY_BYTES, Cost, Job, Result, allgatherv
from sparsync.collectives.oktopk import exchange, phases, regions
from sparsync.collectives.oktopk.quantiles import Bracket, bins_for, quantiles
from sparsync.errors import ConfigurationError
from sparsync.sparse import SparseVector, Vector
from sparsync.transports.communicator import Communicator
from sparsync.wire.base import HEADER_BYTES, Codec
from sparsync.wire.coo import Coo

__all__ = ["OkTopk", "OkTopkState"]

_PASSES = 4  # per entry of k: sort, histogram, and find what was delivered
_COUNTS_TURN = 1 / 3  # of a turn: a round of counts, with next to no work
# both multiples of what decoding, or budgeted's turns, take, fitted to benchmarks/fidelity.md at P = 4, 8


@dataclass(frozen=True)
class OkTopkState:
    """State carried from step to step; the same on every rank.

    Attributes:
        boundaries: P + 1 cuts of ``[0, n)``; None before the first step, and when they were crowded.
        threshold_key: the last global threshold as a magnitude key; None while there is none.
    """

    boundaries: tuple[int, ...] | None = None
    threshold_key: int | None = None


@final
class OkTopk(Collective):
    """Top-k of the sum of the ranks' top-k entries, with O(k) volume whatever P is.

    Phases: 1. agree on P regions that hold equally many selected entries (every
    ``repartition_period`` steps);  2. split and reduce: each region's owner sums it;  3. global
    selection of the k largest;  4. balance, if counts are uneven, and allgatherv;  5. delivered =
    selected entries whose index is in the total.

    Args:
        codec: wire format; must be exact (default: coo).
        repartition_period: tau in steps (paper: 64).
        repartition_trigger: cut again on the next step when a region held more than this multiple of
            the mean (1.5 keeps what is received in phase 2 below 3k words); None: never early,
            as published.  Needs ``global_threshold="histogram"``, whose counts tell everyone.
        threshold_period: tau' in steps, for ``global_threshold="allgather"`` (paper: 32, BERT 128).
        boundaries: "histogram" (cuts of the summed counts, any supports) or "average" (means of the
            ranks' own cuts, as published: supposes that the ranks' supports look alike).
        global_threshold: "histogram" (exactly k, every step) or "allgather" (as published: exact
            every ``threshold_period`` steps at up to 2 min(kP, n) words, reused in between).
        cap: at most ``cap * k`` entries are taken, locally and globally; None: any number.
        window: messages in flight per direction while splitting (published code: 4); None: all.
        rotate: rotate destinations (Figure 2).
        balanced_split: False cuts even regions (the "naive reduce" of Figure 7a).
        balance: False never balances before the allgatherv (Figure 7b).
        balance_trigger: balance when the largest count exceeds this multiple of the mean (paper: 4).

    Cost: 2 k (P - 1) / P words where supports match the regions, at most 6 k (P - 1) / P on
    exchangeable inputs and 6 k - 4 k / P on any whose supports stay
    where they were on the step before; at most 2 P + 2 log2 P messages and the small
    allreduces of phases 1 and 3.
    State: ``OkTopkState``.
    Differs from the paper: any P; steps 0-based; by default the cap, histogram cuts and histogram
    threshold (the preset "oktopk-paper" is as published); an allgatherv whose counts stayed uneven
    runs on a ring, which sends nothing twice.

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

    def __init__(
        self,
        codec: Codec[SparseVector] | None = None,
        *,
        repartition_period: int = 64,
        repartition_trigger: float | None = 1.5,
        threshold_period: int = 32,
        boundaries: Literal["histogram", "average"] = "histogram",
        global_threshold: Literal["histogram", "allgather"] = "histogram",
        cap: float | None = 1.0,
        window: int | None = 4,
        rotate: bool = True,
        balanced_split: bool = True,
        balance: bool = True,
        balance_trigger: float = 4.0,
    ) -> None:
        for name, choice, known in (
            ("boundaries", boundaries, ("histogram", "average")),
            ("global_threshold", global_threshold, ("histogram", "allgather")),
        ):
            if choice not in known:
                raise ConfigurationError(
                    f"OkTopk: {name} is {choice!r}; choose one of {', '.join(known)}"
                )
        for name, number in (
            ("repartition_period", repartition_period),
            ("repartition_trigger", repartition_trigger),
            ("threshold_period", threshold_period),
            ("window", window),
            ("balance_trigger", balance_trigger),
        ):
            if number is not None and not number >= 1:
                raise ConfigurationError(f"OkTopk: {name} is {number}; give at least 1")
        check_cap(cap, "OkTopk")
        self.codec = codec or Coo()
        if not self.codec.exact:
            raise ConfigurationError("OkTopk: the codec rounds values; use an exact one, as coo")
        self.repartition_period, self.threshold_period = repartition_period, threshold_period
        self.boundaries, self.global_threshold, self.cap = boundaries, global_threshold, cap
        self.repartition_trigger = repartition_trigger
        self.window, self.rotate, self.balanced_split = window, rotate, balanced_split
        self.balance_trigger = balance_trigger if balance else None
        self.state = OkTopkState()

    def cost(self, job: Job) -> Cost:
        """Return Equations 1 and 2 for equally full regions, and what agreeing on them takes.

        The mean of a period's steps, of which one cuts regions again and, with an allgathered
        threshold, one collects all reduced entries; thresholds that are reused select k.  Equation 3 is
        the paper's bound; ``phases.bound_words`` that of the default settings.

        Example:
            >>> cost = OkTopk().cost(Job(10**6, 10_000, 8))
            >>> round(cost.words / 10_000, 2)  # at most 6 * 7 / 8
            3.62
        """
        k, world_size, share = round(job.k), job.world_size, job.share
        cost = phases.split(job.k, world_size) + phases.gather(job.k, world_size)
        encoded, decoded = job.k, 2 * job.k * share + _PASSES * job.k
        if self.global_threshold == "histogram":
            cost += phases.histogram(k, world_size) + phases.counts(3, world_size)
            agreeing = 3
        else:
            reduced = HEADER_BYTES + ENTRY_BYTES * round(job.summed / world_size)
            exact = allgatherv(reduced, world_size).times(1 / self.threshold_period)
            cost += phases.counts(2, world_size) + exact
            decoded += job.summed * share / self.threshold_period
            agreeing = 1
        histogram = self.boundaries == "histogram"
        cuts = phases.histogram(k, world_size) if histogram else phases.averaged_cuts(world_size)
        cost += cuts.times(1 / self.repartition_period)
        turns = 1 + (1 + _COUNTS_TURN * agreeing) * job.rounds
        return cost + Cost(0, 0, encoded=encoded, decoded=decoded, turns=turns)

    def promised_words(self, job: Job, *, exchangeable: bool) -> float | None:
        """Return Equation 3 as published, without exact steps; with a cap ``phases.bound_words``."""
        if self.global_threshold == "allgather":
            return phases.equation_3(job.k, job.world_size).words
        if self.cap == 1:
            return phases.bound_words(job.k, job.world_size, exchangeable=exchangeable)
        return None

    async def reduce(self, comm: Communicator, selected: Vector, k: int, step: int) -> Reduced:
        """Run Algorithm 1."""
        mine = capped(selected, k, self.cap)
        boundaries = await self._agree_on_boundaries(comm, mine, k, step)
        share = await exchange.split_reduce(
            comm,
            mine,
            boundaries,
            self.codec,
            most=most_entries(k, self.cap, mine.size),
            window=self.window,
            rotate=self.rotate,
        )
        kept = await self._select_globally(comm, share, boundaries, k, step)
        total = await exchange.balance_and_allgatherv(
            comm,
            kept.entries,
            kept.counts,
            boundaries,
            self.codec,
            balance_trigger=self.balance_trigger,
        )
        trigger = self.repartition_trigger
        crowded = trigger is not None and regions.is_crowded(kept.loads, trigger)
        self.state = OkTopkState(None if crowded else tuple(boundaries), kept.threshold_key)
        return Reduced(total, mine.restrict(total.indices))

    async def _agree_on_boundaries(
        self, comm: Communicator, selected: SparseVector, k: int, step: int
    ) -> list[int]:
        """Phase 1: renew the boundaries when the period opens."""
        size, world_size = selected.size, comm.world_size
        if not self.balanced_split:
            return regions.even_boundaries(size, world_size)
        known = self.state.boundaries
        if step % self.repartition_period and known and len(known) == world_size + 1:
            return list(known)
        if self.boundaries == "average":
            cuts = regions.equal_count_cuts(selected.indices.tolist(), size, world_size)
            sums = await comm.allreduce(torch.tensor(cuts, dtype=torch.int64), "boundaries")
            return [0, *(total // world_size for total in sums.tolist()), size]
        total, brackets = await quantiles(
            comm,
            selected.indices,
            lambda total: [total * i // world_size for i in range(1, world_size)],
            stop=size,
            bins=bins_for(k),
            tolerance=lambda total: max(total // (16 * world_size), 1),
            count_limit=size * world_size,
            phase="boundaries",
        )
        return _nearest_edges(total, brackets, size, world_size)

    async def _select_globally(
        self, comm: Communicator, share: exchange.Share, boundaries: list[int], k: int, step: int
    ) -> exchange.Kept:
        """Phase 3."""
        last, cap = self.state.threshold_key, self.cap
        if self.global_threshold == "histogram":
            return await exchange.by_histogram(
                comm, share, k, cap=cap, size=boundaries[-1], last_threshold_key=last
            )
        if step % self.threshold_period == 0 or last is None:
            return await exchange.by_allgather(
                comm, share.region, k, cap=cap, boundaries=boundaries, codec=self.codec
            )
        return await exchange.by_threshold(comm, share.region, k, cap=cap, threshold_key=last)


def _nearest_edges(total: int, brackets: list[Bracket], size: int, world_size: int) -> list[int]:
    """Turn the brackets of the wanted cuts into boundaries: of each its nearer edge."""
    if total == 0:
        return regions.even_boundaries(size, world_size)
    boundaries = [0]
    for i, bracket in enumerate(brackets, start=1):
        past_low = total * i // world_size - bracket.below
        cut = bracket.low if 2 * past_low <= bracket.inside else bracket.high
        boundaries.append(max(cut, boundaries[-1]))
    return [*boundaries, size]
