"""How selected entries are summed over ranks: one collective per file."""

from sparsync.collectives.allgather import Allgather
from sparsync.collectives.base import Collective, Reduced
from sparsync.collectives.budgeted import Budgeted
from sparsync.collectives.dense import Dense
from sparsync.collectives.dynamic import Dynamic
from sparsync.collectives.gtopk import GTopk
from sparsync.collectives.halving import Halving
from sparsync.collectives.oktopk import OkTopk, OkTopkState
from sparsync.collectives.quantized_allgather import QuantizedAllgather
from sparsync.collectives.recursive_doubling import RecursiveDoubling
from sparsync.collectives.ring import Ring
from sparsync.collectives.sparcml_auto import SparcmlAuto, SparcmlAutoState
from sparsync.collectives.split_allgather import SplitAllgather

__all__ = [
    "Allgather",
    "Budgeted",
    "Collective",
    "Dense",
    "Dynamic",
    "GTopk",
    "Halving",
    "OkTopk",
    "OkTopkState",
    "QuantizedAllgather",
    "RecursiveDoubling",
    "Reduced",
    "Ring",
    "SparcmlAuto",
    "SparcmlAutoState",
    "SplitAllgather",
]
