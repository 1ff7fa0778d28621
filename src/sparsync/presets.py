"""Presets: a name for a point in the space (selector x collective), with its paper's constants."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from sparsync.collectives import Allgather, Budgeted, Collective, Dense, Halving, OkTopk
from sparsync.errors import ConfigurationError
from sparsync.selection import Everything, Exact, Reused, Selector
from sparsync.wire.base import Codec

__all__ = [
    "PRESETS",
    "Algorithm",
    "allgather",
    "budgeted",
    "check_density",
    "dense",
    "halving",
    "oktopk",
    "oktopk_paper",
    "resolve",
]


@dataclass(frozen=True)
class Algorithm:
    """How gradients are averaged.

    Attributes:
        name: for messages and tables.
        make_selector: builds one selector; called once per unit.
        make_collective: builds one collective; called once per unit.
        options: what a preset was told, for ranks to compare.
        average: divide the total by world_size; SparCML applies the sum.
    """

    name: str
    make_selector: Callable[[], Selector]
    make_collective: Callable[[], Collective]
    options: tuple[tuple[str, object], ...] = ()
    average: bool = True


def dense() -> Algorithm:
    """Plain allreduce of every element: the baseline."""
    return Algorithm("dense", Everything, Dense)


def allgather(*, codec: Codec | None = None) -> Algorithm:
    """TopkA: exact local top-k, allgather, local sum (Ok-Topk, Table 1)."""
    return Algorithm("allgather", Exact, lambda: Allgather(codec))


def budgeted(*, codec: Codec | None = None, budget: float = 2.0) -> Algorithm:
    """Ours, the default: exact selection, hashed regions, packed bytes, a byte budget that holds.

    Args:
        codec: wire format (default: packed, bf16).
        budget: see ``sparsync.collectives.Budgeted``.
    """
    return Algorithm("budgeted", Exact, lambda: Budgeted(codec, budget=budget))


def halving(*, codec: Codec | None = None) -> Algorithm:
    """Ours, for many ranks: O(k) volume in O(log P) rounds; exact local selection, packed bytes."""
    return Algorithm("halving", Exact, lambda: Halving(codec))


def oktopk(
    *,
    threshold_period: int = 32,
    cap: float | None = 1.0,
    floor: float | None = 2 / 3,
    **options: Any,
) -> Algorithm:
    """Ok-Topk with histogram cuts, histogram threshold and a cap: a volume bound on every step.

    The bound supposes that supports lie where they were on the step before (the paper: 64 steps
    before), and k / P >= 256 (``costs.oktopk_bound_words``).

    Args:
        threshold_period: tau', steps between exact local thresholds (paper, section 5.2: 32).
        cap: at most ``cap * k`` entries are taken, locally and globally.
        floor: a step that finds fewer than ``floor * k`` local entries is made exact (ours: early in
            training a threshold reused for 32 steps finds 0.03 to 0.1 k; None as published).
        options: see ``sparsync.collectives.OkTopk``.
    """
    if cap is not None and floor is not None:
        floor = min(floor, cap)
    return Algorithm(
        "oktopk",
        lambda: Reused(threshold_period, cap, floor),
        lambda: OkTopk(threshold_period=threshold_period, cap=cap, **options),
    )


def oktopk_paper(*, threshold_period: int = 32, **options: Any) -> Algorithm:
    """Ok-Topk as published: averaged boundaries, allgathered threshold, no cap.

    Args:
        threshold_period: tau' (paper, section 5.2: 32 for VGG and LSTM, 128 for BERT).
        options: see ``sparsync.collectives.OkTopk``; tau = 64 (section 3.1.1), trigger 4 (5.3).
    """
    published = {
        "boundaries": "average",
        "global_threshold": "allgather",
        "cap": None,
        "repartition_trigger": None,
    }
    return Algorithm(
        "oktopk-paper",
        lambda: Reused(threshold_period, cap=None),
        lambda: OkTopk(threshold_period=threshold_period, **{**published, **options}),
    )


PRESETS: MappingProxyType[str, Callable[..., Algorithm]] = MappingProxyType(
    {
        "allgather": allgather,
        "budgeted": budgeted,
        "dense": dense,
        "halving": halving,
        "oktopk": oktopk,
        "oktopk-paper": oktopk_paper,
    }
)


def resolve(algorithm: str | Algorithm, **options: Any) -> Algorithm:
    """Return the algorithm of a preset's name, with options; an ``Algorithm`` as it is.

    Raises:
        ConfigurationError: unknown name (lists the known ones) or option (lists the known ones).

    Example:
        >>> resolve("oktopk", cap=None).name
        'oktopk'
    """
    if isinstance(algorithm, Algorithm):
        if options:
            raise ConfigurationError(
                f"options {', '.join(options)} go with a preset's name; "
                "an Algorithm already has its own"
            )
        return algorithm
    if not isinstance(algorithm, str) or algorithm not in PRESETS:
        raise ConfigurationError(
            f"unknown algorithm {algorithm!r}; choose one of {', '.join(sorted(PRESETS))}"
        )
    preset = PRESETS[algorithm]
    known = _options_of(preset)
    unknown = sorted(set(options) - known)
    if unknown:
        raise ConfigurationError(
            f"{algorithm} has no option {', '.join(unknown)}; it has "
            f"{', '.join(sorted(known)) or 'none'}"
        )
    try:
        made = preset(**options)
        made.make_selector(), made.make_collective()  # bad values fail here, not in the first step
    except TypeError as error:
        raise ConfigurationError(
            f"{algorithm}: an option has the wrong type ({error}); given were {options}"
        ) from error
    return replace(made, options=tuple(sorted(options.items())))


def check_density(density: float) -> float:
    """Return the density, or refuse one outside (0, 1]."""
    if isinstance(density, bool) or not isinstance(density, int | float) or not 0 < density <= 1:
        raise ConfigurationError(
            f"density is {density!r}; give the fraction k / n to exchange, in (0, 1], as 0.01"
        )
    return float(density)


def _options_of(preset: Callable[..., Algorithm]) -> set[str]:
    """Name the keyword arguments of a preset, those of OkTopk where it passes them on."""
    names = inspect.signature(preset).parameters
    known = {n for n, p in names.items() if p.kind is p.KEYWORD_ONLY}
    if any(p.kind is p.VAR_KEYWORD for p in names.values()):
        known |= set(inspect.signature(OkTopk).parameters)
    return known
