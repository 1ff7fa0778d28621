"""Tables by name: algorithms, schemes, codecs and selectors, each declared in its own package.

Names are accepted in any spelling, and so are the names used in papers (``ALIASES``).
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from types import MappingProxyType
from typing import Any, Final, Generic, TypeVar, final

from sparsync.console import say
from sparsync.errors import ConfigurationError
from sparsync.names import fold, suggestion

__all__ = ["ALIASES", "ROOMS", "Table", "unknown"]

ROOMS: Final = (
    "sparsync.updates",
    "sparsync.published.oktopk",
    "sparsync.published.sparcml",
    "sparsync.published.redsync",
    "sparsync.published.wagma",
    "sparsync.published.baselines",
)
"""Packages that declare rows in their ``ROWS``, by kind and name."""

V = TypeVar("V")


@final
class Table(Mapping[str, V], Generic[V]):
    """The rows of one kind by name: those of the core, of the papers' packages, and of plug-ins.

    Names are looked up in any spelling, without regard to case and hyphens, and then among the
    ``ALIASES``.  Iteration yields each row once, under its declared name.

    A package of ``ROOMS`` declares ``ROWS[kind][name]``; other packages declare an entry point ``name``
    of the group ``sparsync.<kind>``.  These packages are imported only to look up a name that the core
    does not have, or to list all rows, so training with the defaults imports no paper's package.  An
    entry point whose name is already taken is left out of the list, and reported once.

    Args:
        kind: "algorithms", "schemes", "codecs", "selectors" or "aliases".
        own: the rows of the core.
        is_row: returns whether the object named by an entry point is a row.
        wanted: the kind of object that an entry point should name, for the error message.

    Raises:
        ConfigurationError: an entry point names an object that is not a row, or two packages declare the
            same name.
        KeyError: there is no row of that name.
    """

    def __init__(
        self, kind: str, own: Mapping[str, V], is_row: Callable[[Any], bool], wanted: str
    ) -> None:
        self.group = f"sparsync.{kind}"  # the group of entry points
        self._kind, self._own = kind, _folded(own)
        self._is_row, self._wanted = is_row, wanted

    def __getitem__(self, name: str) -> V:
        return self._find(name)[1]

    def name_of(self, name: str) -> str:
        """Return the declared name of a row, given any spelling of it or an alias.

        Raises:
            KeyError: there is no such row.

        Example:
            >>> from sparsync.presets import PRESETS
            >>> PRESETS.name_of("Dense"), PRESETS.name_of("TopkA")
            ('dense', 'allgather')
        """
        return self._find(name)[0]

    def __iter__(self) -> Iterator[str]:
        yield from (name for name, _ in [*self._own.values(), *self._rooms.values()])
        points = sorted(_points(self.group), key=lambda point: point.name)
        names = Counter(fold(point.name) for point in points)
        for point in points:
            folded = fold(point.name)
            # print only a notice: one package's mistake must not stop commands that list the table
            if (
                folded in self._own
                or folded in self._rooms
                or (self is not ALIASES and point.name in ALIASES)
            ):
                _leave_out(str(self._error(point, "a name that exists already")))
            elif names[folded] > 1:
                _leave_out(str(self._error(point, "a name that another package has taken")))
            else:
                yield point.name

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @functools.cached_property
    def _rooms(self) -> Mapping[str, tuple[str, V]]:
        found: dict[str, V] = {}
        # import rooms here, by name, because they import modules that import this module
        for room in ROOMS:
            found |= importlib.import_module(room).ROWS.get(self._kind, {})
        return _folded(found)

    def _find(self, name: str) -> tuple[str, V]:
        """Return a row's declared name and the row."""
        found = self._declared(fold(name))
        if found is None and self is not ALIASES and name in ALIASES:
            found = self._declared(fold(ALIASES[name]))
        if found is None:
            raise KeyError(name)
        return found

    def _declared(self, folded: str) -> tuple[str, V] | None:
        if folded in self._own:
            return self._own[folded]
        if folded in self._rooms:
            return self._rooms[folded]
        points = [p for p in _points(self.group) if fold(p.name) == folded]
        if len(points) > 1:  # taking the first would depend on sys.path, which ranks may not share
            raise self._error(points[1], "a name that another package has taken")
        return (points[0].name, self._load(points[0])) if points else None

    def _load(self, point: EntryPoint) -> V:
        row: V = point.load()
        if not self._is_row(row):
            raise self._error(point, f"a {type(row).__name__}")
        return row

    def _error(self, point: EntryPoint, found: str) -> ConfigurationError:
        package = f" of package {point.dist.name!r}" if point.dist else ""
        return ConfigurationError(
            f"entry point {point.name!r} = {point.value!r} of group {self.group!r}{package} is {found}; "
            f"name {self._wanted}, under a new name"
        )


@functools.cache  # the notice appears once per process, however often a table is listed
def _leave_out(why: str) -> None:
    say(f"left out: {why}")


def _points(group: str) -> EntryPoints:
    return _of_packages(group, tuple(sys.path))


@functools.lru_cache(maxsize=8)  # more than there are groups
def _of_packages(group: str, path: tuple[str, ...]) -> EntryPoints:
    """Read the entry points of all packages on the path; cached, because this takes 10 ms or more."""
    return entry_points(group=group)


def _folded(rows: Mapping[str, V]) -> Mapping[str, tuple[str, V]]:
    return MappingProxyType({fold(name): (name, row) for name, row in rows.items()})


ALIASES: Final[Table[str]] = Table(
    "aliases",
    {"quantized": "quantised"},
    lambda found: isinstance(found, str),
    "the name of a row, a text",
)
"""Names that papers use for rows; each paper's package declares its own, for any row of any table."""


def unknown(kind: str, given: object, known: Iterable[str]) -> ConfigurationError:
    """Return the error for an unknown name; its message suggests the nearest name, then lists all.

    Args:
        kind: "algorithm", "exchange", ..., for the message.
        given: the name.
        known: the existing names; the error may also suggest their aliases.

    Example:
        >>> str(unknown("exchange", "SSAR_Split_allgater", ["dense", "split-allgather"]))[:65]
        "unknown exchange 'SSAR_Split_allgater' (did you mean SSAR_Split_a"
    """
    # a name such as "packed, int8" would look like two names in the list, so show its hyphenated form
    names = [name.replace(", ", "-") for name in known]
    like = [*names, *(alias for alias, name in ALIASES.items() if name in names)]
    near = suggestion(given, like) if isinstance(given, str) else ""
    return ConfigurationError(f"unknown {kind} {given!r}{near}; choose one of {', '.join(names)}")
