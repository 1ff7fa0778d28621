"""THE STORY: the life of a gradient, from ``accumulate`` to ``commit``.

::

    gradient --accumulate--> accumulated --select--> selected --exchange--> total --apply--> average
                 ^                                      |   (encode, move, merge, choose, decode)
                 |                                      v
              residual <------------retain---------- delivered

The law, on every step:  sum over ranks(accumulated) == total + sum over ranks(residual).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from sparsync.collectives.base import Collective, Reduced
from sparsync.correction import Clipper, Correction, Velocity
from sparsync.errors import NonFiniteGradientError
from sparsync.monitoring import Monitor, XiProbe
from sparsync.presets import Algorithm, dense
from sparsync.residual import Residual
from sparsync.selection import shares
from sparsync.selection.base import Selector, Watch, within
from sparsync.sparse import DenseVector, Vector
from sparsync.transports.base import Communicator
from sparsync.transports.flight import together
from sparsync.units import Unit
from sparsync.warmup import AdaptiveDensity, Warmup

__all__ = ["Reducer"]


@final
class Reducer:
    """Averages the gradients of all units over the ranks of a communicator, step by step.

    Args:
        comm: the group.
        units: what is selected and exchanged together; equal on all ranks.
        algorithm: which selector and which collective.
        density: k / n of every unit, in (0, 1], or what adapts it to the progress of training.
        warmup: the first steps, in which more is exchanged; default none.
        correction: momentum, decay and clipping, done before gradients are accumulated.
        xi_period: steps between measurements of Assumption 1's xi; default: never, or as needed.

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
    ) -> None:
        self.comm, self.units, self.algorithm = comm, list(units), algorithm
        self.adaptive = density if isinstance(density, AdaptiveDensity) else None
        self.density = density.at_equal if isinstance(density, AdaptiveDensity) else density
        self.warmup = warmup or Warmup()
        dense_steps = 0 if self.warmup.densities else self.warmup.steps
        period = self.adaptive.period if xi_period is None and self.adaptive else xi_period
        self.monitor = Monitor(XiProbe(period, self.units, start=dense_steps), comm)
        self.correction = correction or Correction()
        self.step = 0  # 0-based number of the open step
        self.scale = 1.0  # by which gradients are multiplied, as by a GradScaler: see ``rescale_``
        self.skipped = 0  # steps that were refused because of NaN or Inf
        self.verdict: Callable[[str | None], str | None] = lambda broken: broken  # of all shards
        self.residuals = [Residual(u.size, u.dtype, u.device) for u in units]
        self.velocities = [
            Velocity(self.correction, u.size, r.accumulated.dtype, u.device)
            for u, r in zip(units, self.residuals, strict=True)
        ]
        self.clipper = Clipper(self.correction, comm.world_size)
        self.lost: list[Vector] = []  # in the last step: rounded away, and kept by nobody
        self.shares = shares.SharesState(tuple(u.entries(self.density) for u in units))
        parts = [algorithm.for_unit(unit) for unit in units]
        self.selectors = [selector for selector, _ in parts]
        self.collectives = [collective for _, collective in parts]
        self._dense = dense()
        self.reduced: dict[int, Reduced] = {}  # what the open step has exchanged, by unit
        self._histograms: dict[int, Tensor] = {}
        self.settle()

    def accumulate(
        self, unit: int, start: int, gradient: Tensor, weights: Tensor | None = None
    ) -> None:
        """``accumulated = residual + gradient``, for one run of elements, corrected if asked for.

        The gradient's memory (1-D, contiguous) is borrowed until the step ends: what undoes the step
        lies there.  With ``clipper.waits``, ``clipper.measure`` all gradients before.
        """
        with self.comm.stage("mask"):
            residual = self.residuals[unit]
            gradient = gradient.to(residual.accumulated.dtype)
            self.clipper.clip_(gradient)
            self.velocities[unit].correct_(start, gradient, weights)
            self.monitor.accumulate(self.step, unit, start, gradient)
            residual.accumulate(start, gradient, self._watch(unit))

    async def exchange(self, unit: int) -> None:
        """Select, then sum over ranks; the result waits for the commit."""
        residual, k = self.residuals[unit], self.quotas[unit]
        selector, collective = self._parts(unit)
        with self.comm.stage("select"):
            candidates = residual.found(self._watch(unit))
            dtype = residual.accumulated.dtype
            found = within(candidates, selector.watch(k, self.step, dtype))
            selected = selector.select(residual.accumulated, k, self.step, found)
            self.monitor.selected[unit] = selected
            if unit in self._sharing and not isinstance(selected, DenseVector):
                self._histograms[unit] = shares.wishes(
                    self.shares, residual.accumulated, candidates, selected
                )
        channel = self.comm.channel(unit)
        with self.comm.stage("communicate"):
            self.reduced[unit] = await collective.reduce(channel, selected, k, self.step)

    async def share(self) -> None:
        """Sum what xi needs; agree on the next step's shares of k: once all units were selected from."""
        await self.monitor.share(self.step, [residual.accumulated for residual in self.residuals])
        sharing = self._sharing
        if not sharing or len(self._histograms) < len(sharing):
            return
        counts = torch.stack([self._histograms[unit] for unit in sharing])
        channel = self.comm.channel(len(self.units))
        everyone = await channel.allgather(counts.to(torch.int32), "shares")
        self._next_shares = shares.next_shares_of(
            self.shares,
            sharing,
            torch.stack(everyone).sum(0).tolist(),
            [unit.entries(self.density) for unit in self.units],
            [unit.size for unit in self.units],
            self.comm.world_size,
            self.residuals[sharing[0]].accumulated.dtype,
        )

    def commit(self, *, propagate_nonfinite: bool = False) -> list[Vector]:
        """Close the step: write every residual, return every unit's average.

        Totals are identical on all ranks, and NaN or Inf is always selected: so all ranks see the
        same totals and come to the same decision, without another message.

        Raises:
            NonFiniteGradientError: a total holds NaN or Inf.  Nothing was changed; call ``refuse``.
        """
        reduced = [self.reduced[unit] for unit in range(len(self.units))]
        broken = self.verdict(self._first_nonfinite([r.total for r in reduced]))
        if broken and not propagate_nonfinite:
            raise NonFiniteGradientError(
                f"step {self.step}: the gradient of parameter '{broken}' is NaN or Inf on some rank "
                "(float16: > 65504); no rank applied it and all residuals are as before. Lower the "
                "learning rate, clip, or pass nonfinite='skip' (with a GradScaler: scaler=)"
            )
        if broken:
            # all become NaN: a gradient that stayed finite could be applied, and is kept as well
            wanted = [torch.full_like(r.accumulated, torch.nan) for r in self.residuals]
            self.skip()
            return [DenseVector(values) for values in wanted]
        measured = self.monitor.measure(self.step, reduced, self.quotas)
        averages = [self._average_(result.total) for result in reduced]
        for unit, result in enumerate(reduced):
            self.residuals[unit].retain(result.delivered)  # residual = accumulated - delivered
            self.velocities[unit].retain(result.delivered)
        self.clipper.commit()
        self.lost = [result.lost for result in reduced if result.lost is not None]
        self.monitor.record(self.step, reduced, self.residuals, self.quotas, measured)
        self.shares = self._next_shares
        if self.adaptive and measured:
            self._resize(self.adaptive.next(self.density, measured, self.comm.world_size))
        self.settle()
        self._close_step()
        return averages

    def refuse(self) -> None:
        """Undo the open step: residuals, thresholds and boundaries are as before it.

        The memory of the gradients that were accumulated becomes zero.
        """
        for residual in self.residuals:
            residual.restore()
        self.clipper.restore()
        for part, state in zip([*self.selectors, *self.collectives], self._settled, strict=True):
            part.state = state
        self.reduced.clear()
        self._histograms.clear()
        self._next_shares = self.shares

    def skip(self) -> None:
        """Refuse the open step and go on to the next."""
        self.refuse()
        self.skipped += 1
        self.lost = []  # nothing was applied
        self.monitor.record(self.step, [], self.residuals, self.quotas)
        self._close_step()

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

    def _parts(self, unit: int) -> tuple[Selector, Collective]:
        """Return the selector and the collective of the open step."""
        if self.units[unit].dense or self._density is None:
            return self._dense.make_selector(), self._dense.make_collective()
        collective = self.collectives[unit]
        if collective.whole:
            return self._dense.make_selector(), collective
        return self.selectors[unit], collective

    def _watch(self, unit: int) -> Watch | None:
        """Return what to collect while accumulating: for the selector, and for the shares."""
        selector, _ = self._parts(unit)
        dtype = self.residuals[unit].accumulated.dtype
        mine = selector.watch(self.quotas[unit], self.step, dtype)
        if unit not in self._sharing:
            return mine
        common = shares.watch(self.shares, sum(self.quotas[u] for u in self._sharing), dtype)
        if mine is None or common is None:
            return mine or common
        return Watch(min(mine.key, common.key), max(mine.limit, common.limit))

    def _average_(self, total: Vector) -> Vector:
        """``average = total / world_size``, in place: the total is not needed any more."""
        if self.comm.world_size > 1 and self.algorithm.average:
            total.values.div_(self.comm.world_size)
        return total

    def _first_nonfinite(self, totals: Sequence[Vector]) -> str | None:
        """Return the name of the first parameter with a non-finite entry, None if all are finite."""
        for unit, total in zip(self.units, totals, strict=True):
            at = total.first_nonfinite(unit.dtype)
            if at is not None:
                return unit.name_at(at)
        return None

    @property
    def _density(self) -> float | None:
        """Density of the open step; None: dense."""
        return self.warmup.density(self.step, self.density)

    @property
    def quotas(self) -> tuple[int, ...]:
        """K of every unit in the open step."""
        if self._density in (None, self.density):
            return self.shares.quotas
        return tuple(unit.entries(self._density) for unit in self.units)

    @property
    def _sharing(self) -> Sequence[int]:
        """The units that divide the open step's global k; none while the warm-up has its own k."""
        return self._equals if self._density in (None, self.density) else []

    @functools.cached_property
    def _equals(self) -> Sequence[int]:
        """The units that divide the global k: several, of one dtype; a single one has all of it."""
        sparse = [i for i, unit in enumerate(self.units) if not unit.dense]
        dtypes = {self.residuals[i].accumulated.dtype for i in sparse}
        return sparse if self.algorithm.shared and len(sparse) > 1 == len(dtypes) else []

    def settle(self) -> None:
        """Make the present thresholds and boundaries those that ``refuse`` returns to."""
        self._settled = [part.state for part in (*self.selectors, *self.collectives)]
        self._next_shares = self.shares

    def _resize(self, density: float) -> None:
        """Set the density of the next steps, alike on all ranks."""
        self.density = density
        entries = [unit.entries(density) for unit in self.units]
        sizes = [unit.size for unit in self.units]
        self.shares = shares.resized(self.shares, self._equals, entries, sizes)

    def _close_step(self) -> None:
        self.reduced.clear()
        self._histograms.clear()
        self._next_shares = self.shares
        self.step += 1
        self.comm.ledger.begin_step(self.step)
