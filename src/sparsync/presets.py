"""Presets: every algorithm by name, with its paper's constants.

A new algorithm is its collective's or selector's file, and one row of ``PRESETS`` below.  Other packages
add rows by an entry point of the group "sparsync.algorithms" that names a ``Preset``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any

from sparsync.algorithm import Algorithm, check_density
from sparsync.auto import Auto
from sparsync.collectives import (
    Allgather,
    Budgeted,
    Collective,
    Dense,
    Dynamic,
    GTopk,
    Halving,
    OkTopk,
    Quantised,
    RecursiveDoubling,
    Ring,
    SparcmlAuto,
    split_allgather,
)
from sparsync.collectives.costs import Job
from sparsync.cost.calibrate import calibrate
from sparsync.cost.machine import Machine
from sparsync.errors import ConfigurationError, require
from sparsync.published import (
    SPARCML_SETTINGS,
    oktopk,
    oktopk_paper,
    redsync,
    redsync_quantized,
    sparcml,
)
from sparsync.selection import Everything, Exact, GaussianK, Selector
from sparsync.transports.communicator import Communicator

__all__ = [
    "PRESETS",
    "SPARCML_SETTINGS",
    "Algorithm",
    "Preset",
    "auto",
    "candidates",
    "check_density",
    "oktopk",
    "oktopk_paper",
    "preset",
    "presets",
    "quantised",
    "redsync",
    "redsync_quantized",
    "resolve",
    "sparcml",
]

_GROUP = "sparsync.algorithms"  # of entry points
_GAUSSIAN = 1.5  # entries over k under error feedback (benchmarks/selection.md: 0.8 to 1.6)
_VOLUME = "Ok-Topk, Equations 1 and 2"
_PAPER = "Ok-Topk, Equation 3, if thresholds find k"


@dataclass(frozen=True)
class Preset:
    """A row of the table: all that commands, ``auto``, the contracts and the docs know of an algorithm.

    ``planned``: ``auto`` and ``sparsync plan`` may choose it, as at its defaults it rounds no more than
    bf16.  At equal predictions the first row wins.
    """

    make: Callable[..., Algorithm]  # its keyword-only arguments are the options
    source: str = "sparsync"  # paper and equation of its cost
    planned: bool = False
    corrects: bool = False  # published with momentum correction instead of the optimizer's momentum
    passes_on: Callable[..., Collective] | None = None  # takes the ``**options`` of ``make``

    @property
    def options(self) -> dict[str, inspect.Parameter]:
        """Options by name."""
        own = inspect.signature(self.make).parameters
        more = inspect.signature(self.passes_on).parameters if self.passes_on else {}
        return {
            **{name: p for name, p in own.items() if p.kind is p.KEYWORD_ONLY},
            **{name: p for name, p in more.items() if name not in own},
        }


@functools.cache
def presets() -> Mapping[str, Preset]:
    """Return every row: those of ``PRESETS``, then those of installed packages.

    Raises:
        ConfigurationError: a package's entry point is no ``Preset``, or takes a name that exists.
    """
    rows = dict(PRESETS)
    for point in entry_points(group=_GROUP):
        row = point.load()
        if not isinstance(row, Preset) or point.name in rows:
            raise ConfigurationError(
                f"entry point {point.name!r} = {point.value!r} of group {_GROUP!r} is "
                f"{'a name that exists already' if point.name in rows else type(row).__name__}; name "
                "a sparsync.presets.Preset, under a new name"
            )
        rows[point.name] = row
    return MappingProxyType(rows)


def preset(name: object) -> Preset:
    """Return the row of a name; an unknown one is refused with the known ones."""
    if isinstance(name, str) and name in PRESETS:  # before asking installed packages
        return PRESETS[name]
    if not isinstance(name, str) or name not in presets():
        raise ConfigurationError(
            f"unknown algorithm {name!r}; choose one of {', '.join(sorted(presets()))}"
        )
    return presets()[name]


def candidates(*, planned: bool = True) -> list[Algorithm]:
    """Return the algorithms that a plan may choose from; ``planned=False``: all that declare a cost."""
    rows = presets().items()
    found = [resolve(name) for name, row in rows if row.planned or not planned]
    return [algorithm for algorithm in found if planned or algorithm.predictable]


def resolve(algorithm: str | Algorithm, **options: Any) -> Algorithm:
    """Return the algorithm of a preset's name, with options; an ``Algorithm`` as it is.

    Raises:
        ConfigurationError: unknown name (lists the known ones) or option (lists the known ones).

    Example:
        >>> resolve("oktopk", cap=None).name
        'oktopk'
    """
    if isinstance(algorithm, Algorithm):
        require(
            not options,
            f"options {', '.join(options)} belong to a preset's name; an Algorithm already has its own",
        )
        return algorithm
    row = preset(algorithm)
    unknown, known = sorted(set(options) - set(row.options)), ", ".join(sorted(row.options))
    if unknown:
        raise ConfigurationError(
            f"{algorithm} has no option {', '.join(unknown)}; it has {known or 'none'}"
        )
    try:
        made = row.make(**options)
        made.make_selector(), made.make_collective()  # bad values fail here, not in the first step
    except TypeError as error:
        raise ConfigurationError(
            f"{algorithm}: an option has the wrong type ({error}); given were {options}"
        ) from error
    return replace(made, options=tuple(sorted(options.items())), source=row.source)


# ---- with settings of their own: these and those of ``published`` -----------------------------------


def quantised(*, bits: int = 2, block: int = 256) -> Algorithm:
    """Few bits per element, both ways, and a scale per block: a dense allreduce whose error is kept.

    Args:
        bits: per element: 1, 2, 3, 4, 8 or 16.
        block: consecutive elements that share a scale.
    """
    return Algorithm(
        "quantised",
        Everything,
        lambda: Quantised(bits, block),
        shared=False,
        bits=bits + (16 / block if bits < 16 else 0),
    )


def auto(
    *,
    machine: Machine | None = None,
    budget: float | None = None,
    candidates: Sequence[str] | None = None,
    check_period: int | None = 50,
    gain: float = 0.1,
    patience: int = 2,
) -> Algorithm:
    """Per unit, the collective that is predicted fastest for the density asked for; or dense.

    Args:
        machine: seconds per message, byte, element and entry; None: ``attach`` and the optimizers
            measure them; ``allreduce``, which has one step, takes those of ``Machine``: gigabit Ethernet.
        budget: bytes that a rank may send or receive per unit and step; None: any.
        candidates: names of presets; None: all rows that are ``planned``.
        check_period: steps between comparisons of measured and predicted seconds; None: never, so that
            a run is the same every time.
        gain: part of the measured time that another collective must save to be tried.
        patience: comparisons in a row that must say so.
    """
    planned = {name: row for name, row in presets().items() if row.planned}
    names = tuple(planned) if candidates is None else tuple(candidates)
    good = bool(names) and set(names) <= set(planned)
    require(good, f"auto: candidates are {list(names)}; choose among {', '.join(planned)}")
    algorithms = [resolve(name) for name in names]

    def make(found: Machine) -> Algorithm:
        return Algorithm(
            "auto",
            Exact,
            lambda: Auto(algorithms, found, budget, check_period, gain=gain, patience=patience),
            prepare=prepare if machine is None else None,
        )

    async def prepare(comm: Communicator) -> Algorithm:
        return make((await calibrate(comm)).machine)

    return make(machine or Machine())


# ---- the table --------------------------------------------------------------------------------------


def _row(
    name: str,
    collective: Callable[..., Collective],
    source: str = "sparsync",
    *,
    selector: Callable[[], Selector] = Exact,
    planned: bool = False,
    **more: Any,
) -> tuple[str, Preset]:
    """Return the row of a collective whose arguments are the options, after a selector without any."""

    def make(**options: Any) -> Algorithm:
        return Algorithm(name, selector, partial(collective, **options), **more)

    make.__doc__ = getattr(collective, "func", collective).__doc__
    return name, Preset(make, source, planned, passes_on=collective)


def _found_by_gaussiank(job: Job) -> tuple[int, Job]:
    return 1, job._replace(k=min(_GAUSSIAN * job.k, job.size))


PRESETS: Mapping[str, Preset] = MappingProxyType(
    dict(
        [
            _row("dense", Dense, "Ok-Topk, Table 1, Dense", selector=Everything, planned=True),
            _row("budgeted", Budgeted, planned=True),
            _row("halving", Halving, planned=True),
            ("oktopk", Preset(oktopk, _VOLUME, planned=True, passes_on=OkTopk)),
            _row("allgather", Allgather, "Ok-Topk, Table 1, TopkA", planned=True),
            _row("split-allgather", split_allgather, "SparCML, section 5.3.2", planned=True),
            _row("topkdsa", Dynamic, "Ok-Topk, Table 1, TopkDSA", planned=True),
            _row("recursive-doubling", RecursiveDoubling, "SparCML, section 5.3.1", planned=True),
            ("auto", Preset(auto)),
            _row("dynamic", partial(Dynamic, always_dense=True), "SparCML, section 5.3.3"),
            _row(
                "gaussiank",
                partial(Allgather, cap=2.0),  # the published estimate has no upper end
                "Ok-Topk, Table 1, Gaussiank",
                selector=GaussianK,
                calls=_found_by_gaussiank,
            ),
            _row("gtopk", GTopk, "Ok-Topk, Table 1, gTopk"),
            ("oktopk-paper", Preset(oktopk_paper, _PAPER, passes_on=OkTopk)),
            ("redsync", Preset(redsync, "RedSync, Equation 1", corrects=True)),
            ("redsync-quantized", Preset(redsync_quantized, "RedSync, Equation 1", corrects=True)),
            _row("ring", Ring, "SparCML, section 8.1"),
            _row(
                "ring-dense",
                partial(Ring, cap=None, dense=True),
                "SparCML, section 8.1",
                selector=Everything,
            ),
            ("quantised", Preset(quantised)),
            ("sparcml", Preset(sparcml, "SparCML, section 5.3.3")),
            _row("sparcml-auto", SparcmlAuto, "SparCML, section 5.3"),
        ]
    )
)
