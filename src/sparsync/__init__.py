"""sparsync: data-parallel training that is fast on networks too slow for dense allreduce.

The life of a gradient::

    gradient --accumulate--> accumulated --select--> selected --exchange--> total --apply--> average
                 ^                                      |   (encode, move, merge, choose, decode)
                 |                                      v
              residual <------------retain---------- delivered

* accumulate: ``accumulated = residual + gradient``                     (``sparsync.feedback.residual``)
* select: the entries worth sending                                     (``sparsync.selection``)
* exchange: sum over ranks; entries travel as bytes     (``sparsync.collectives``, ``sparsync.wire``)
* retain: ``residual = accumulated - delivered``, nothing is lost       (``sparsync.feedback.residual``)
* apply: ``average = total / world_size``, back into the gradient       (``sparsync.feedback.reducer``)

One line in a training script::

    sync = sparsync.attach(model, optimizer)

With SGD this exchanges gradients, as above; with AdamW, Muon and others what the optimizer has changed,
every second step in one bit per element, as ``gradient`` of the same drawing (``docs/optimizers.md``).

Without a model: ``comm = sparsync.connect()``, then ``sparsync.allreduce(vector, comm, k=...)``, or
``sparsync.iallreduce`` for a future.
"""

from sparsync.api import allreduce, connect, iallreduce
from sparsync.checkpoint import load, save
from sparsync.checkpoint.reshard import reshard
from sparsync.collectives.base import Reduced
from sparsync.errors import ConfigurationError, SparsyncError
from sparsync.feedback.correction import Correction
from sparsync.integrations.attach import attach
from sparsync.integrations.options import Compression, Monitoring, Transport
from sparsync.integrations.sentinel import Sentinel
from sparsync.presets import Algorithm
from sparsync.sparse import DenseVector, SparseVector
from sparsync.transports.sim import simulate

__version__ = "0.1.0.dev0"

__all__ = [
    "Algorithm",
    "Compression",
    "ConfigurationError",
    "Correction",
    "DenseVector",
    "Monitoring",
    "Reduced",
    "Sentinel",
    "SparseVector",
    "SparsyncError",
    "Transport",
    "allreduce",
    "attach",
    "connect",
    "iallreduce",
    "load",
    "reshard",
    "save",
    "simulate",
]
