"""Algorithms on the command line: ``NAME`` or ``NAME:OPTION=VALUE,...``, separated by commas.

A comma-separated piece of the form ``OPTION=VALUE`` belongs to the algorithm before it, whose name ends
with a colon.  Any other piece starts the next algorithm::

    oktopk                                             one algorithm
    dense,wagma:group_size=4,dynamic=false,local       three: wagma has two options
    auto:candidates=dense+budgeted                     + separates names in a value

Case, hyphens, underscores and spaces in names do not matter, and the papers' names work too
(``sparsync.tables.ALIASES``).  Values have the types of the Python arguments: none, true, false,
numbers, words, names of codecs.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import Parameter
from typing import Any, Final, Literal, Union, get_args, get_origin

from sparsync.algorithm import Algorithm, Preset
from sparsync.averaging.schemes import SCHEMES, averaged_by, own_parameters
from sparsync.cli.launch import leads
from sparsync.console import say
from sparsync.errors import ConfigurationError, require
from sparsync.names import fold, no_option, text_of
from sparsync.presets import PRESETS, resolve
from sparsync.tables import Table, unknown
from sparsync.wire import CODECS, Codec

__all__ = ["OPTIONS_HELP", "Named", "algorithm_of", "labels", "named", "read_option"]

OPTIONS_HELP: Final = (
    "Papers' names work too, in any spelling. Options follow a colon: "
    "NAME:OPTION=VALUE,OPTION=VALUE; an unknown option lists all."
)

# a description of the values, and a function that reads a value or raises ValueError
_Reader = tuple[str, Callable[[str], Any]]


@dataclass(frozen=True)
class Named:
    """An algorithm with its options.

    Attributes:
        name: the algorithm's name in its table.
        options: values by name, as in Python.
        label: name and options as text that parses to the same algorithm; used for rows of tables
            and JSON.
    """

    name: str
    options: Mapping[str, Any]
    label: str


def labels(text: str, *tables: Table[Any], tell: bool = True, **limits: Any) -> tuple[str, ...]:
    """Split a list of algorithms; return a label for each distinct one, which ``named`` can parse.

    If a paper's name differs from the name that tables and JSON use, a line on standard error says so.

    Args:
        text: comma-separated names, with or without options.
        tables: as for ``named``.
        tell: whether to print that line.
        limits: as for ``named``.

    Raises:
        ConfigurationError: as for ``named``; or a piece is neither a name nor an option.

    Example:
        >>> labels("Dense, Ok-Topk:threshold_period=128,cap=none, TopkA, dense", PRESETS)
        ('dense', 'oktopk:threshold_period=128,cap=none', 'allgather')
    """
    found: list[str] = []
    for piece in text.split(","):
        head, equals, _ = piece.partition("=")
        if equals and ":" not in head:  # a colon after the sign is part of the value
            require(
                bool(found) and ":" in found[-1],
                f"{piece.strip()!r} follows no NAME: of an algorithm; write NAME:{piece.strip()}",
            )
            found[-1] += f",{piece}"
        else:
            found.append(piece)
    rows = [named(one, *tables, **limits) for one in found]
    if tell and leads():
        for typed, row in zip(found, rows, strict=True):
            given = typed.partition(":")[0].strip()
            if fold(given) != fold(row.name):
                say(f"{given} is {row.name} here")
    return tuple(dict.fromkeys(row.label for row in rows))  # two names may refer to the same row


def named(
    text: str,
    *tables: Table[Any],
    plain: Sequence[str] = (),
    among: Sequence[str] | None = None,
    decided: Sequence[str] = ("op",),
    kind: str = "algorithm",
) -> Named:
    """Parse one algorithm with its options.

    Args:
        text: its name, optionally followed by a colon and comma-separated options.
        tables: tables of presets, of schemes, or both.
        plain: additional names, without options.
        among: the rows of the tables that are allowed; None for all.
        decided: options that the command sets itself and that cannot be given.
        kind: the word for the algorithm in messages.

    Raises:
        ConfigurationError: a name or option is unknown (the message suggests the nearest names and
            lists all), or a value has the wrong type.

    Example:
        >>> named("WAGMA-SGD:group_size=4,dynamic=false,sync_period=none", SCHEMES).options
        {'group_size': 4, 'dynamic': False, 'sync_period': None}
    """
    given, colon, rest = text.strip().partition(":")
    given = given.strip()
    name, its, explained = _row(given, tables, plain, among, kind)
    parameters = {option: p for option, p in its.items() if option not in decided}
    options: dict[str, Any] = {}
    shown = []
    for piece in rest.split(",") if colon else ():
        key, equals, value = (part.strip() for part in piece.partition("="))
        require(bool(equals), f"{given}: {piece.strip()!r} is not OPTION=VALUE")
        option = next((known for known in parameters if fold(known) == fold(key)), None)
        if option is None:
            listed = partial(_described, parameters)
            raise no_option(name, [key], parameters, explained, listed)
        require(option not in options, f"{name}: {option} is given twice")
        options[option] = read_option(name, parameters[option], value)
        shown.append(f"{option}={value}")
    return Named(name, options, ":".join([name, *filter(None, [",".join(shown)])]))


def algorithm_of(text: str | Algorithm) -> Algorithm:
    """Return the algorithm that a text names (a preset, optionally with options).

    An ``Algorithm`` is returned unchanged.

    Example:
        >>> algorithm_of("SparCML:bits=none").options
        (('bits', None),)
    """
    if isinstance(text, Algorithm):
        return text
    found = named(text, PRESETS)
    return resolve(found.name, **found.options)


def _row(
    given: str,
    tables: Sequence[Table[Any]],
    plain: Sequence[str],
    among: Sequence[str] | None,
    kind: str,
) -> tuple[str, Mapping[str, Parameter], str]:
    """Return the name of a row, its options, and the docstrings that document them."""
    for name in plain:
        if fold(name) == fold(given):
            return name, {}, ""
    for table in tables:
        if given in table and (among is None or table.name_of(given) in among):
            name, row = table.name_of(given), table[given]
            if isinstance(row, Preset):
                return name, row.options, row.text
            return name, own_parameters(name), text_of(row)
    if SCHEMES not in tables and given in SCHEMES:
        raise ConfigurationError(
            f"{averaged_by(given)}; or on the command line: sparsync train --algorithm {given}"
        )
    known = among or [
        name for table in tables for name in (sorted(table) if table is PRESETS else table)
    ]
    raise unknown(kind, given, [*known, *plain])


# ---- values -----------------------------------------------------------------------------------------


def read_option(owner: str, parameter: Parameter, text: str) -> Any:
    """Convert a text to a value of the argument's type.

    Raises:
        ConfigurationError: the text fits none of the argument's types.

    Example:
        >>> cap = PRESETS["oktopk"].options["cap"]
        >>> read_option("oktopk", cap, "none"), read_option("oktopk", cap, "2")
        (None, 2.0)
    """
    readers = _readers(parameter.annotation)
    for _, read in readers:
        try:
            return read(text)
        except ValueError:
            continue
    expected = " or ".join(said for said, _ in readers)
    cure = f"give {expected}" if readers else "it can be given only in Python"
    raise ConfigurationError(f"{owner}: {parameter.name} is {text!r}; {cure}")


def _described(parameters: Mapping[str, Parameter], option: str) -> str:
    readers = _readers(parameters[option].annotation)
    return f"{option} ({' or '.join(said for said, _ in readers) or 'in Python alone'})"


def _readers(kind: Any) -> list[_Reader]:
    """Return a reader for each type of value, in the order in which to try them; words come last."""
    # the type is unknown; a string is an annotation that was not evaluated
    if isinstance(kind, str) or kind in (Any, Parameter.empty):
        kind = bool | int | float | str | None
    if get_origin(kind) in (Union, types.UnionType):
        found = [reader for member in get_args(kind) for reader in _readers(member)]
        return sorted(found, key=lambda reader: reader[1] in (str, _names))
    if get_origin(kind) is Literal:
        return [_word(str(value), value) for value in get_args(kind)]
    if kind is types.NoneType:
        return [_word("none", None)]
    if kind is bool:
        return [_word("true", True), _word("false", False)]
    if kind is str:
        return [("a word", str)]
    if kind in (int, float):
        return [("a whole number" if kind is int else "a number", kind)]
    if get_origin(kind) in (Sequence, list, tuple) and str in get_args(kind):
        return [("names with + between", _names)]
    if isinstance(get_origin(kind) or kind, type) and issubclass(get_origin(kind) or kind, Codec):
        fitting = {name: codec for name, codec in CODECS.items() if _fits(codec, kind)}
        # a comma would end the option
        return [_word(name.replace(", ", "-"), codec) for name, codec in fitting.items()]
    return []


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split("+"))


def _word(word: str, value: Any) -> _Reader:
    """Return a reader that accepts one word, in any spelling, and returns ``value``."""

    def read(text: str) -> Any:
        if fold(text) != fold(word):
            raise ValueError(text)
        return value

    return word, read


def _fits(codec: Codec[Any], kind: Any) -> bool:
    """Return whether a codec is of a class and for its kind of vectors, e.g. ``Codec[SparseVector]``."""
    generic = [base for cls in type(codec).__mro__ for base in getattr(cls, "__orig_bases__", ())]
    of_its_vectors = not get_args(kind) or get_args(kind) in map(get_args, generic)
    return isinstance(codec, get_origin(kind) or kind) and of_its_vectors
