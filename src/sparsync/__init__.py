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

With SGD, this exchanges gradients, as above.  With AdamW, Muon and other optimizers, it exchanges
updates, i.e. the changes that the optimizer makes to the weights.  It sends them on every second step,
in two bits per element (more for small models).  In the drawing, updates then take the place of
``gradient`` (``docs/optimizers.md``).

Without a model, call ``comm = sparsync.connect()``, then ``sparsync.allreduce(vector, comm, k=...)``,
``sparsync.iallreduce`` for a future, or ``sparsync.allgather(vector, comm)``.
"""

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from sparsync.attach import attach
from sparsync.errors import ConfigurationError, SparsyncError
from sparsync.options import Compression, Monitoring, Transport

if TYPE_CHECKING:
    from sparsync.algorithm import Algorithm
    from sparsync.api import allgather, allreduce, connect, iallreduce
    from sparsync.checkpoint import load, save
    from sparsync.checkpoint.reshard import reshard
    from sparsync.collectives import Reduced
    from sparsync.feedback.correction import Correction
    from sparsync.gradients.sentinel import Sentinel
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
    "allgather",
    "allreduce",
    "attach",
    "connect",
    "iallreduce",
    "load",
    "reshard",
    "save",
    "simulate",
]

# These names are imported on first use, so that ``import sparsync`` takes little longer than ``import
# torch``. ``attach`` is not among them, because a later import of the submodule ``sparsync.attach``
# would rebind the name to the module.
_LATER = MappingProxyType(
    {
        "Algorithm": "sparsync.algorithm",
        "Correction": "sparsync.feedback.correction",
        "DenseVector": "sparsync.sparse",
        "Reduced": "sparsync.collectives",
        "Sentinel": "sparsync.gradients.sentinel",
        "SparseVector": "sparsync.sparse",
        "allgather": "sparsync.api",
        "allreduce": "sparsync.api",
        "connect": "sparsync.api",
        "iallreduce": "sparsync.api",
        "load": "sparsync.checkpoint",
        "reshard": "sparsync.checkpoint.reshard",
        "save": "sparsync.checkpoint",
        "simulate": "sparsync.transports.sim",
    }
)


# submodules that are available after ``import sparsync`` alone, e.g. as ``sparsync.presets.resolve``
_MODULES = frozenset(
    {
        "api",
        "averaging",
        "checkpoint",
        "elastic",
        "frameworks",
        "presets",
        "published",
        "testing",
        "updates",
    }
)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
