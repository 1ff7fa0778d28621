"""Models and data to train on: ``sparsync train --workload bytes | lines | digits | lstm``."""

from __future__ import annotations

from dataclasses import fields
from types import MappingProxyType

from sparsync.errors import ConfigurationError
from sparsync.workloads.base import PADDING, Defaults, Evaluation, Workload, is_hidden_matrix
from sparsync.workloads.byte_transformer import BytesWorkload
from sparsync.workloads.digits import DigitsWorkload
from sparsync.workloads.lengths import LinesWorkload
from sparsync.workloads.lstm import LstmWorkload

__all__ = [
    "PADDING",
    "WORKLOADS",
    "Defaults",
    "Evaluation",
    "Workload",
    "is_hidden_matrix",
    "make_workload",
    "workload_class",
]

WORKLOADS: MappingProxyType[str, type[Workload]] = MappingProxyType(
    {kind.name: kind for kind in (BytesWorkload, LinesWorkload, DigitsWorkload, LstmWorkload)}
)


def workload_class(name: str) -> type[Workload]:
    """Return the class of a name.

    Raises:
        ConfigurationError: there is none.
    """
    if name not in WORKLOADS:
        raise ConfigurationError(f"unknown workload {name!r}; choose one of {', '.join(WORKLOADS)}")
    return WORKLOADS[name]


def make_workload(name: str, **options: int | None) -> Workload:
    """Make a workload; its data is loaded when it is first asked for.

    Args:
        name: a key of ``WORKLOADS``.
        options: fields of its class; None: its default.

    Raises:
        ConfigurationError: there is no such workload, or it has no such option.

    Example:
        >>> make_workload("lstm", width=128, layers=None)
        LstmWorkload(context=32, width=128, layers=2)
    """
    kind = workload_class(name)
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]  # all are dataclasses
    given = {key: value for key, value in options.items() if value is not None}
    for key, value in given.items():
        if key not in known:
            raise ConfigurationError(f"{key} is {value}, but {name} has no {key}; leave it out")
    return kind(**given)
