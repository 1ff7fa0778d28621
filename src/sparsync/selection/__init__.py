"""Selectors, which choose the entries to send: one per file."""

from collections.abc import Callable
from typing import Final

from sparsync.selection.blockwise import Blockwise
from sparsync.selection.sampled import Sampled
from sparsync.selection.selector import Everything, Exact, ExactState, Selector
from sparsync.tables import Table

__all__ = ["SELECTORS", "Blockwise", "Everything", "Exact", "ExactState", "Sampled", "Selector"]

# a factory per selector, for the contract tests and for ``sparsync bench --selectors``
SELECTORS: Final[Table[Callable[[], Selector]]] = Table(
    "selectors",
    {"everything": Everything, "exact": Exact, "blockwise": Blockwise, "sampled": Sampled},
    callable,
    "a subclass of sparsync.selection.Selector",
)
