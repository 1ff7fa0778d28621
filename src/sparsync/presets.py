"""Presets: every algorithm by name, with its paper's constants.

The core's rows are at the end of this file.  Each paper's package, ``sparsync.published.<paper>``,
declares its own rows.  Other packages declare their rows as entry points of the group
"sparsync.algorithms".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from sparsync.algorithm import Algorithm, Preset, row
from sparsync.collectives import Allgather, Budgeted, Dense, Halving, Quantised
from sparsync.cost.machine import Machine
from sparsync.errors import ConfigurationError, check_numbers, require
from sparsync.names import no_option
from sparsync.selection import Everything, Exact
from sparsync.tables import Table, unknown
from sparsync.transports.communicator import Communicator
from sparsync.wire import CODECS
from sparsync.wire.codec import Codec

__all__ = ["PRESETS", "auto", "candidates", "preset", "quantised", "resolve"]


def preset(name: object) -> Preset:
    """Return the row for a name in any spelling; the error for an unknown name lists the known ones."""
    if not isinstance(name, str) or name not in PRESETS:
        raise unknown("algorithm", name, sorted(PRESETS))
    return PRESETS[name]


def candidates(*, planned: bool = True) -> list[Algorithm]:
    """Return the algorithms that a plan may choose; with ``planned=False``, all that declare a cost."""
    rows = PRESETS.items()
    found = [resolve(name) for name, row in rows if row.planned or not planned]
    return [algorithm for algorithm in found if planned or algorithm.predictable]


def resolve(algorithm: str | Algorithm, **options: Any) -> Algorithm:
    """Return the algorithm for a preset's name, with options; an ``Algorithm`` is returned unchanged.

    Raises:
        ConfigurationError: the name or an option is unknown; the message lists the known ones.

    Example:
        >>> resolve("oktopk", cap=None).name, resolve("SSAR_Split_allgather").name
        ('oktopk', 'split-allgather')
    """
    if isinstance(algorithm, Algorithm):
        require(
            not options,
            f"options {', '.join(options)} belong to a preset's name; an Algorithm already has its own",
        )
        return algorithm
    found = preset(algorithm)
    if others := sorted(set(options) - set(found.options)):
        raise no_option(algorithm, others, found.options, found.text)
    kinds = {name: parameter.annotation for name, parameter in found.options.items()}
    check_numbers(str(algorithm), kinds, options)
    if "codec" in options:
        options["codec"] = _codec(str(algorithm), options["codec"])
    try:
        made = found.make(**options)
        made.make_selector(), made.make_collective()  # bad values fail here, not in the first step
    except TypeError as error:
        raise ConfigurationError(
            f"{algorithm}: an option has the wrong type ({error}); given were {options}"
        ) from error
    return replace(made, options=tuple(sorted(options.items())), source=found.source)


def _codec(owner: str, given: Any) -> Any:
    """Return a codec, given as an object or by the name of a row of ``CODECS``."""
    if isinstance(given, str):
        if given not in CODECS:
            raise unknown("codec", given, sorted(CODECS))
        return CODECS[given]
    of_class = isinstance(given, type)
    cure = f"give an object, {given.__name__}()" if of_class else "give a codec or the name of one"
    require(given is None or isinstance(given, Codec), f"{owner}: codec is {given!r}; {cure}")
    return given


# ---- with their own settings ---------------------------------------------------------------------


def quantised(*, bits: int = 2, block: int = 256) -> Algorithm:
    """Allreduce all elements in a few bits each, in both directions, with error feedback.

    Args:
        bits: bits per element: 1, 2, 3, 4, 8 or 16.
        block: consecutive elements that share a scale.
    """
    Quantised(bits, block)  # validates both before the division below
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
    """For each unit, use the sparse or dense collective predicted to be fastest at the given density.

    Args:
        machine: seconds per message, byte, element and entry.  If None, ``attach`` and the
            optimizers measure them.  ``allreduce``, which runs only once, uses the defaults of
            ``Machine`` (gigabit Ethernet).
        budget: bytes that a rank may send or receive per unit and step; None for no limit.
        candidates: names of presets; None for all rows that are ``planned``.
        check_period: steps between comparisons of measured and predicted seconds; None for no
            comparisons, which keeps runs exactly repeatable.
        gain: a different collective is tried only if it is predicted to save at least this fraction of
            the measured time.
        patience: number of consecutive comparisons that must favour this collective before it is tried.
    """
    from sparsync.cost.auto import Auto  # imported here: only this preset needs the planner
    from sparsync.cost.calibrate import calibrate

    planned = [name for name, row in PRESETS.items() if row.planned]
    names = planned if candidates is None else list(candidates)
    good = bool(names) and all(name in PRESETS and PRESETS[name].planned for name in names)
    require(good, f"auto: candidates are {names}; choose among {', '.join(planned)}")
    fits = budget is None or 0 < budget < math.inf
    require(fits, f"auto: budget is {budget}; give bytes > 0, or None")
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

PRESETS: Final[Table[Preset]] = Table(
    "algorithms",
    {
        "dense": row("dense", Dense, "Ok-Topk, Table 1, Dense", selector=Everything, planned=True),
        "budgeted": row("budgeted", Budgeted, planned=True),
        "halving": row("halving", Halving, planned=True),
        "allgather": row("allgather", Allgather, "Ok-Topk, Table 1, TopkA", planned=True),
        "auto": Preset(auto),
        "quantised": Preset(quantised),
    },
    lambda found: isinstance(found, Preset),
    "a sparsync.algorithm.Preset",
)
