"""Checks of the commands' options before anything starts: ranges of numbers, files, and memory.

A type in this module is annotated with a rule.  ``checked`` applies the rules to a command's parameters.
``check_fields`` applies them to a settings class, which can also be used without a command line.
"""

from __future__ import annotations

import functools
import inspect
import os
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Final,
    Protocol,
    TypeVar,
    final,
    get_args,
    get_type_hints,
    runtime_checkable,
)

from sparsync.errors import ConfigurationError, require

__all__ = [
    "INSTALL_PAPERS",
    "Bounds",
    "Bytes",
    "Elements",
    "Factor",
    "InputFile",
    "ModelSize",
    "Only",
    "Positive",
    "Ranks",
    "Rates",
    "Readable",
    "Rule",
    "Seconds",
    "Seed",
    "Size",
    "Steps",
    "Warmup",
    "check",
    "check_fields",
    "check_memory",
    "checked",
    "make_folder",
    "out_of_memory",
    "read_text",
    "within",
]

T = TypeVar("T")

INSTALL_PAPERS: Final = "pip install ./papers, in a clone of sparsync"

_MOST_READ = 64 << 20  # maximum number of bytes of a file that is read as text


def check(name: str, value: object, good: bool, expected: str) -> None:
    """Refuse the value of an option.

    Raises:
        ConfigurationError: the value is not ``good``; the message names the expected values.
    """
    if not good:
        raise ConfigurationError(f"{name} is {value}; give {expected}")


@runtime_checkable
class Rule(Protocol):
    """A requirement on a value in addition to its type, given in an annotation."""

    def refuse(self, name: str, value: Any, given: dict[str, Any]) -> None:
        """Raise a ``ConfigurationError`` if ``value``, never None, breaks the rule."""


@final
@dataclass(frozen=True)
class Bounds:
    """A number from ``least`` to ``most``.

    Args:
        least: the smallest number; with ``above``, the number must be larger than this.
        most: the largest number; a larger one is a mistake, or more than any machine can handle.

    Example:
        >>> Bounds(1, 9).refuse("ranks", 10, {})
        Traceback (most recent call last):
            ...
        sparsync.errors.ConfigurationError: ranks is 10; give at most 9
    """

    least: float
    most: float
    above: bool = False

    def refuse(self, name: str, value: Any, given: dict[str, Any]) -> None:
        """Refuse a number outside the bounds, and NaN."""
        check(name, value, not value > self.most, f"at most {self._shown(self.most)}")
        # NaN passes the first comparison and fails this one
        fits = value > self.least if self.above else value >= self.least
        least = self._shown(self.least)
        check(name, value, fits, f"a number > {least}" if self.above else f"at least {least}")

    @staticmethod
    def _shown(limit: float) -> str:
        return f"{limit:,}" if isinstance(limit, int) and limit < 10**7 else f"{limit:.4g}"


@final
@dataclass(frozen=True)
class Only:
    """An option that makes sense only together with one of the named options."""

    others: tuple[str, ...]
    default: Any = None

    def refuse(self, name: str, value: Any, given: dict[str, Any]) -> None:
        """Refuse a value that would be ignored."""
        flags = [f"--{other.replace('_', '-')}" for other in self.others]
        there = any(given.get(other) not in (None, False) for other in self.others)
        shown = f"--{name.replace('_', '-')}"
        require(
            value in (None, False, self.default) or there,
            f"{shown} is only for {' or '.join(flags)}; add that, or omit {shown}",
        )


@final
@dataclass(frozen=True)
class Readable:
    """A readable file, or with ``folder`` a readable folder."""

    folder: bool = False

    def refuse(self, name: str, value: Any, given: dict[str, Any]) -> None:
        """Refuse a path that the system rejects; whether it exists is checked later."""
        try:
            Path(value).stat()
        except (FileNotFoundError, NotADirectoryError):
            return
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            shown = str(value) if len(str(value)) < 80 else f"{str(value)[:80]}..."
            kind = "folder" if self.folder else "file"
            raise ConfigurationError(
                f"--{name.replace('_', '-')} '{shown}' cannot be read ({reason}); name a {kind} that can"
            ) from error


