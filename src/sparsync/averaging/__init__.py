"""Average models instead of gradients: one family of schemes per file, one row each in ``schemes``."""

from sparsync.averaging.base import Averager, LocalSgd
from sparsync.averaging.eager import EagerSgd
from sparsync.averaging.gossip import AdPsgd, Dpsgd, Sgp
from sparsync.averaging.outer import OuterStep
from sparsync.averaging.period import AdaptivePeriod
from sparsync.averaging.published import OUTER_SETTINGS
from sparsync.averaging.wagma import Wagma

__all__ = [
    "OUTER_SETTINGS",
    "AdPsgd",
    "AdaptivePeriod",
    "Averager",
    "Dpsgd",
    "EagerSgd",
    "LocalSgd",
    "OuterStep",
    "Sgp",
    "Wagma",
]
