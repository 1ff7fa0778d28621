"""A version of ``sparsync.attach`` with flat settings, which tests can combine freely."""

from dataclasses import fields

import sparsync
from sparsync.presets import resolve
from sparsync.updates import OUTER_SETTINGS

__all__ = ["ONE_BIT", "attach", "options"]

# the default for updates of models above a million elements; small test models would get more bits
ONE_BIT = {
    **OUTER_SETTINGS["updates"],
    "algorithm": resolve("quantised", bits=1, block=512),
    "period": 2,
}

GROUPS = {
    "compression": sparsync.Compression,
    "transport": sparsync.Transport,
    "monitoring": sparsync.Monitoring,
}
OWN = ("optimizer", "density", "correction", "replicate")


def options(algorithm="budgeted", transport="auto", **settings):
    """Return the arguments of ``attach``: settings by group, and the preset's options."""
    settings["name"] = transport
    found = {name: settings.pop(name) for name in OWN if name in settings}
    for group, kind in GROUPS.items():
        names = [field.name for field in fields(kind) if field.name in settings]
        found[group] = kind(**{name: settings.pop(name) for name in names})
    return {"algorithm": resolve(algorithm, **settings), **found}


def attach(model, algorithm="budgeted", **settings):
    """Attach to a model."""
    return sparsync.attach(model, **options(algorithm, **settings))