Ranks = Annotated[int, Bounds(1, 4096)]
Steps = Annotated[int, Bounds(1, 10**9)]
Warmup = Annotated[int, Bounds(0, 10**9)]
Seed = Annotated[int, Bounds(0, 2**32 - 1)]  # NumPy's generators have the smallest range
Size = Annotated[int, Bounds(1, 10**6)]  # lengths of a batch, a layer or a window
Elements = Annotated[int, Bounds(1, 10**12)]  # elements of a model
Bytes = Annotated[float, Bounds(0, 10**18)]
# larger than any real model, because nothing is allocated
ModelSize = Annotated[int, Bounds(0, 10**15)]
Positive = Annotated[float, Bounds(0, 10**9, above=True)]
Rates = Annotated[float, Bounds(0, 10**9)]  # learning rates, penalties and similar, which may be 0
Seconds = Annotated[float, Bounds(0, 10**6)]
Factor = Annotated[float, Bounds(1, 10**12)]
InputFile = Annotated[Path, Readable()]


# ---- where the rules are applied -------------------------------------------------------------------


def _rules(hint: Any) -> list[Rule]:
    """Return the rules of an annotation, even inside ``Annotated[Ranks | None, ...]``."""
    return [extra for extra in get_args(hint)[1:] if isinstance(extra, Rule)] + [
        rule for inner in get_args(hint) if get_args(inner) for rule in _rules(inner)
    ]


def _apply(hints: dict[str, Any], given: dict[str, Any]) -> None:
    for name, hint in hints.items():
        value = given.get(name)
        if value is not None:
            for rule in _rules(hint):
                rule.refuse(name, value, given)


def check_fields(settings: Any) -> None:
    """Refuse a dataclass instance if a field breaks the rules of its annotation.

    Raises:
        ConfigurationError: a value breaks a rule; the message names the field.
    """
    hints = get_type_hints(type(settings), include_extras=True)
    _apply(hints, {field.name: getattr(settings, field.name) for field in fields(settings)})


def checked(command: Callable[..., T]) -> Callable[..., T]:
    """Return a command that applies the rules of its parameters before it runs."""
    hints = get_type_hints(command, include_extras=True)

    @functools.wraps(command)
    def call(**given: Any) -> T:
        _apply(hints, given)
        return command(**given)

    # show typer the plain types: it uses them to convert, and does not know the rules
    shown = get_type_hints(command)
    for name, hint in hints.items():
        for extra in get_args(hint)[1:]:
            if hasattr(extra, "default_factory"):
                shown[name] = Annotated[shown[name], extra]
    signature = inspect.signature(command)
    whole = [one.replace(annotation=shown[name]) for name, one in signature.parameters.items()]
    call.__signature__ = signature.replace(parameters=whole)  # type: ignore[attr-defined]
    call.__annotations__ = shown
    return call


# ---- files and memory ------------------------------------------------------------------------------


def make_folder(path: Path, option: str, mode: int = 0o777) -> None:
    """Make a folder for files that will be written, unless it exists.

    Raises:
        ConfigurationError: a file is there, or the system does not allow it.
    """
    try:
        path.mkdir(mode=mode, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"{option} '{path}' is not a folder, and cannot be made ({error.strerror}); name another"
        ) from error
    writable = os.access(path, os.W_OK | os.X_OK)
    require(writable, f"{option} '{path}' cannot be written to; name a folder that can")


def read_text(path: Path, option: str, source: str) -> str:
    """Read a whole text file.

    Args:
        path: the file.
        option: the option that named it.
        source: where such files usually come from, for the message.

    Raises:
        ConfigurationError: the file cannot be read, is not text, is implausibly long, or might never end
            (a device or a pipe).
    """
    try:
        info = path.stat()
        reason = "" if info.st_size <= _MOST_READ else f"{info.st_size} bytes"
        if not stat.S_ISREG(info.st_mode) and not stat.S_ISDIR(info.st_mode):
            reason = "not a regular file"
        if not reason:
            return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        reason = "not text"
    except OSError as error:
        reason = error.strerror or str(error)
    raise ConfigurationError(f"cannot read {option} '{path}' ({reason}); give {source}")


def check_memory(what: str, nbytes: float, advice: str) -> None:
    """Refuse a run that needs more memory than this machine has.

    Args:
        what: what needs the memory, as a plural noun for the message.
        nbytes: minimum number of bytes, over all local ranks.
        advice: which options to change to need less memory.
    """
    try:
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # the system does not report it
        return
    require(
        nbytes <= there,
        f"{what} take at least {nbytes / 2**30:,.0f} GiB, this machine has {there / 2**30:,.0f}; "
        f"{advice}",
    )


def out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed; torch 2.13 raises a RuntimeError ("DefaultCPUAllocator")."""
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)


def within(name: str, values: Iterable[Any], bounds: Any) -> None:
    """Refuse a list if one of its numbers is outside the bounds of a type."""
    for value in values:
        _apply({name: bounds}, {name: value})
