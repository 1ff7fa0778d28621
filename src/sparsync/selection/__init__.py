"""Which entries are worth sending: one selector per file."""

from sparsync.selection.base import Selector
from sparsync.selection.everything import Everything
from sparsync.selection.exact import Exact
from sparsync.selection.reused import Reused, ReusedState

__all__ = ["Everything", "Exact", "Reused", "ReusedState", "Selector"]
