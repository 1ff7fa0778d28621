"""The life of a gradient, from ``accumulate`` to ``commit``.

::

    gradient --accumulate--> accumulated --select--> selected --exchange--> total --apply--> average
                 ^                                      |   (encode, move, merge, choose, decode)
                 |                                      v
              residual <------------retain---------- delivered

The law, on every step:  sum over ranks(accumulated) == total + sum over ranks(residual).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.algorithm import Algorithm
from sparsync.collectives import Reduced
from sparsync.feedback.correction import Correction, Corrector
from sparsync.feedback.residual import Growth, Residual
from sparsync.feedback.schedule import Warmup
from sparsync.feedback.shares import SharesState
from sparsync.feedback.step import Consensus, Plan, Proposal, Use, channel_of
from sparsync.monitoring import Measured, Monitor, Sink
from sparsync.sparse import DenseVector, Vector
from sparsync.transports.communicator import Communicator
from sparsync.transports.driver import together
from sparsync.units import Unit

__all__ = ["Position", "Reducer"]


class Position(NamedTuple):
    """How far a reducer has come; equal on all ranks that exchange with each other."""

    step: int  # the open one
    skipped: int  # steps that were refused because of NaN or Inf
    shares: SharesState


@final
class Reducer:
    """Averages the gradients of all units over the ranks of a communicator, step by step.

    A step is: ``accumulate`` every gradient, ``exchange`` every unit, then ``commit`` or ``refuse``.
    ``xi_period`` is the number of steps between measurements of Assumption 1's xi (default: never),
    ``consensus`` who else must agree to a step, ``sink`` who takes its numbers.  ``changing``: ranks may
    come and go, see ``regroup``.  ``on_host``: residuals that are
    read by runs are in host memory.
    """

    def __init__(
        self,
        comm: Communicator,
        units: Sequence[Unit],  # equal on all ranks
        algorithm: Algorithm,
        density: float,  # k / n of every unit, in (0, 1]
        warmup: Warmup | None = None,
        correction: Correction | None = None,
        xi_period: int | None = None,
        consensus: Consensus = Proposal.broken,
        sink: Sink | None = None,
        *,
        changing: bool = False,
        on_host: bool = False,
    ) -> None:
        self.comm, self.units, self.algorithm = comm, list(units), algorithm
        self.correction, self.consensus, self._changing = correction, consensus, changing
        self.step = 0  # 0-based number of the open step
        self.skipped = 0  # steps that were refused because of NaN or Inf
        self.scale = 1.0  # by which gradients are multiplied, as by a GradScaler: see ``rescale_``
        self.overflows = False  # see ``overflow``
        self.corrector = Corrector(correction, units, comm.world_size) if correction else None
        parts = [algorithm.for_unit(unit) for unit in units]
        self.selectors = [selector for selector, _ in parts]
        self.collectives = [collective for _, collective in parts]
        self.residuals = [
            Residual(u.size, u.dtype, u.device, on_host=on_host and collective.by_runs)
            for u, collective in zip(units, self.collectives, strict=True)
        ]
        self.plan = Plan(
            self.units, density, warmup, shared=algorithm.shared, overwrites=not changing
        )
        self.xi_period = xi_period
        self.monitor: Monitor | None = None
        if sink is not None or xi_period is not None:
            start = warmup.steps if warmup and not warmup.densities else 0
            self.monitor = Monitor(comm, self.units, sink, xi_period, start)
        # None: it was noticed
        self.growth = Growth(math.ceil(1 / density)) if density else None
        self.notice = ""  # for the user, who is told once
        self.reduced: dict[int, Reduced] = {}  # results of the open step, by unit
        self._later: dict[int, DenseVector] = {}  # accumulated gradients that are read by runs
        self._committed: dict[int, Reduced] = {}  # those of them that are applied already
        self.lost: list[Vector] = []  # in the last step: rounded away, and kept by no rank
        self.open()

    def open(self) -> None:
        """Plan the open step from the present state, to which ``refuse`` returns."""
        self.reduced.clear()
        self._later.clear()
        self._committed.clear()
        # states are frozen and replaced whole, so references are a snapshot
        self._settled = [part.state for part in (*self.selectors, *self.collectives)]
        self.plan.open(self.step, zip(self.selectors, self.collectives, strict=True))

    @property
    def place(self) -> str:
        """The open step in the words of errors: exchange and local step, where these differ."""
        return self.comm.ledger.place(self.step)

    def channel(self, use: int | Use) -> Communicator:
        """Return the channel of a unit, or of another exchange of a step."""
        return channel_of(self.comm, len(self.units), use)

    def move_to(self, comm: Communicator) -> None:
        """Exchange over another communicator of the same ranks, e.g. that of a new simulation."""
        self.comm = comm

    def resume(self, step: int, skipped: int) -> None:
        """Count on from other numbers, as of a saved state; ``open`` then plans the step."""
        self.step, self.skipped = step, skipped

    def set_scale(self, scale: float) -> None:
        """Note by how much gradients are multiplied; values that are held stay as they are."""
        self.scale = scale

    def overflow(self) -> None:
        """Count gradients of the open step as Inf, which reaches every total: all ranks refuse it."""
        self.overflows = True

    def accumulate(
        self, unit: int, start: int, gradient: Tensor, weights: Tensor | None = None
    ) -> None:
        """``accumulated = residual + gradient``, for one run of elements, corrected if asked for.

        The gradient's memory (1-D, contiguous) holds the undo of the step until the step ends.  If
        ``corrector.waits``, call its ``measure`` with all gradients first.  Every element of a unit has
        to be accumulated once before the unit is exchanged.
        """
        # This order: corrected gradients are accumulated (Deep Gradient Compression, section 3; momentum
        # applied to averages is wrong for entries that waited), and xi compares with these gradients,
        # which are gone once ``residual.accumulate`` has swapped the old residual into their memory.
        with self.comm.stage("accumulate"):
            residual = self.residuals[unit]
            gradient = gradient.to(residual.accumulated.dtype)
            if self.overflows:
                gradient.fill_(torch.inf)
            if self.corrector:
                with self.comm.stage("mask"):
                    self.corrector.correct_(unit, start, gradient, weights)
            if self.monitor:
                self.monitor.xi.accumulate(self.step, unit, start, gradient)
            residual.accumulate(start, gradient, *self.plan.units[unit].collect or ())

    def accumulates_later(self, unit: int) -> bool:
        """Tell whether a unit's gradient is read run by run, so that it needs no memory of its own."""
        collective = self.plan.units[unit].collective
        return collective.by_runs and not (self.corrector or self.monitor or self.overflows)

    def accumulate_later(self, unit: int, gradient: Callable[[int, int], Tensor]) -> None:
        """Accumulate elements ``[start, stop)`` of a gradient when they are read."""
        self._later[unit] = self.residuals[unit].accumulate_later(gradient)

    async def exchange(self, unit: int) -> None:
        """Select, then sum over ranks; the result waits for the commit."""
        # everything before the first ``await`` is done when the coroutine is started: ``share``, which is
        # started after all exchanges, finds all units selected
        plan = self.plan.units[unit]
        with self.comm.stage("select"):
            selected = self._select(unit)
        with self.comm.stage("communicate"):
            reducing = plan.collective.reduce(self.channel(unit), selected, plan.k, self.step)
            self.reduced[unit] = await reducing

    def _select(self, unit: int) -> Vector:
        """Select from a unit; free the collected entries before anything is exchanged."""
        if unit in self._later:
            return self._later.pop(unit)
        residual, plan = self.residuals[unit], self.plan.units[unit]
        collected = residual.collected(*plan.wanted) if plan.wanted else None
        selected = plan.selector.select(residual.accumulated, plan.k, self.step, collected)
        self.plan.count(unit, residual, selected)  # looks at the collected entries as well
        residual.forget_collected()
        if self.monitor:
            self.monitor.selected[unit] = selected
        return selected

    async def share(self) -> None:
        """Sum the numbers for xi, agree on the next shares of k; once all units are selected."""
        if self.monitor:
            accumulated = [residual.accumulated for residual in self.residuals]
            await self.monitor.xi.share(self.step, self.channel("xi"), accumulated)
        await self.plan.agree(self.channel("shares"))

    def commit(
        self,
        units: Sequence[int] | None = None,
        *,
        propagate_nonfinite: bool = False,
        prepare: Callable[[], None] | None = None,
    ) -> list[Vector]:
        """Write the residuals of units, return their averages; with the last units the step closes.

        ``prepare`` is called once the step is sure to be applied, before anything changes; it may raise.
        Where a total holds NaN or Inf, nothing is changed and NonFiniteGradientError raised (then call
        ``refuse``), or with ``propagate_nonfinite`` the step is skipped and NaN returned everywhere.
        """
        # Up to ``prepare`` a line may fail, and nothing is changed yet, so the step can be refused; after
        # it no line waits for another rank.  NaN and Inf are always selected and totals are bit-equal, so
        # ranks that see the same totals decide alike without a message.
        chosen = range(len(self.units)) if units is None else units
        reduced = {unit: self.reduced[unit] for unit in chosen}
        totals = [result.total for result in reduced.values()]
        parts = [self.units[unit] for unit in chosen]
        proposal = Proposal(self.comm.rank, self.step, self.place, parts, totals)
        if broken := self.consensus(proposal):
            if not propagate_nonfinite:
                raise proposal.refusal(broken)
            self.skip()
            # NaN in all gradients: a second optimizer, whose gradients stayed finite, would apply mass
            # that the restored residuals still hold
            return [DenseVector(torch.full_like(r.accumulated, torch.nan)) for r in self.residuals]
        if prepare is not None:
            prepare()
        # before totals are divided: xi is measured on sums
        probe = self.monitor.xi if self.monitor else None
        measured = probe.measure(self.step, totals, self.plan.quotas) if probe else None
        for unit, result in reduced.items():
            if self.comm.world_size > 1 and self.algorithm.average:
                # in place: ``delivered`` shares no memory with it, or is all that was accumulated
                result.total.divide_(self.comm.world_size)
            with self.comm.stage("mask"):
                self.residuals[unit].retain(result.delivered)  # residual = accumulated - delivered
            for part in (unit, len(self.units) + unit):
                self._settled[part] = (*self.selectors, *self.collectives)[part].state
        self._committed |= reduced
        # fragments of an exchange of updates are committed one by one: the last closes the step
        if len(self._committed) < len(self.units):
            return totals
        everything = [self._committed[unit] for unit in range(len(self.units))]
        if self.corrector:
            with self.comm.stage("mask"):
                self.corrector.retain([result.delivered for result in everything])
        self.plan.commit()
        self._close(everything, measured)
        return totals

    def refuse(self) -> None:
        """Undo all that is not committed: state is as before; memory lent by gradients becomes zero."""
        # units that are committed have no open pieces, so this leaves them alone
        for residual in self.residuals:
            residual.restore()
        if self.corrector:
            self.corrector.restore()
        self.overflows = False
        for part, state in zip([*self.selectors, *self.collectives], self._settled, strict=True):
            part.state = state
        committed = dict(self._committed)
        self.open()
        self._committed = committed

    def regroup(self, position: Position | None = None) -> None:
        """Go on with other ranks, of which the communicator tells already; for ranks that come and go.

        This is the whole seam of ``elastic``, for a reducer that is ``changing``; nobody else calls it.
        The accumulated gradients of the open step are exchanged again.  If the others are at another
        ``position``, the open step is closed here and its gradients stay in the residuals, except those
        that were undone (``Residual.restore``).

        Collectives forget their states, on all ranks: boundaries and global thresholds are those of the
        former ranks.  Selectors, which are local, go on.
        """
        assert self._changing, "Reducer(..., changing=True)"
        if position is not None:
            for residual in self.residuals:
                residual.keep()
            self.resume(position.step, position.skipped)
            self.plan.take(position.shares)
            self.comm.ledger.begin_step(self.step)
        fresh = [self.algorithm.for_unit(unit)[1].state for unit in self.units]
        states = [*self._settled[: len(self.units)], *fresh]
        for part, state in zip([*self.selectors, *self.collectives], states, strict=True):
            part.state = state
        self.open()

    def take_notice(self) -> str:
        """Return what the user is to be told, once."""
        notice, self.notice = self.notice, ""
        return notice

    def fail(self) -> None:
        """Tell the consensus, if others take part in it, that the exchange has failed here."""
        # shards and stages of this replica have exchanges of their own, which may have gone well: without
        # a word they would wait for this rank's vote until their deadline
        tell = getattr(self.consensus, "fail", None)
        if tell is not None:
            tell(self.step)

    def skip(self) -> None:
        """Refuse all that is not committed; go on to the next step, unless a part of this one is."""
        self.refuse()
        self.skipped += 1
        if not self._committed:
            self._close([])

    async def reduce(
        self,
        gradients: Sequence[Tensor],
        weights: Sequence[Tensor] = (),
        units: Sequence[int] | None = None,
    ) -> list[Vector]:
        """Do a whole step, or the part of it that belongs to some units.

        Each unit's average overwrites its flat gradient.  Weight decay needs the weights.
        """
        chosen = range(len(self.units)) if units is None else units
        if self.corrector and self.corrector.waits:
            self.corrector.measure(gradients)
        for place, unit in enumerate(chosen):
            self.accumulate(unit, 0, gradients[place], weights[place] if weights else None)
        averages = await self.exchange_all(units)
        for average, gradient in zip(averages, gradients, strict=True):
            average.write_to_(gradient)
        return averages

    async def exchange_all(self, units: Sequence[int] | None = None) -> list[Vector]:
        """Exchange and commit the units, whose gradients are accumulated; return their averages."""
        programs = [
            self.exchange(unit) for unit in (range(len(self.units)) if units is None else units)
        ]
        try:
            await together([*programs, self.share()] if units is None else programs)
        except BaseException:
            self.fail()
            raise
        return self.commit(units)

    def _close(self, reduced: Sequence[Reduced], measured: Measured | None = None) -> None:
        self.lost = [result.lost for result in reduced if result.lost is not None]
        if self.monitor:
            kept = [residual.value for residual in self.residuals]
            self.monitor.record(self.step, reduced, kept, self.plan.quotas, measured)
        if reduced:
            self._watch()
        self.step += 1
        self.comm.ledger.begin_step(self.step)
        self.open()

    def _watch(self) -> None:
        """Notice once that residuals grow, by the thresholds that selectors have at hand."""
        # The norm of a residual over the gradient's tells nothing: 5 to 900 in trainings that go well,
        # a constant 20 in one that diverges (docs/design-notes.md).  The threshold bounds all that waits
        # and costs no pass, and no wait for a GPU.
        octaves = []
        for unit, plan in zip(self.units, self.plan.units, strict=True):
            key = None if plan.k >= unit.size else plan.selector.threshold_key
            if key is not None and key > 1:  # 1: fewer entries than k are not zero
                _, octave = kernels.key_range(torch.promote_types(unit.dtype, torch.float32))
                octaves.append(key / octave)
        if self.growth is None or not octaves or not self.plan.regular:
            return
        mean = sum(octaves) / len(octaves) - math.log2(self.scale)  # without a GradScaler's
        if not self.growth.observe(mean):
            return
        density, self.growth = self.plan.density, None
        cure = f"density={min(1.0, 10 * density):.2g}"
        if not (self.correction and self.correction.momentum):
            cure += ", or where there is momentum correction=sparsync.Correction(momentum=...)"
        self.notice = (
            f"{self.place}: what waits to be exchanged has grown fourfold within "
            f"{8 / density:,.0f} steps: it arrives too late for this learning rate, and training may "
            f"diverge. Give attach {cure}, or lower the rate"
        )
