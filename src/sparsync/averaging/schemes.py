"""The table of averaging schemes, for the command line, the docs and the contract tests."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter
from typing import Any, Final

from torch import nn

from sparsync.averaging.averager import Averager, LocalSgd
from sparsync.names import parameters_of
from sparsync.tables import Table

__all__ = ["SCHEMES", "averaged_by", "options_of", "own_parameters"]


def _allreduce(model: nn.Module | None = None, **binding: Any) -> LocalSgd:
    return LocalSgd(model, period=1, **binding)


# each row can be called with or without a model, and with keyword arguments
SCHEMES: Final[Table[Callable[..., Averager]]] = Table(
    "schemes",
    {"allreduce": _allreduce, "local": LocalSgd},
    callable,
    "a subclass of sparsync.averaging.Averager",
)
_SHARED: Final = parameters_of(Averager)


def own_parameters(scheme: str) -> dict[str, Parameter]:
    """Return a scheme's own options by name, leaving out the options that every ``Averager`` has."""
    named = parameters_of(SCHEMES[scheme]).items()
    return {name: p for name, p in named if name not in _SHARED and p.kind != p.VAR_KEYWORD}


def averaged_by(scheme: str) -> str:
    """Return a sentence on how to use a scheme, for users who tried to use it as a preset."""
    name = SCHEMES.name_of(scheme)
    return (
        f"{name} averages models and is not an algorithm for gradients: give the plain module to "
        f'sparsync.averaging.schemes.SCHEMES["{name}"](model), call its step() after optimizer.step(), '
        "and finish() at the end (docs/averaging.md)"
    )


def options_of(scheme: str) -> dict[str, Any]:
    """Return the defaults of a scheme's own options, leaving out the options that every scheme has.

    Example:
        >>> options_of("local"), options_of("diloco")["period"]
        ({'period': 8}, 500)
    """
    return {name: p.default for name, p in own_parameters(scheme).items()}
