"""Print the public interface: ``python -m tests.packaging.interface > tests/packaging/interface.txt``.

Each line has a name and its parameters; ``=`` marks optional ones. The names in ``__all__`` of the
modules below are promised, except for ``UNPROMISED``; all other names may change in any release.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from types import MappingProxyType

MODULES = (
    "sparsync",
    "sparsync.algorithm",
    "sparsync.averaging",
    "sparsync.collectives",
    "sparsync.errors",
    "sparsync.cli.lab",
    "sparsync.transports.launchers",
    "sparsync.published.baselines",
    "sparsync.published.oktopk",
    "sparsync.published.redsync",
    "sparsync.published.sparcml",
    "sparsync.published.sparcml.linear",
    "sparsync.published.wagma",
    "sparsync.tables",
    "sparsync.monitoring",
    "sparsync.presets",
    "sparsync.selection",
    "sparsync.testing",
    "sparsync.transports.communicator",
    "sparsync.transports.driver",
    "sparsync.transports.sim",
    "sparsync.updates",
    "sparsync.wire",
)
UNPROMISED = MappingProxyType(
    {
        "sparsync.algorithm": {"LARGE", "check_density"},
        "sparsync.cli.lab": {"LinkTraffic", "Seat", "default_burst"},
        "sparsync.collectives": {"Changing", "ChangingState"},
        "sparsync.errors": {"check_number_fields", "check_numbers", "first_line"},
        "sparsync.monitoring": {"Monitor", "Sink", "sink_of"},
        "sparsync.published.sparcml": {"SparcmlAutoState"},
        "sparsync.selection": {"ExactState"},
        "sparsync.testing": {"exercise_algorithm"},
        "sparsync.transports.communicator": {"bytes_of", "check_timeout"},
        "sparsync.transports.driver": {
            *("Abortable", "Engine", "Flight", "Task", "close_at_exit", "run", "together"),
        },
        "sparsync.transports.launchers": {"first_host", "slurm_port"},
        "sparsync.transports.sim": {"Port", "Ports", "Usage", "Weight"},
    }
)
"""Names that modules of this package take from each other, and no page explains to users."""
FILE = Path(__file__).with_suffix(".txt")

_MARKS = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


def lines() -> list[str]:
    """Return the interface, module by module."""
    found = []
    for name in MODULES:
        module = importlib.import_module(name)
        promised = [one for one in module.__all__ if one not in UNPROMISED.get(name, ())]
        found += [f"{name}.{public}{_shape(getattr(module, public))}" for public in promised]
    return found


def _shape(thing: object) -> str:
    """Return a function's parameters, or a class's parameters and its public methods."""
    if inspect.ismodule(thing) or not callable(thing):
        return f": {type(thing).__name__}"
    if not inspect.isclass(thing):
        return _parameters(thing)
    methods = [
        f".{name}{_parameters(method)}"
        for name, method in sorted(vars(thing).items())
        # torch puts a wrapped copy of an inherited step() into an optimizer's class
        if inspect.isfunction(method)
        and method.__qualname__ == f"{thing.__qualname__}.{name}"
        and not name.startswith("_")
    ]
    return " ".join([_parameters(thing), *methods])


def _parameters(function: object) -> str:
    try:
        parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    except (TypeError, ValueError):  # an exception's: made by C
        return "(...)"
    named = False
    shown = []
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and not named:
            shown.append("*")
        named |= p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        default = "" if p.default is p.empty else "="
        shown.append(f"{_MARKS.get(p.kind, '')}{p.name}{default}")
    return f"({', '.join(shown)})"


if __name__ == "__main__":
    sys.stdout.write("\n".join(lines()) + "\n")
