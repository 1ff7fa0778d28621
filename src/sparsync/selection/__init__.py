"""Which entries are worth sending: one selector per file."""

from sparsync.selection.base import Selector, Watch
from sparsync.selection.blockwise import Blockwise
from sparsync.selection.everything import Everything
from sparsync.selection.exact import Exact, ExactState
from sparsync.selection.gaussian import GaussianK
from sparsync.selection.reused import Reused, ReusedState

__all__ = [
    "Blockwise",
    "Everything",
    "Exact",
    "ExactState",
    "GaussianK",
    "Reused",
    "ReusedState",
    "Selector",
    "Watch",
]
