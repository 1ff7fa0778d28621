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


def channel_of(comm: Communicator, use: int | Use) -> Communicator:
    """Return the channel of a unit, or of one of the purposes in ``Use``."""
    # All ranks must number the channels alike, so the order of ``Use`` is part of the protocol. Units
    # come last, so that ranks whose units differ by mistake still use the same channel to compare their
    # set-ups.
    uses = get_args(Use)
    return comm.channel(len(uses) + use if isinstance(use, int) else uses.index(use))


# ---- the plan --------------------------------------------------------------------------------------


class UnitPlan(NamedTuple):
    """The plan for the exchange of one unit."""

    k: int  # number of entries to select
    selector: Selector
    collective: Collective
    # Entries are collected while they are accumulated.  Both fields hold the magnitude key from which
    # entries are collected, and a limit on their number.  ``wanted`` is the selector's need (its
    # ``collect_from``); ``collect`` also includes the entries to be counted for the shares.
    wanted: tuple[int, int] | None
    collect: tuple[int, int] | None


@final
class Plan:
    """Decides, for every step, each unit's k, selector and collective, and which entries to collect.

    If ``shared``, the units share the global k in proportion to their large entries, except in warm-up
    steps, whose density differs.  If ``overwrites``, dense steps sum in the memory of the accumulated
    gradient.
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
        self.shares = self._next = SharesState(self._entries())  # for regular steps
        self._sharing = Sharing.among(units) if shared and len(units) > 1 else None
        self._dividing: Sharing | None = None  # in the open step
        # A dense step delivers all of the accumulated gradient, so the total can overwrite it, which
        # saves a vector of n elements.  This is not possible if the same gradient may have to be
        # exchanged again.
        self.dense = Dense.overwriting() if overwrites else Dense()
        self.regular = False  # whether the open step has the density of regular steps
        self.units: list[UnitPlan] = []  # in the open step

    @property
    def quotas(self) -> tuple[int, ...]:
        """The k of every unit in the open step."""
        return tuple(unit.k for unit in self.units)

    def open(self, step: int, parts: Iterable[tuple[Selector, Collective]]) -> None:
        """Plan a step; the cost grows with the number of units, not of parameters."""
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
            # A dense step uses other objects than the unit's own selector and collective, whose states,
            # e.g. thresholds and boundaries, are needed in the next sparse step.
            if planned is None or (unit.dense and not isinstance(collective, Changing)):
                selector, collective = Everything(), self.dense
            elif collective.whole:
                selector = Everything()
            wanted = selector.collect_from(k, step, torch.promote_types(unit.dtype, torch.float32))
            counted = shared if sharing and i in sharing.members else None
            collect = wanted or counted
            if wanted and counted:
                # one pass serves selector and shares, with the lower key and the larger limit
                collect = min(wanted[0], counted[0]), max(wanted[1], counted[1])
            self.units.append(UnitPlan(k, selector, collective, wanted, collect))

    def count(self, unit: int, residual: Residual, selected: Vector) -> None:
        """Count the entries that a unit would like to select, for the shares, before they are freed."""
        if self._dividing and isinstance(selected, SparseVector):
            found = residual.collected() if self.units[unit].collect else None
            self._dividing.count(self.shares, unit, residual.accumulated, found, selected)

    async def agree(self, channel: Communicator) -> None:
        """Agree on the next step's shares of k, once all units have been counted."""
        # the new shares wait until the commit, because a refused step is planned again with the old ones
        if self._dividing:
            self._next = await self._dividing.agree(self.shares, channel, self._entries())

    def commit(self) -> None:
        """Adopt the shares of the next step."""
        self.shares = self._next

    def take(self, shares: SharesState) -> None:
        """Adopt shares, e.g. from a peer, between ``commit`` and ``open``."""
        self.shares = shares

    def _entries(self) -> tuple[int, ...]:
        """Return every unit's k, determined by the density alone."""
        return tuple(unit.entries(self.density) for unit in self._all)


# ---- the decision ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Proposal:
    """A step that this rank could apply, unless a total contains NaN or Inf.

    Ranks that exchange with each other see the same totals.  NaN and Inf are always selected, so these
    ranks make the same decision without a message.  Ranks that hold other parts of the same replica
    (shards, pipeline stages) see different totals.  A ``Consensus`` asks them before anything changes.
    """

    rank: int  # this rank's number among those that exchange with each other
    step: int
    place: str  # the step, worded for errors
    units: Sequence[Unit]
    totals: Sequence[Vector]  # by unit, the same on all of these ranks

    def broken(self) -> str | None:
        """Return the name of the first parameter whose total contains NaN or Inf, or None."""
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
            "learning rate, clip, raise density= if entries are selected, or pass nonfinite='skip' "
            "(with a GradScaler: scaler=)"
        )


# A consensus returns the name of a parameter that is not finite on some rank, or None if the step is to
# be applied.  If each rank holds the whole model, ``Proposal.broken`` suffices.
Consensus = Callable[[Proposal], str | None]
