"""Plan a step: which units are selected from, how many entries of each, and what to collect for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sparsync.collectives import Collective, Dense
from sparsync.feedback.schedule import Warmup
from sparsync.feedback.shares import SharesState, Sharing
from sparsync.selection import Everything, Selector
from sparsync.units import Unit

__all__ = ["StepPlan", "UnitPlan", "entries_at", "plan_step"]


class UnitPlan(NamedTuple):
    """How one unit is exchanged.

    Attributes:
        k: number of entries to select.
        selector: selects them.
        collective: sums them.
        wanted: which entries the selector wants to be collected; see ``Selector.collect_from``.
        collect: which are collected while accumulating: those, and what the shares count.
    """

    k: int
    selector: Selector
    collective: Collective
    wanted: tuple[int, int] | None
    collect: tuple[int, int] | None


class StepPlan(NamedTuple):
    """How a step is exchanged.

    Attributes:
        units: the plan of every unit.
        sharing: of the units that divide the global k; None where each has its own.
    """

    units: list[UnitPlan]
    sharing: Sharing | None


def entries_at(density: float, units: Sequence[Unit]) -> tuple[int, ...]:
    """Return k of every unit, by a density alone."""
    return tuple(unit.entries(density) for unit in units)


def plan_step(
    step: int,
    units: Sequence[Unit],
    parts: Sequence[tuple[Selector, Collective]],
    density: float,
    warmup: Warmup,
    shares: SharesState,
    sharing: Sharing | None,
) -> StepPlan:
    """Plan a step, once: what it costs does not grow with the number of parameters.

    Args:
        step: its number.
        units: all units.
        parts: the selector and the collective of every unit.
        density: of regular steps.
        warmup: the first steps; those of another density divide nothing.
        shares: of regular steps.
        sharing: of the units that divide what they have together.
    """
    planned = warmup.density(step, density) if step < warmup.steps else density
    quotas = shares.quotas
    if planned is not None and planned != density:
        quotas, sharing = entries_at(planned, units), None
    shared = sharing.collect_from(shares) if sharing else None
    plans = []
    for i, (unit, k, (selector, collective)) in enumerate(zip(units, quotas, parts, strict=True)):
        if planned is None or unit.dense:
            selector, collective = Everything(), Dense()
        elif collective.whole:
            selector = Everything()
        wanted = selector.collect_from(k, step, torch.promote_types(unit.dtype, torch.float32))
        counted = shared if sharing and i in sharing.members else None
        collect = wanted or counted
        if wanted and counted:
            collect = min(wanted[0], counted[0]), max(wanted[1], counted[1])
        plans.append(UnitPlan(k, selector, collective, wanted, collect))
    return StepPlan(plans, sharing)
