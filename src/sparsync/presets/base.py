"""What a preset makes: ``Algorithm``, a point in the space (selector x collective)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sparsync.collectives import Collective
from sparsync.errors import ConfigurationError
from sparsync.selection import Selector

__all__ = ["Algorithm", "check_density"]


@dataclass(frozen=True)
class Algorithm:
    """How gradients are averaged.

    Attributes:
        name: for messages and tables.
        make_selector: builds one selector; called once per unit.
        make_collective: builds one collective; called once per unit.
        options: what a preset was told, for ranks to compare.
        average: divide the total by world_size; SparCML applies the sum.
        shared: several units divide the global k by where its entries lie; else each has its own.
        unit_bytes: what is selected together where the user does not say: see ``plan_units``.
    """

    name: str
    make_selector: Callable[[], Selector]
    make_collective: Callable[[], Collective]
    options: tuple[tuple[str, object], ...] = ()
    average: bool = True
    shared: bool = True
    unit_bytes: int | None = None


def check_density(density: float) -> float:
    """Return the density, or refuse one outside (0, 1]."""
    if isinstance(density, bool) or not isinstance(density, int | float) or not 0 < density <= 1:
        raise ConfigurationError(
            f"density is {density!r}; give the fraction k / n to exchange, in (0, 1], as 0.01"
        )
    return float(density)
