"""Tables by name: algorithms, schemes, codecs and selectors, each declared in its own room."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any, Final, Generic, TypeVar, final

from sparsync.errors import ConfigurationError

__all__ = ["ROOMS", "Table"]

ROOMS: Final = (
    "sparsync.updates",
    "sparsync.published.oktopk",
    "sparsync.published.sparcml",
    "sparsync.published.redsync",
    "sparsync.published.wagma",
    "sparsync.published.baselines",
)
"""Packages that declare rows in ``ROWS``, by kind and name."""

V = TypeVar("V")


@final
class Table(Mapping[str, V], Generic[V]):
    """The rows of one kind by name: those of the axis, of the rooms, and of other packages.

    A room declares ``ROWS[kind][name]``; another package declares an entry point ``name`` of the group
    ``sparsync.<kind>``.  Rooms and packages are imported when a name is looked up that the axis does not
    have itself, or when all are listed: training with the defaults imports no paper's room.

    Args:
        kind: "algorithms", "schemes", "codecs" or "selectors".
        own: the rows of the axis itself.
        is_row: tells whether the object that an entry point names is a row.
        wanted: the kind of object that an entry point should name, for the error message.

    Raises:
        ConfigurationError: an entry point names another kind of object, or (when all are listed) takes a
            name that exists.
        KeyError: there is no row of that name.
    """

    def __init__(
        self, kind: str, own: Mapping[str, V], is_row: Callable[[Any], bool], wanted: str
    ) -> None:
        self.group = f"sparsync.{kind}"  # of entry points
        self._kind, self._own = kind, MappingProxyType(dict(own))
        self._is_row, self._wanted = is_row, wanted

    def __getitem__(self, name: str) -> V:
        if name in self._own:
            return self._own[name]
        if name in self._rooms:
            return self._rooms[name]
        first, *others = [*entry_points(group=self.group, name=name)] or [None]
        if others:  # which comes first depends on the path, and ranks' paths may differ
            raise self._error(others[0], "a name that another package has taken")
        if first is None:
            raise KeyError(name)
        return self._load(first)

    def __iter__(self) -> Iterator[str]:
        yield from self._own
        yield from self._rooms
        known = {*self._own, *self._rooms}
        for point in sorted(entry_points(group=self.group), key=lambda point: point.name):
            if point.name in known:
                raise self._error(point, "a name that exists already")
            known.add(point.name)
            yield point.name

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @functools.cached_property
    def _rooms(self) -> Mapping[str, V]:
        found: dict[str, V] = {}
        for room in ROOMS:  # imported by name, and late: rooms import modules that import this one
            found |= importlib.import_module(room).ROWS.get(self._kind, {})
        return MappingProxyType(found)

    def _load(self, point: EntryPoint) -> V:
        row: V = point.load()
        if not self._is_row(row):
            raise self._error(point, f"a {type(row).__name__}")
        return row

    def _error(self, point: EntryPoint, found: str) -> ConfigurationError:
        return ConfigurationError(
            f"entry point {point.name!r} = {point.value!r} of group {self.group!r} is {found}; name "
            f"{self._wanted}, under a new name"
        )
