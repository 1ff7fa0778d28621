"""The schemes of averaging by name, as the command line has them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

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

__all__ = ["SCHEMES", "options_of"]

# each is called with a model, or without one, and with keyword arguments
SCHEMES: Mapping[str, Callable[..., Averager]] = MappingProxyType(
    {
        "allreduce": AllreduceAverage,
        "local": LocalSgd,
        "dpsgd": Dpsgd,
        "sgp": Sgp,
        "wagma": Wagma,
        "adpsgd": AdPsgd,
        "eager-solo": partial(EagerSgd, quorum="solo"),
        "eager-majority": partial(EagerSgd, quorum="majority"),
        **{name: partial(OuterStep, **settings) for name, settings in OUTER_SETTINGS.items()},
    }
)


def options_of(scheme: str) -> dict[str, Any]:
    """Return a scheme's own options and their defaults: those of every ``Averager`` are not among them.

    Example:
        >>> options_of("local"), options_of("diloco")["period"]
        ({'period': 8}, 500)
    """
    parameters = inspect.signature(SCHEMES[scheme]).parameters
    return {name: p.default for name, p in parameters.items() if name not in _SHARED}


_SHARED = frozenset(inspect.signature(Averager).parameters) | {"binding"}
