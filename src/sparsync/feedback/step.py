"""One step of a reducer: its plan, the channels of its messages, and the decision to apply it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, final, get_args

import torch

from sparsync.collectives import Changing, Collective, Dense
from sparsync.errors import NonFiniteGradientError
from sparsync.feedback.residual import Residual
from sparsync.feedback.schedule import Warmup
from sparsync.feedback.shares import SharesState, Sharing
from sparsync.selection import Everything, Selector
from sparsync.sparse import SparseVector, Vector
from sparsync.transports.communicator import Communicator
from sparsync.units import Unit

__all__ = ["Consensus", "Plan", "Proposal", "UnitPlan", "Use", "channel_of"]

Use = Literal["shares", "xi", "weights", "used", "retry", "drift", "vote", "roll", "contributions"]


def channel_of(comm: Communicator, units: int, use: int | Use) -> Communicator:
    """Return the channel of a unit, of which there are ``units``, or of another exchange."""
    # Messages of one channel meet on all ranks, so the order of ``Use`` is part of the protocol: it must
    # not depend on what a rank makes use of.
    return comm.channel(use if isinstance(use, int) else units + get_args(Use).index(use))


# ---- the plan --------------------------------------------------------------------------------------


class UnitPlan(NamedTuple):
    """How one unit is exchanged."""

    k: int  # number of entries to select
    selector: Selector
    collective: Collective
    # keys from which entries are to be collected while they are accumulated, and how many at most
    wanted: tuple[int, int] | None  # for the selector: its ``collect_from``
    collect: tuple[int, int] | None  # in fact: for the selector, and for the shares to count


@final
class Plan:
    """Decides for every step each unit's k, selector, collective, and which entries are collected.

    If ``shared``, the units divide k by where the largest entries lie, except in steps of a warm-up that
    have another density.  Dense steps sum in the memory of the accumulated gradient if it ``overwrites``.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        density: float,
        warmup: Warmup | None,
        *,
        shared: bool,
        overwrites: bool = True,
    ) -> None:
        self.density, self.warmup, self._all = density, warmup, units
        self.shares = self._next = SharesState(self._entries())  # of regular steps
        self._sharing = Sharing.among(units) if shared and len(units) > 1 else None
        self._dividing: Sharing | None = None  # in the open step
        # The accumulated gradient, all of which is delivered, is written over: so no second vector of n
        # elements is needed, unless the same gradient may have to be exchanged again.
        self.dense = Dense.overwriting() if overwrites else Dense()
        self.regular = False  # the open step has the density of regular steps
        self.units: list[UnitPlan] = []  # in the open step

    @property
    def quotas(self) -> tuple[int, ...]:
        """K of every unit in the open step."""
        return tuple(unit.k for unit in self.units)

    def open(self, step: int, parts: Iterable[tuple[Selector, Collective]]) -> None:
        """Plan a step, once; the cost grows with the units, not with the parameters."""
        planned = self.warmup.density(step, self.density) if self.warmup else self.density
        quotas, sharing = self.shares.quotas, self._sharing
        self.regular = planned == self.density
        if planned is not None and not self.regular:
            quotas, sharing = tuple(unit.entries(planned) for unit in self._all), None
        shared = sharing.collect_from(self.shares) if sharing else None
        self._next, self._dividing, self.units = self.shares, sharing, []
        if self._sharing:
            self._sharing.clear()
        for i, (unit, k, (selector, collective)) in enumerate(
            zip(self._all, quotas, parts, strict=True)
        ):
            # A dense step leaves the unit's own selector and collective alone: their states, such as
            # thresholds and boundaries, wait for the next sparse one.
            if planned is None or (unit.dense and not isinstance(collective, Changing)):
                selector, collective = Everything(), self.dense
            elif collective.whole:
                selector = Everything()
            wanted = selector.collect_from(k, step, torch.promote_types(unit.dtype, torch.float32))
            counted = shared if sharing and i in sharing.members else None
            collect = wanted or counted
            if wanted and counted:
                # one pass serves both: from the lower key on, with the larger room
                collect = min(wanted[0], counted[0]), max(wanted[1], counted[1])
            self.units.append(UnitPlan(k, selector, collective, wanted, collect))

    def count(self, unit: int, residual: Residual, selected: Vector) -> None:
        """Count the entries that a unit would have selected, before they are freed; for the shares."""
        if self._dividing and isinstance(selected, SparseVector):
            found = residual.collected() if self.units[unit].collect else None
            self._dividing.count(self.shares, unit, residual.accumulated, found, selected)

    async def agree(self, channel: Communicator) -> None:
        """Agree on the next step's shares of k, once all units were counted."""
        # kept apart until the commit: a refused step is planned again with the shares that it had
        if self._dividing:
            self._next = await self._dividing.agree(self.shares, channel, self._entries())

    def commit(self) -> None:
        """Go on to the next step's shares."""
        self.shares = self._next

    def take(self, shares: SharesState) -> None:
        """Take over shares, as those of other ranks, between ``commit`` and ``open``."""
        self.shares = shares

    def _entries(self) -> tuple[int, ...]:
        """Return k of every unit, by the density alone."""
        return tuple(unit.entries(self.density) for unit in self._all)


# ---- the decision ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Proposal:
    """A step that this rank could apply.

    Ranks that exchange with each other see the same totals, and NaN and Inf are always selected, so they
    decide alike without a message.  Ranks that hold other parts of the same replica (shards, pipeline
    stages) see other totals: a ``Consensus`` asks them before anything is changed.
    """

    rank: int  # this one, among those that exchange with each other
    step: int
    place: str  # the step in the words of errors
    units: Sequence[Unit]
    totals: Sequence[Vector]  # of every unit, the same on all those ranks

    def broken(self) -> str | None:
        """Return the name of the first parameter whose total holds NaN or Inf; None: all are finite."""
        for unit, total in zip(self.units, self.totals, strict=True):
            at = total.first_nonfinite(unit.dtype)
            if at is not None:
                return unit.name_at(at)
        return None

    def refusal(self, broken: str) -> NonFiniteGradientError:
        """Return the error for a step that no rank applies."""
        return NonFiniteGradientError(
            f"{self.place}: the gradient of parameter '{broken}' is NaN or Inf on some rank "
            "(float16: > 65504); no rank applied it and all residuals are as before. Lower the "
            "learning rate, clip, or pass nonfinite='skip' (with a GradScaler: scaler=)"
        )


# Returns the name of a parameter that is not finite on some rank, or None to apply the step.  Where each
# rank holds the whole model, ``Proposal.broken`` is enough.
Consensus = Callable[[Proposal], str | None]
