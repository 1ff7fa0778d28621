"""The life of a gradient, from ``accumulate`` to ``commit``.

::

    gradient --accumulate--> accumulated --select--> selected --exchange--> total --apply--> average
                 ^                                      |   (encode, move, merge, choose, decode)
                 |                                      v
              residual <------------retain---------- delivered

The conservation law, in every step:  sum over ranks(accumulated) == total + sum over ranks(residual).

If updates are exchanged, an update takes the place of the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, final

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.algorithm import Algorithm
from sparsync.collectives import Reduced
from sparsync.errors import require
from sparsync.feedback.correction import Correction, Corrector
from sparsync.feedback.residual import Growth, Residual, Runs
from sparsync.feedback.schedule import Warmup
from sparsync.feedback.shares import SharesState
from sparsync.feedback.step import Consensus, Plan, Proposal, Use, channel_of
from sparsync.monitoring import Measured, Monitor, Sink
from sparsync.reduction import SUM
from sparsync.sparse import DenseVector, Vector
from sparsync.transports.communicator import Communicator
from sparsync.transports.driver import together
from sparsync.units import Unit

__all__ = ["Position", "Reducer"]


class Position(NamedTuple):
    """The progress of a reducer, equal on all ranks that exchange with each other."""

    step: int  # the open step
    skipped: int  # number of steps refused because of NaN or Inf
    shares: SharesState


@final
class Reducer:
    """Averages the gradients of all units over the ranks of a communicator, step by step.

    In every step, call ``accumulate`` with every gradient and ``exchange`` for every unit, then
    ``commit`` or ``refuse``.

    ``xi_period`` is the number of steps between measurements of Assumption 1's xi (default: never).
    ``consensus`` decides on a step together with ranks that hold other parts of the replica, and ``sink``
    receives the numbers of each step.  With ``changing``, ranks may join and leave; see ``regroup``.
    With ``on_host``, residuals that are read in runs live in host memory.
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
        self.skipped = 0  # number of steps refused because of NaN or Inf
        self.scale = 1.0  # the factor on gradients, e.g. of a GradScaler; see ``rescale_``
        self.overflows = False  # see ``overflow``
        self.corrector = Corrector(correction, units, comm.world_size) if correction else None
        parts = [algorithm.for_unit(unit) for unit in units]
        self.selectors = [selector for selector, _ in parts]
        self.collectives = [collective for _, collective in parts]
        for collective in self.collectives:
            require(
                collective.operation is SUM,
                f"{algorithm.name} reduces with '{collective.operation.name}', but training needs sums; "
                "omit op",
            )
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
        # watches for growing residuals; None once growth has been reported
        self.growth = Growth(math.ceil(1 / density)) if density else None
        self.notice = ""  # a message for the user, to be shown once
        self.reduced: dict[int, Reduced] = {}  # results of the open step, by unit
        self._later: dict[int, DenseVector] = {}  # accumulated gradients computed in runs, by unit
        # by unit; the commit resets velocities at those of these entries that are delivered
        self._selected: dict[int, Vector] = {}
        # committed results of the open step, by unit; None for a result from before a loaded state
        self._committed: dict[int, Reduced | None] = {}
        self.lost: list[Vector] = []  # rounding errors of the last step that no rank keeps
        self.open()

    def open(self) -> None:
        """Plan the open step, and remember the current state, to which ``refuse`` would return."""
        self.reduced.clear()
        self._later.clear()
        self._committed.clear()
        # references serve as a snapshot, because states are frozen objects that are replaced as a whole
        self._settled = [part.state for part in (*self.selectors, *self.collectives)]
        self.plan.open(self.step, zip(self.selectors, self.collectives, strict=True))

    @property
    def place(self) -> str:
        """The open step as error messages name it: the exchange, and the local step if it differs."""
        return self.comm.ledger.place(self.step)

    def channel(self, use: int | Use) -> Communicator:
        """Return the channel of a unit, or of one of the purposes in ``Use``."""
        return channel_of(self.comm, use)

    def move_to(self, comm: Communicator) -> None:
        """Use this communicator of the same ranks from now on, e.g. in a new simulation."""
        self.comm = comm

    @property
    def committed(self) -> list[int]:
        """The units of the open step that are committed, because their fragments were exchanged."""
        return sorted(self._committed)

    def resume_committed(self, units: Iterable[int]) -> None:
        """Continue a loaded step in which these units are committed already."""
        self._committed = dict.fromkeys(units)

    def resume(self, step: int, skipped: int) -> None:
        """Continue with these counts, e.g. from a saved state; call ``open`` next to plan the step."""
        self.step, self.skipped = step, skipped

    def set_scale(self, scale: float) -> None:
        """Record the factor on gradients, without rescaling stored values."""
        self.scale = scale

    def overflow(self) -> None:
        """Treat the open step's gradients as Inf, which reaches every total, so all ranks refuse it."""
        self.overflows = True

    def accumulate(
        self, unit: int, start: int, gradient: Tensor, weights: Tensor | None = None
    ) -> None:
        """``accumulated = residual + gradient``, for one run of elements, corrected if configured.

        Until the step ends, the gradient's memory (1-D, contiguous) holds the old residual, to undo the
        step.  If ``corrector.waits``, call its ``measure`` with all gradients first.  Every element of a
        unit must be accumulated exactly once before the unit is exchanged.
        """
        # The order matters.  Gradients are corrected before they are accumulated (Deep Gradient
        # Compression, section 3), because momentum applied to averages is wrong for delayed entries.  xi
        # is sampled before ``residual.accumulate`` swaps the old residual into the gradient's memory.
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
        """Return whether a unit's gradient is read run by run, so that it need not be stored."""
        collective = self.plan.units[unit].collective
        return collective.by_runs and not (self.corrector or self.monitor or self.overflows)

    def accumulate_later(self, unit: int, gradient: Runs) -> None:
        """Accumulate the runs of a gradient only when they are read."""
        self._later[unit] = self.residuals[unit].accumulate_later(gradient)

    async def exchange(self, unit: int) -> None:
        """Select entries, then sum over ranks; the result is kept until the commit."""
        # Everything before the first ``await`` runs when the coroutine starts. ``share`` starts
        # after all exchanges have started, so all units are selected by then.
        plan = self.plan.units[unit]
        with self.exchanging():
            with self.comm.stage("select"):
                selected = self._select(unit)
            if self.corrector:
                self._selected[unit] = selected
            with self.comm.stage("communicate"):
                reducing = plan.collective.reduce(self.channel(unit), selected, plan.k, self.step)
                self.reduced[unit] = await reducing

    def exchanging(self) -> AbstractContextManager[None]:
        """Refuse to exchange after an exchange was interrupted, unless ranks may join and leave."""
        # ranks that join and leave abandon a step together, and invalidate its messages
        return nullcontext() if self._changing else self.comm.exchange()

    def _select(self, unit: int) -> Vector:
        """Select entries of a unit, and free the collected entries before anything is exchanged."""
        if unit in self._later:
            return self._later.pop(unit)
        residual, plan = self.residuals[unit], self.plan.units[unit]
        collected = residual.collected(*plan.wanted) if plan.wanted else None
        selected = plan.selector.select(residual.accumulated, plan.k, self.step, collected)
        self.plan.count(unit, residual, selected)  # also reads the collected entries
        residual.forget_collected()
        if self.monitor:
            self.monitor.selected[unit] = selected
        return selected

    async def share(self) -> None:
        """Sum the numbers for xi and agree on the next shares of k, once all units are selected."""
        with self.exchanging():
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
        """Write these units' residuals and return their averages; the last commit closes the step.

        ``prepare`` is called once the step is certain to be applied, before anything changes; it may
        raise.  If a total contains NaN or Inf, nothing is changed and NonFiniteGradientError is raised
        (then call ``refuse``).  With ``propagate_nonfinite``, the step is skipped instead, and NaN is
        returned for every element.
        """
        # Everything up to ``prepare`` may fail, because nothing has changed yet, and the step can still
        # be refused.  The code after ``prepare`` waits for no other rank.  NaN and Inf are always
        # selected, and totals are bit-identical, so ranks with the same totals make the same decision
        # without a message.
        chosen = range(len(self.units)) if units is None else units
        reduced = {unit: self.reduced[unit] for unit in chosen}
        totals = [result.total for result in reduced.values()]
        parts = [self.units[unit] for unit in chosen]
        proposal = Proposal(self.comm.rank, self.step, self.place, parts, totals)
        if broken := self.consensus(proposal):
            if not propagate_nonfinite:
                raise proposal.refusal(broken)
            self.skip()
            # All gradients become NaN, not only the broken one.  Otherwise, if there are several
            # optimizers, one with finite gradients would apply mass that restored residuals still hold.
            return [DenseVector(torch.full_like(r.accumulated, torch.nan)) for r in self.residuals]
        if prepare is not None:
            prepare()
        # xi is measured before totals are divided, because it is defined on sums
        probe = self.monitor.xi if self.monitor else None
        measured = probe.measure(self.step, totals, self.plan.quotas) if probe else None
        for unit, result in reduced.items():
            if self.comm.world_size > 1 and self.algorithm.average:
                # dividing in place is safe: ``delivered`` either shares no memory with the total, or
                # delivers everything, and is not read
                result.total.divide_(self.comm.world_size)
            with self.comm.stage("mask"):
                self.residuals[unit].retain(result.delivered)  # residual = accumulated - delivered
            for part in (unit, len(self.units) + unit):
                self._settled[part] = (*self.selectors, *self.collectives)[part].state
        self._committed |= reduced
        # if updates are exchanged, fragments are committed one by one; the last fragment closes the step
        if len(self._committed) < len(self.units):
            return totals
        # Results are listed in the order of units.  If a state was loaded in the middle of the step,
        # earlier results are unknown (None).  Only a corrector would need them, and fragments have none.
        everything = [result for _, result in sorted(self._committed.items()) if result is not None]
        if self.corrector:
            with self.comm.stage("mask"):
                selected = [vector for _, vector in sorted(self._selected.items())]
                self.corrector.retain(selected, [result.delivered for result in everything])
            self._selected.clear()
        self.plan.commit()
        self._close(everything, measured)
        return totals

    def refuse(self) -> None:
        """Undo everything that is not committed: restore the state, and zero the gradients' memory."""
        # committed units have no pending gradients, so ``restore`` does not change them
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
        """Continue after ranks have joined or left the communicator.

        Only ``elastic`` calls this, on a reducer that is ``changing``.  The accumulated gradients of
        the open step are exchanged again.  If this rank's peers are at a different ``position``, this
        rank closes the open step.  Its gradients then stay in the residuals, unless they were undone
        (``Residual.restore``).

        Collectives are reset on all ranks, because boundaries and global thresholds depend on the set of
        ranks.  Selectors are local and keep their states.
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
        """Return the pending message for the user, or "", and clear it."""
        notice, self.notice = self.notice, ""
        return notice

    def fail(self) -> None:
        """Tell the other ranks of the consensus, if any, that the exchange has failed on this rank."""
        # The ranks with other shards or stages of this replica have separate exchanges, which may have
        # succeeded.  Without this call, these ranks would wait for this rank's vote until their deadline.
        tell = getattr(self.consensus, "fail", None)
        if tell is not None:
            tell(self.step)

    def skip(self) -> None:
        """Refuse all units that are not committed; if none is committed, go on to the next step."""
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
        """Run a whole step, or only some units of a step.

        Each unit's flat gradient is overwritten with its average.  ``weights`` are needed for weight
        decay.
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
        """Exchange and commit units whose gradients are accumulated; return their averages."""
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
        """Prepare a warning for the user, once, if thresholds show that residuals grow too fast."""
        # The ratio of residual norm to gradient norm is no indicator: it is 5 to 900 in healthy
        # runs, and a constant 20 in a diverging run (docs/design-notes.md).  The threshold bounds
        # all entries in the residual.  Selectors know it already, so it costs neither a pass nor a wait
        # for a GPU.
        octaves = []
        for unit, plan in zip(self.units, self.plan.units, strict=True):
            key = None if plan.k >= unit.size else plan.selector.threshold_key
            if key is not None and key > 1:  # 1 means that fewer than k entries are nonzero
                _, octave = kernels.key_range(torch.promote_types(unit.dtype, torch.float32))
                octaves.append(key / octave)
        if self.growth is None or not octaves or not self.plan.regular:
            return
        mean = sum(octaves) / len(octaves) - math.log2(self.scale)  # relative to unscaled gradients
        if not self.growth.observe(mean):
            return
        density, self.growth = self.plan.density, None
        cure = f"density={min(1.0, 10 * density):.2g}"
        if not (self.correction and self.correction.momentum):
            cure += ", or, if there is momentum, correction=sparsync.Correction(momentum=...)"
        self.notice = (
            f"{self.place}: the residual has grown fourfold within "
            f"{8 / density:,.0f} steps: its entries arrive too late for this learning rate, and "
            f"training may diverge. Give attach {cure}, or lower the rate"
        )
