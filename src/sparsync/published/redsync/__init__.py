"""RedSync: reducing synchronization traffic for distributed deep learning (Fang et al., 2018)."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from sparsync.algorithm import Preset
from sparsync.published.redsync.presets import redsync, redsync_quantized
from sparsync.published.redsync.selectors import BinarySearch, BySize, Layered, OneSigned, Trimmed
from sparsync.published.redsync.sign_mean import SignMean
from sparsync.selection import Exact

__all__ = [
    "ROWS",
    "BinarySearch",
    "BySize",
    "Layered",
    "OneSigned",
    "SignMean",
    "Trimmed",
    "redsync",
    "redsync_quantized",
]

_COST = "RedSync, Equation 1"

ROWS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "algorithms": {
            "redsync": Preset(redsync, _COST, corrects=True),
            "redsync-quantized": Preset(redsync_quantized, _COST, corrects=True),
        },
        "selectors": {
            "trimmed": Trimmed,
            "binary search": BinarySearch,
            "by size": BySize,
            "one-signed": lambda: OneSigned(Exact()),
            "layered": partial(Layered, Exact),
        },
        "codecs": {"sign-mean": SignMean()},
    }
)
