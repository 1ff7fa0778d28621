"""SparCML: high-performance sparse communication for machine learning (Renggli et al., SC 2019)."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from sparsync.algorithm import Preset, row
from sparsync.published.sparcml.collectives import (
    Dynamic,
    RecursiveDoubling,
    Ring,
    SparcmlAuto,
    SparcmlAutoState,
    split_allgather,
)
from sparsync.published.sparcml.presets import SPARCML_SETTINGS, sparcml
from sparsync.selection import Everything

__all__ = [
    "ROWS",
    "SPARCML_SETTINGS",
    "Dynamic",
    "RecursiveDoubling",
    "Ring",
    "SparcmlAuto",
    "SparcmlAutoState",
    "sparcml",
    "split_allgather",
]

_RING = "SparCML, section 8.1"

ROWS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "algorithms": {
            "split-allgather": row(
                "split-allgather", split_allgather, "SparCML, section 5.3.2", planned=True
            ),
            "recursive-doubling": row(
                "recursive-doubling", RecursiveDoubling, "SparCML, section 5.3.1", planned=True
            ),
            "dynamic": row(
                "dynamic", partial(Dynamic, always_dense=True), "SparCML, section 5.3.3"
            ),
            "ring": row("ring", Ring, _RING),
            "ring-dense": row(
                "ring-dense", partial(Ring, cap=None, dense=True), _RING, selector=Everything
            ),
            "sparcml": Preset(sparcml, "SparCML, section 5.3.3"),
            "sparcml-auto": row("sparcml-auto", SparcmlAuto, "SparCML, section 5.3"),
        }
    }
)
