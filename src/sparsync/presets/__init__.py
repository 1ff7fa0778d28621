"""Presets: a name for a point in the space (selector x collective), with its paper's constants."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from sparsync.collectives import OkTopk
from sparsync.errors import ConfigurationError
from sparsync.presets.auto import auto
from sparsync.presets.base import Algorithm, check_density
from sparsync.presets.baselines import allgather, dense, gaussiank, gtopk, ring_dense, topkdsa
from sparsync.presets.oktopk import oktopk, oktopk_paper
from sparsync.presets.ours import budgeted, halving, signs
from sparsync.presets.redsync import redsync, redsync_quantized
from sparsync.presets.sparcml import (
    SPARCML_SETTINGS,
    dynamic,
    recursive_doubling,
    ring,
    sparcml,
    sparcml_auto,
    split_allgather,
)

__all__ = [
    "PRESETS",
    "SPARCML_SETTINGS",
    "Algorithm",
    "allgather",
    "auto",
    "budgeted",
    "check_density",
    "dense",
    "dynamic",
    "gaussiank",
    "gtopk",
    "halving",
    "oktopk",
    "oktopk_paper",
    "options_of",
    "recursive_doubling",
    "redsync",
    "redsync_quantized",
    "resolve",
    "ring",
    "ring_dense",
    "signs",
    "sparcml",
    "sparcml_auto",
    "split_allgather",
    "topkdsa",
]

PRESETS: MappingProxyType[str, Callable[..., Algorithm]] = MappingProxyType(
    {
        "allgather": allgather,
        "auto": auto,
        "budgeted": budgeted,
        "dense": dense,
        "dynamic": dynamic,
        "gaussiank": gaussiank,
        "gtopk": gtopk,
        "halving": halving,
        "oktopk": oktopk,
        "oktopk-paper": oktopk_paper,
        "recursive-doubling": recursive_doubling,
        "redsync": redsync,
        "redsync-quantized": redsync_quantized,
        "ring": ring,
        "ring-dense": ring_dense,
        "signs": signs,
        "sparcml": sparcml,
        "sparcml-auto": sparcml_auto,
        "split-allgather": split_allgather,
        "topkdsa": topkdsa,
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
    known = options_of(algorithm)
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


def options_of(name: str) -> set[str]:
    """Return the names of a preset's options; none of an unknown preset.

    Example:
        >>> sorted(options_of("budgeted")), options_of("nothing")
        (['budget', 'codec'], set())
    """
    if name not in PRESETS:
        return set()
    names = inspect.signature(PRESETS[name]).parameters
    known = {n for n, p in names.items() if p.kind is p.KEYWORD_ONLY}
    if any(p.kind is p.VAR_KEYWORD for p in names.values()):
        known |= set(inspect.signature(OkTopk).parameters)
    return known
