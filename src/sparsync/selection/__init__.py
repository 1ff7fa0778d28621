"""Which entries are worth sending: one selector per file."""

from collections.abc import Callable
from typing import Final

from sparsync.selection.blockwise import Blockwise
from sparsync.selection.sampled import Sampled
from sparsync.selection.selector import Everything, Exact, ExactState, Selector
from sparsync.tables import Table

__all__ = ["SELECTORS", "Blockwise", "Everything", "Exact", "ExactState", "Sampled", "Selector"]

# a maker per selector: the contracts check each of them, and ``sparsync bench selectors`` measures them
SELECTORS: Final[Table[Callable[[], Selector]]] = Table(
    "selectors",
    {"everything": Everything, "exact": Exact, "blockwise": Blockwise, "sampled": Sampled},
    callable,
    "a subclass of sparsync.selection.Selector",
)
