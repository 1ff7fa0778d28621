"""The table of averaging schemes: the command line, the docs and the contracts read these rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

from torch import nn

from sparsync.averaging.averager import Averager, LocalSgd
from sparsync.tables import Table

__all__ = ["SCHEMES", "options_of"]


def _allreduce(model: nn.Module | None = None, **binding: Any) -> LocalSgd:
    return LocalSgd(model, period=1, **binding)


# each is called with a model, or without one, and with keyword arguments
SCHEMES: Final[Table[Callable[..., Averager]]] = Table(
    "schemes",
    {"allreduce": _allreduce, "local": LocalSgd},
    callable,
    "a subclass of sparsync.averaging.Averager",
)
_SHARED: Final = frozenset(inspect.signature(Averager).parameters) | {"binding"}


def options_of(scheme: str) -> dict[str, Any]:
    """Return a scheme's own options and their defaults, without those of every ``Averager``.

    Example:
        >>> options_of("local"), options_of("diloco")["period"]
        ({'period': 8}, 500)
    """
    parameters = inspect.signature(SCHEMES[scheme]).parameters
    return {name: p.default for name, p in parameters.items() if name not in _SHARED}
