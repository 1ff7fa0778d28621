"""Models and data to train on: ``sparsync train --workload NAME``.

Three need no downloaded data: ``bytes``, ``lstm`` and ``digits``.  Other packages can add workloads
through entry points in the group ``sparsync.workloads``; these may read a folder, given by ``--data``.
"""

from __future__ import annotations

from dataclasses import fields
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType

from sparsync.cli.values import INSTALL_PAPERS
from sparsync.cli.workloads.digits import DigitsWorkload
from sparsync.cli.workloads.stdlib_text import BytesWorkload, LstmWorkload
from sparsync.cli.workloads.workload import Workload
from sparsync.errors import ConfigurationError
from sparsync.tables import unknown

__all__ = ["make_workload", "workload_class", "workload_names"]

_GROUP = "sparsync.workloads"
_OWN: MappingProxyType[str, type[Workload]] = MappingProxyType(
    {kind.name: kind for kind in (BytesWorkload, DigitsWorkload, LstmWorkload)}
)


def workload_names() -> list[str]:
    """List the names of all workloads; this package's workloads come first."""
    return [*_OWN, *sorted(point.name for point in entry_points(group=_GROUP))]


def workload_class(name: str) -> type[Workload]:
    """Return the class of the workload with this name; refuse an unknown name."""
    if name in _OWN:
        return _OWN[name]
    for point in entry_points(group=_GROUP, name=name):
        added: type[Workload] = point.load()
        return added
    error = unknown("workload", name, workload_names())
    if entry_points(group=_GROUP):
        raise error
    raise ConfigurationError(
        f"{error}; those of the papers are in the package sparsync-papers, which is not installed: "
        f"{INSTALL_PAPERS}"
    )


def make_workload(name: str, **options: int | Path | None) -> Workload:
    """Make a workload; its data is loaded on first use.

    Args:
        name: one of ``workload_names()``.
        options: values for fields of its class; None means the default.

    Raises:
        ConfigurationError: the workload or an option is unknown, or its data is missing.

    Example:
        >>> make_workload("lstm", width=128, layers=None)
        LstmWorkload(context=32, width=128, layers=2)
    """
    kind = workload_class(name)
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]  # all are dataclasses
    given = {key: value for key, value in options.items() if value is not None}
    for key, value in given.items():
        if key not in known:
            raise ConfigurationError(f"{key} is {value}, but {name} has no {key}; omit it")
    if kind.reads_folder and "data" not in given:
        raise ConfigurationError(
            f"{name} needs data, which is not downloaded; give its folder with --data DIR "
            "(docs/data.md lists the files in it)"
        )
    return kind(**given)
