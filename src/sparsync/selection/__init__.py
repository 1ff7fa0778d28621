"""Which entries are worth sending."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Final

from sparsync.selection.base import Everything, Exact, ExactState, Selector
from sparsync.selection.blockwise import Blockwise
from sparsync.selection.estimated import GaussianK, Sampled
from sparsync.selection.redsync import BinarySearch, BySize, Layered, OneSigned, Trimmed
from sparsync.selection.reused import Reused, ReusedState

__all__ = [
    "SELECTORS",
    "BinarySearch",
    "Blockwise",
    "BySize",
    "Everything",
    "Exact",
    "ExactState",
    "GaussianK",
    "Layered",
    "OneSigned",
    "Reused",
    "ReusedState",
    "Sampled",
    "Selector",
    "Trimmed",
]

# what the contracts check and ``sparsync bench selectors`` measures: a row per selector
SELECTORS: Final[Mapping[str, Callable[[], Selector]]] = MappingProxyType(
    {
        "everything": Everything,
        "exact": Exact,
        "reused": Reused,
        "blockwise": Blockwise,
        "gaussian": GaussianK,
        "sampled": Sampled,
        "trimmed": Trimmed,
        "binary search": BinarySearch,
        "by size": BySize,
        "one-signed": lambda: OneSigned(Exact()),
        "layered": partial(Layered, Exact),
    }
)
