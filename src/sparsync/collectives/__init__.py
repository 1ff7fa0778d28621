"""How selected entries are summed over ranks: one collective per file."""

from sparsync.collectives.allgather import Allgather
from sparsync.collectives.base import Collective, Reduced
from sparsync.collectives.budgeted import Budgeted
from sparsync.collectives.dense import Dense
from sparsync.collectives.halving import Halving
from sparsync.collectives.oktopk import OkTopk, OkTopkState

__all__ = [
    "Allgather",
    "Budgeted",
    "Collective",
    "Dense",
    "Halving",
    "OkTopk",
    "OkTopkState",
    "Reduced",
]
