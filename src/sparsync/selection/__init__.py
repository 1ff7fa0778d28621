"""Which entries are worth sending: one selector per file."""

from sparsync.selection.base import Selector, Watch
from sparsync.selection.binary_search import BinarySearch
from sparsync.selection.bins import Bins
from sparsync.selection.blockwise import Blockwise
from sparsync.selection.by_size import BySize
from sparsync.selection.everything import Everything
from sparsync.selection.exact import Exact, ExactState
from sparsync.selection.gaussian import GaussianK
from sparsync.selection.layered import Layered
from sparsync.selection.one_signed import OneSigned
from sparsync.selection.reused import Reused, ReusedState
from sparsync.selection.sampled import Sampled
from sparsync.selection.trimmed import Trimmed

__all__ = [
    "BinarySearch",
    "Bins",
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
    "Watch",
]
