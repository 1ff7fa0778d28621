"""Collectives: algorithms that sum selected entries over the ranks, one per file."""

from sparsync.collectives.allgather import Allgather
from sparsync.collectives.budgeted import Budgeted
from sparsync.collectives.changing import Changing, ChangingState
from sparsync.collectives.collective import Collective, Reduced
from sparsync.collectives.dense import Dense
from sparsync.collectives.halving import Halving
from sparsync.collectives.quantised import Quantised

__all__ = [
    "Allgather",
    "Budgeted",
    "Changing",
    "ChangingState",
    "Collective",
    "Dense",
    "Halving",
    "Quantised",
    "Reduced",
]
