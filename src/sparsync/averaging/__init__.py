"""Average models instead of gradients: one family of schemes per file, one row each in ``schemes``."""

from sparsync.averaging.adpsgd import AdPsgd
from sparsync.averaging.base import Averager
from sparsync.averaging.eager import EagerSgd
from sparsync.averaging.gossip import Dpsgd, Sgp
from sparsync.averaging.local import AllreduceAverage, LocalSgd
from sparsync.averaging.outer import OUTER_SETTINGS, OuterStep
from sparsync.averaging.wagma import Wagma

__all__ = [
    "OUTER_SETTINGS",
    "AdPsgd",
    "AllreduceAverage",
    "Averager",
    "Dpsgd",
    "EagerSgd",
    "LocalSgd",
    "OuterStep",
    "Sgp",
    "Wagma",
]
