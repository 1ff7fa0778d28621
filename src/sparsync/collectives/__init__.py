"""How selected entries are summed over ranks: one collective per file."""

from sparsync.collectives.allgather import Allgather
from sparsync.collectives.base import Collective, Reduced
from sparsync.collectives.budgeted import Budgeted
from sparsync.collectives.changing import Changing, ChangingState
from sparsync.collectives.dense import Dense
from sparsync.collectives.gtopk import GTopk
from sparsync.collectives.halving import Halving
from sparsync.collectives.oktopk import OkTopk, OkTopkState
from sparsync.collectives.quantised import Quantised
from sparsync.collectives.sparcml import (
    Dynamic,
    RecursiveDoubling,
    Ring,
    SparcmlAuto,
    SparcmlAutoState,
    split_allgather,
)

__all__ = [
    "Allgather",
    "Budgeted",
    "Changing",
    "ChangingState",
    "Collective",
    "Dense",
    "Dynamic",
    "GTopk",
    "Halving",
    "OkTopk",
    "OkTopkState",
    "Quantised",
    "RecursiveDoubling",
    "Reduced",
    "Ring",
    "SparcmlAuto",
    "SparcmlAutoState",
    "split_allgather",
]
