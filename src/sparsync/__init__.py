"""sparsync: data-parallel training that is fast on networks too slow for dense allreduce.

The life of a gradient::

    gradient --accumulate--> accumulated --select--> selected --exchange--> total --apply--> average
                 ^                                      |   (encode, move, merge, choose, decode)
                 |                                      v
              residual <------------retain---------- delivered

* accumulate: ``accumulated = residual + gradient``                     (``sparsync.residual``)
* select: the entries worth sending                                     (``sparsync.selection``)
* exchange: sum over ranks; entries travel as bytes     (``sparsync.collectives``, ``sparsync.wire``)
* retain: ``residual = accumulated - delivered``, nothing is lost       (``sparsync.residual``)
* apply: ``average = total / world_size``, back into the gradient       (``sparsync.reducer``)

One line in a DDP script::

    sync = sparsync.attach(ddp_model, density=0.01)

Without a model: ``comm = sparsync.connect()``, then ``sparsync.allreduce(vector, comm, k=...)``.
"""

from sparsync.api import allreduce, connect
from sparsync.collectives.base import Reduced
from sparsync.errors import (
    CommunicationError,
    ConfigurationError,
    DeadlineError,
    DeadlockError,
    NonFiniteGradientError,
    PeerError,
    SparsyncError,
    WireFormatError,
)
from sparsync.integrations.ddp import DdpSync, attach
from sparsync.integrations.optimizer import UpdateSpaceSGD
from sparsync.presets import Algorithm
from sparsync.sparse import DenseVector, SparseVector
from sparsync.transports.sim import Links, simulate

__version__ = "0.1.0.dev0"

__all__ = [
    "Algorithm",
    "CommunicationError",
    "ConfigurationError",
    "DdpSync",
    "DeadlineError",
    "DeadlockError",
    "DenseVector",
    "Links",
    "NonFiniteGradientError",
    "PeerError",
    "Reduced",
    "SparseVector",
    "SparsyncError",
    "UpdateSpaceSGD",
    "WireFormatError",
    "allreduce",
    "attach",
    "connect",
    "simulate",
]
