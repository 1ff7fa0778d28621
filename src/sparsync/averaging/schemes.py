"""The table of averaging schemes: the command line, the docs and the contracts read these rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any, Final, final

from torch import nn

from sparsync.averaging.base import Averager, LocalSgd
from sparsync.averaging.eager import EagerSgd
from sparsync.averaging.gossip import AdPsgd, Dpsgd, Sgp
from sparsync.averaging.outer import OuterStep
from sparsync.averaging.published import OUTER_SETTINGS
from sparsync.averaging.wagma import Wagma
from sparsync.errors import require

__all__ = ["SCHEMES", "options_of"]

_GROUP: Final = "sparsync.schemes"  # entry points of other packages: a name for an Averager


def _allreduce(model: nn.Module | None = None, **binding: Any) -> LocalSgd:
    return LocalSgd(model, period=1, **binding)


# each is called with a model, or without one, and with keyword arguments
_OWN: Final = MappingProxyType[str, Callable[..., Averager]](
    {
        "allreduce": _allreduce,
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


@final
class _Schemes(Mapping[str, Callable[..., Averager]]):
    """Makers of averagers by name: this package's, then those of installed packages."""

    def __getitem__(self, name: str) -> Callable[..., Averager]:
        if name in _OWN:
            return _OWN[name]
        for point in entry_points(group=_GROUP, name=name):
            made: Callable[..., Averager] = point.load()
            require(
                callable(made),
                f"entry point {name!r} = {point.value!r} of group {_GROUP!r} is a "
                f"{type(made).__name__}; name a subclass of sparsync.averaging.Averager",
            )
            return made
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*_OWN, *sorted(p.name for p in entry_points(group=_GROUP))]))

    def __len__(self) -> int:
        return len(list(iter(self)))


SCHEMES: Final = _Schemes()
_SHARED: Final = frozenset(inspect.signature(Averager).parameters) | {"binding"}


def options_of(scheme: str) -> dict[str, Any]:
    """Return a scheme's own options and their defaults: those of every ``Averager`` are not among them.

    Example:
        >>> options_of("local"), options_of("diloco")["period"]
        ({'period': 8}, 500)
    """
    parameters = inspect.signature(SCHEMES[scheme]).parameters
    return {name: p.default for name, p in parameters.items() if name not in _SHARED}
