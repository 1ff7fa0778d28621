"""THE STORY: the life of a gradient, from ``accumulate`` to ``commit``.

::

    gradient --accumulate--> accumulated --select--> selected --exchange--> total --apply--> average
                 ^                                      |   (encode, move, merge, choose, decode)
                 |                                      v
              residual <------------retain---------- delivered

The law, on every step:  sum over ranks(accumulated) == total + sum over ranks(residual).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from sparsync.collectives import Reduced
from sparsync.feedback.channels import Channels
from sparsync.feedback.commit import Consensus, Proposal, decide_alone, nonfinite_error
from sparsync.feedback.correction import Clipper, Correction, Velocity
from sparsync.feedback.plan import entries_at, plan_step
from sparsync.feedback.residual import Residual
from sparsync.feedback.schedule import AdaptiveDensity, Warmup
from sparsync.feedback.shares import SharesState, Sharing, resized
from sparsync.monitoring import Monitor, Sink
from sparsync.presets import Algorithm
from sparsync.sparse import DenseVector, Vector
from sparsync.transports.communicator import Communicator
from sparsync.transports.driver import together
from sparsync.units import Unit

__all__ = ["Reducer"]


@final
class Reducer:
    """Averages the gradients of all units over the ranks of a communicator, step by step.

    Args:
        comm: the group.
        units: what is selected and exchanged together; equal on all ranks.
        algorithm: which selector and which collective.
        density: k / n of every unit, in (0, 1], or a rule that adapts it to the progress of training.
        warmup: the first steps, in which more is exchanged; default none.
        correction: momentum, decay and clipping, done before gradients are accumulated.
        xi_period: steps between measurements of Assumption 1's xi; default: never, or as needed.
        consensus: asks who else must agree to a step; default: nobody.
        sink: takes the numbers of every step; default: nobody.

    A step is: ``accumulate`` every gradient, ``exchange`` every unit, then ``commit`` or ``refuse``.
    """

    def __init__(
        self,
        comm: Communicator,
        units: Sequence[Unit],
        algorithm: Algorithm,
        density: float | AdaptiveDensity,
        warmup: Warmup | None = None,
        correction: Correction | None = None,
        xi_period: int | None = None,
        consensus: Consensus = decide_alone,
        sink: Sink | None = None,
    ) -> None:
        self.comm, self.units, self.algorithm = comm, list(units), algorithm
        self.adaptive = density if isinstance(density, AdaptiveDensity) else None
        self.density = density.at_equal if isinstance(density, AdaptiveDensity) else density
        self.warmup, self.correction = warmup or Warmup(), correction or Correction()
        self.step = 0  # 0-based number of the open step
        self.skipped = 0  # steps that were refused because of NaN or Inf
        self.scale = 1.0  # by which gradients are multiplied, as by a GradScaler: see ``rescale_``
        self.overflows = False  # gradients of the open step count as Inf: all ranks will refuse it
        self.residuals = [Residual(u.size, u.dtype, u.device) for u in units]
        self.velocities = [
            Velocity(self.correction, u.size, r.accumulated.dtype, u.device)
            for u, r in zip(units, self.residuals, strict=True)
        ]
        self.clipper = Clipper(self.correction, comm.world_size)
        parts = [algorithm.for_unit(unit) for unit in units]
        self.selectors = [selector for selector, _ in parts]
        self.collectives = [collective for _, collective in parts]
        self.shares = SharesState(entries_at(self.density, self.units))
        several = algorithm.shared and len(self.units) > 1
        self.sharing = Sharing.among(self.units) if several else None
        adapts = self.adaptive is not None and xi_period is None
        self.xi_period = self.adaptive.period if self.adaptive and adapts else xi_period
        self.monitor: Monitor | None = None
        if sink is not None or self.xi_period is not None:
            start = 0 if self.warmup.densities else self.warmup.steps
            self.monitor = Monitor(comm, self.units, sink, self.xi_period, start)
        self.reduced: dict[int, Reduced] = {}  # what the open step has exchanged, by unit
        self.lost: list[Vector] = []  # in the last step: rounded away, and kept by nobody
        self._consensus = consensus
        self.open()

    def open(self) -> None:
        """Plan the open step from the present state, which is the one that ``refuse`` returns to."""
        self._settled = [part.state for part in (*self.selectors, *self.collectives)]
        self._next_shares = self.shares
        parts = list(zip(self.selectors, self.collectives, strict=True))
        self._plan = plan_step(
            self.step, self.units, parts, self.density, self.warmup, self.shares, self.sharing
        )

    @property
    def quotas(self) -> tuple[int, ...]:
        """K of every unit in the open step."""
        return tuple(unit.k for unit in self._plan.units)

    @property
    def channels(self) -> Channels:
        """The channels of ``comm``, which virtual ranks replace from step to step."""
        return Channels(self.comm, len(self.units))

    def accumulate(
        self, unit: int, start: int, gradient: Tensor, weights: Tensor | None = None
    ) -> None:
        """``accumulated = residual + gradient``, for one run of elements, corrected if asked for.

        The gradient's memory (1-D, contiguous) is borrowed until the step ends: what undoes the step
        lies there.  With ``clipper.waits``, ``clipper.measure`` all gradients before.
        """
        with self.comm.stage("accumulate"):
            residual = self.residuals[unit]
            gradient = gradient.to(residual.accumulated.dtype)
            if self.overflows:
                gradient.fill_(torch.inf)
            self.clipper.clip_(gradient)
            self.velocities[unit].correct_(start, gradient, weights)
            if self.monitor:
                self.monitor.xi.accumulate(self.step, unit, start, gradient)
            residual.accumulate(start, gradient, *self._plan.units[unit].collect or ())

    async def exchange(self, unit: int) -> None:
        """Select, then sum over ranks; the result waits for the commit."""
        residual, plan, sharing = self.residuals[unit], self._plan.units[unit], self._plan.sharing
        with self.comm.stage("select"):
            collected = residual.collected(*plan.wanted) if plan.wanted else None
            selected = plan.selector.select(residual.accumulated, plan.k, self.step, collected)
            if self.monitor:
                self.monitor.selected[unit] = selected
            if sharing and not isinstance(selected, DenseVector):
                found = residual.collected() if plan.collect else None
                sharing.count(self.shares, unit, residual.accumulated, found, selected)
        channel = self.channels.unit(unit)
        with self.comm.stage("communicate"):
            self.reduced[unit] = await plan.collective.reduce(channel, selected, plan.k, self.step)

    async def share(self) -> None:
        """Sum what xi needs; agree on the next step's shares of k: once all units were selected from."""
        if self.monitor:
            await self.monitor.xi.share(
                self.step, self.channels.xi, [r.accumulated for r in self.residuals]
            )
        if self._plan.sharing:
            channel, entries = self.channels.shares, entries_at(self.density, self.units)
            self._next_shares = await self._plan.sharing.agree(self.shares, channel, entries)

    def commit(
        self, *, propagate_nonfinite: bool = False, prepare: Callable[[], None] | None = None
    ) -> list[Vector]:
        """Close the step: write every residual, return every unit's average.

        Args:
            propagate_nonfinite: return NaN everywhere, rather than raise, if a total is not finite.
            prepare: called when the step is to be applied and nothing has been changed; may raise.

        Raises:
            NonFiniteGradientError: a total holds NaN or Inf.  Nothing was changed; call ``refuse``.
        """
        reduced = [self.reduced[unit] for unit in range(len(self.units))]
        totals = [result.total for result in reduced]
        broken = self._consensus(Proposal.of(self.comm.rank, self.step, self.units, totals))
        if broken and not propagate_nonfinite:
            raise nonfinite_error(self.step, broken)
        if broken:
            # all become NaN: a gradient that stayed finite could be applied, and is kept as well
            wanted = [torch.full_like(r.accumulated, torch.nan) for r in self.residuals]
            self.skip()
            return [DenseVector(values) for values in wanted]
        if prepare is not None:
            prepare()
        probe = self.monitor.xi if self.monitor else None
        measured = probe.measure(self.step, totals, self.quotas) if probe else None
        for unit, result in enumerate(reduced):
            if self.comm.world_size > 1 and self.algorithm.average:
                result.total.values.div_(self.comm.world_size)  # not needed any more
            self.residuals[unit].retain(result.delivered)  # residual = accumulated - delivered
            self.velocities[unit].retain(result.delivered)
        self.clipper.commit()
        self.lost = [result.lost for result in reduced if result.lost is not None]
        if self.monitor:
            kept = [residual.value for residual in self.residuals]
            self.monitor.record(self.step, reduced, kept, self.quotas, measured)
        self.shares = self._next_shares
        if self.adaptive and measured:
            self.density = self.adaptive.next(self.density, measured, self.comm.world_size)
            members = self.sharing.members if self.sharing else ()
            sizes = [unit.size for unit in self.units]
            self.shares = resized(self.shares, members, entries_at(self.density, self.units), sizes)
        self._close()
        return totals

    def refuse(self) -> None:
        """Undo the open step: residuals, thresholds and boundaries are as before it.

        The memory of the gradients that were accumulated becomes zero.
        """
        for residual in self.residuals:
            residual.restore()
        self.clipper.restore()
        self.overflows = False
        for part, state in zip([*self.selectors, *self.collectives], self._settled, strict=True):
            part.state = state
        self._forget()
        self.open()

    def skip(self) -> None:
        """Refuse the open step and go on to the next."""
        self.refuse()
        self.skipped += 1
        self.lost = []  # nothing was applied
        if self.monitor:
            self.monitor.record(self.step, [], [r.value for r in self.residuals], self.quotas)
        self._close()

    async def reduce(
        self, gradients: Sequence[Tensor], weights: Sequence[Tensor] = ()
    ) -> list[Vector]:
        """Do a whole step: one flat gradient per unit, overwritten by its average.

        Units are in flight together.  Weight decay needs the flat weights of every unit.
        Returns the averages, sparse where their totals are.
        """
        if self.clipper.waits:
            self.clipper.measure(gradients)
        for unit, gradient in enumerate(gradients):
            self.accumulate(unit, 0, gradient, weights[unit] if weights else None)
        exchanges = [self.exchange(unit) for unit in range(len(self.units))]
        await together([*exchanges, self.share()])
        averages = self.commit()
        for average, gradient in zip(averages, gradients, strict=True):
            average.write_to_(gradient)
        return averages

    def _forget(self) -> None:
        """Drop what the open step has exchanged and counted."""
        self.reduced.clear()
        if self.sharing:
            self.sharing.clear()

    def _close(self) -> None:
        self._forget()
        self.step += 1
        self.comm.ledger.begin_step(self.step)
        self.open()
