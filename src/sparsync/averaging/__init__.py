"""Who averages models with whom, and when: one scheme per file."""

from sparsync.averaging import graphs, groups
from sparsync.averaging.adpsgd import AdPsgd
from sparsync.averaging.allreduce import AllreduceAverage
from sparsync.averaging.base import Averager
from sparsync.averaging.dpsgd import Dpsgd
from sparsync.averaging.eager import EagerSgd
from sparsync.averaging.local import LocalSgd
from sparsync.averaging.outer import OuterStep
from sparsync.averaging.outer_settings import OUTER_SETTINGS
from sparsync.averaging.sgp import Sgp
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
    "graphs",
    "groups",
]
