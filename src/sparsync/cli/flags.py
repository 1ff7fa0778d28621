"""Options of the commands, each declared once on the settings field that it sets.

A settings class is a frozen dataclass.  A field annotated with ``typer.Option`` becomes an option of the
command decorated with ``@takes(class)``; the option's help text documents the field.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from decimal import Decimal
from inspect import Parameter
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

from typer import BadParameter, Option

from sparsync.cli.lab_links import describe_links
from sparsync.cli.launch import launched_ranks
from sparsync.cli.values import Bounds, Readable
from sparsync.errors import ConfigurationError

__all__ = [
    "CurveKeys",
    "Json",
    "Lab",
    "Network",
    "Plot",
    "Timeout",
    "Transport",
    "TransportOrSim",
    "names",
    "numbers",
    "option",
    "ranks_option",
    "takes",
    "whole",
]

_LONGEST = 30  # maximum number of digits of a whole number
# suffixes of model sizes, e.g. in 14.7M or 7B
_POWERS = MappingProxyType({"k": "e3", "K": "e3", "M": "e6", "G": "e9", "B": "e9"})

T = TypeVar("T")

Transport = Annotated[
    str, Option(help="torch (gloo), zmq, mpi (by mpiexec), or auto: the library's default.")
]
TransportOrSim = Annotated[
    str | None,
    Option(
        help="sim: virtual ranks and clock; torch: local processes over gloo; zmq: over ZeroMQ; mpi: "
        "over MPI, by mpiexec; auto: the library's default of these.",
        show_default="sim; with --lab auto",
    ),
]
Network = Annotated[str, Option(help="The network that sim simulates: bandwidth,latency.")]
Lab = Annotated[
    str | None,
    Option(help="Put every rank on a real link of this rate, e.g. 100mbit (Linux)."),
]
CurveKeys = Annotated[
    Path | None,
    Readable(folder=True),
    Option(help="Folder of keys: zmq encrypts and refuses unknown ranks."),
]
# at least 0.1 s, because a store or a socket needs a fraction of a second even if nothing is slow
Timeout = Annotated[float, Bounds(0.1, 1e6), Option(help="Seconds that a rank waits for another.")]
Json = Annotated[Path | None, Option(help="Write the measurements to this file.")]
Plot = Annotated[Path | None, Option(help="Plot them in this file (.png, .pdf or .svg).")]


def option(text: str, default: str | bool = True) -> Any:
    """Declare an option by its help text, which shows ``default`` in place of the default value."""
    return Option(help=text, show_default=default)


def whole(text: str) -> int:
    """Return a text such as ``7e9`` or ``14.7M`` as a whole number.

    Example:
        >>> whole("7e9"), whole("1_000"), whole("1.5k"), whole("7B")
        (7000000000, 1000, 1500, 7000000000)
    """
    try:
        return int(text)
    except ValueError:
        with suppress(ArithmeticError):  # "nan", "1e999999999", or no number at all
            power = _POWERS.get(text[-1:])
            found = Decimal(text[:-1] + power if power else text)
            if found.adjusted() < _LONGEST and found == found.to_integral_value():
                return int(found)
        raise BadParameter(f"{text!r} is not a whole number") from None


def ranks_option(default: int) -> Any:
    """Declare ``--ranks``; its default is the launcher's number of ranks, or else ``default``."""
    return Option(
        help="World size: local processes, or virtual ranks.",
        default_factory=lambda: launched_ranks(default),
        show_default=f"{default}, or the launcher's",
    )


# the options that describe links, added to every command with --lab; their values are merged into the
# value of --lab
_LINKS = tuple(
    Parameter(
        name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, Option(help=text)]
    )
    for name, kind, text in (
        ("up", str | None, "Rate at which a rank sends; the link's unless given."),
        ("down", str | None, "Rate at which a rank receives; the link's unless given."),
        ("rtt", str | None, "Round trip between two ranks, e.g. 20ms."),
        ("loss", str | None, "Packets lost between two ranks, each way, e.g. 0.1%."),
        ("jitter", str | None, "Variation of the RTT, either way, e.g. 2ms."),
        ("link", list[str] | None, "Link of one rank: RANK=RATE[,RTT[,LOSS]], e.g. 3=10mbit,80ms."),
    )
)


def takes(settings: type) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Add a settings class's options to a command, which receives their values as ``**fields``.

    Args:
        settings: a dataclass; a field without ``typer.Option`` is not an option.

    The command's own parameters remain options: positional ones come first in the help, keyword-only
    ones last.  With a field or a parameter ``lab``, the options that describe its links are added.
    """
    hints = get_type_hints(settings, include_extras=True)
    declared = [
        Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)
        for field in fields(settings)
        for hint in [hints[field.name]]
        for option in _options_in(hint)
        for default in [Parameter.empty if option.default_factory else field.default]
    ]

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        annotations = get_type_hints(function, include_extras=True)
        shaped = "lab" in {**hints, **annotations}
        own = [
            parameter.replace(annotation=annotations[parameter.name])
            for parameter in inspect.signature(function).parameters.values()
            if parameter.kind is not Parameter.VAR_KEYWORD
        ]
        first = [p.replace(kind=Parameter.KEYWORD_ONLY) for p in own if p.kind != p.KEYWORD_ONLY]
        last = [p for p in own if p.kind == p.KEYWORD_ONLY]

        @functools.wraps(function)
        def command(**given: Any) -> T:
            if shaped:
                links = {one.name: given.pop(one.name, None) for one in _LINKS}
                given["lab"] = describe_links(given.get("lab"), **links)
            return function(**given)

        links = _LINKS if shaped else ()
        signature = inspect.Signature([*first, *declared, *links, *last])
        command.__signature__ = signature  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
        return command

    return decorate


def _options_in(hint: Any) -> list[Any]:
    """Return an annotation's ``typer.Option`` in a list, which is empty if there is none."""
    return [extra for extra in get_args(hint)[1:] if hasattr(extra, "default_factory")]


# ---- lists of values --------------------------------------------------------------------------------


def names(text: str) -> tuple[str, ...]:
    """Split a list at its commas.

    Example:
        >>> names("dense, oktopk")
        ('dense', 'oktopk')
    """
    return tuple(part.strip() for part in text.split(","))


def numbers(name: str, text: str, convert: Callable[[str], T]) -> tuple[T, ...]:
    """Read a comma-separated list of numbers.

    Example:
        >>> numbers("size", "1000, 2000", int)
        (1000, 2000)
    """
    try:
        return tuple(convert(part) for part in names(text))
    except (ValueError, OverflowError) as error:
        kind = "whole numbers" if convert is int else "numbers"
        raise ConfigurationError(f"{name} is {text!r}; give {kind} separated by commas") from error
