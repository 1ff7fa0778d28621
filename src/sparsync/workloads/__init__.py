"""Models and data to train on: ``sparsync train --workload NAME``.

Four need nothing that is not there: ``bytes``, ``lines``, ``lstm`` and ``digits``.  The others are the
papers', and read data that is asked for with ``--data DIR``: see ``docs/data.md``.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from types import MappingProxyType

from sparsync.errors import ConfigurationError
from sparsync.workloads.base import (
    PADDING,
    Defaults,
    Evaluation,
    Workload,
    is_hidden_matrix,
    outputs_of,
)
from sparsync.workloads.byte_transformer import BytesWorkload
from sparsync.workloads.digits import DigitsWorkload
from sparsync.workloads.folders import FolderWorkload
from sparsync.workloads.images import (
    AlexnetImagenet,
    Resnet18x4Imagenet,
    Resnet20Cifar10,
    Resnet34x4Imagenet,
    Resnet44Cifar10,
    Resnet50Imagenet,
    Resnet110Cifar10,
    Vgg16Cifar10,
    Vgg16Imagenet,
)
from sparsync.workloads.language import LstmPtb, LstmWikitext2
from sparsync.workloads.lengths import LinesWorkload
from sparsync.workloads.lstm import LstmWorkload
from sparsync.workloads.masking import BertWikipedia
from sparsync.workloads.speech import LstmAn4
from sparsync.workloads.translation import Atis, Hansards, TransformerWmt17

__all__ = [
    "PADDING",
    "WORKLOADS",
    "Defaults",
    "Evaluation",
    "Workload",
    "is_hidden_matrix",
    "make_workload",
    "needs_data",
    "outputs_of",
    "workload_class",
]

WORKLOADS: MappingProxyType[str, type[Workload]] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            BytesWorkload,
            LinesWorkload,
            DigitsWorkload,
            LstmWorkload,
            Vgg16Cifar10,
            Resnet20Cifar10,
            Resnet44Cifar10,
            Resnet110Cifar10,
            Resnet50Imagenet,
            AlexnetImagenet,
            Vgg16Imagenet,
            Resnet18x4Imagenet,
            Resnet34x4Imagenet,
            LstmAn4,
            BertWikipedia,
            LstmPtb,
            LstmWikitext2,
            TransformerWmt17,
            Atis,
            Hansards,
        )
    }
)


def workload_class(name: str) -> type[Workload]:
    """Return the class of a name.

    Raises:
        ConfigurationError: there is none.
    """
    if name not in WORKLOADS:
        raise ConfigurationError(f"unknown workload {name!r}; choose one of {', '.join(WORKLOADS)}")
    return WORKLOADS[name]


def needs_data(name: str) -> bool:
    """Tell whether a workload reads a folder, its option ``data``."""
    return issubclass(workload_class(name), FolderWorkload)


def make_workload(name: str, **options: int | Path | None) -> Workload:
    """Make a workload; its data is loaded when it is first asked for.

    Args:
        name: a key of ``WORKLOADS``.
        options: fields of its class; None: its default.

    Raises:
        ConfigurationError: there is no such workload, it has no such option, or its data is missing.

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
    if needs_data(name) and "data" not in given:
        raise ConfigurationError(
            f"{name} needs data, which is not downloaded; give its folder with --data DIR "
            "(docs/data.md says what it has to have)"
        )
    return kind(**given)
