"""Compare names of rows and options in any spelling, and suggest a known name for an unknown one."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from inspect import Parameter
from typing import Any, Final, TypeVar

from sparsync.errors import ConfigurationError

__all__ = ["fold", "naming_options", "no_option", "parameters_of", "suggestion", "text_of"]

C = TypeVar("C")

# Separators that are ignored: hyphens, as typed or as printed in papers; underscores; spaces; and the
# commas in codec names.
_BETWEEN: Final = re.compile(r"[-_,\s\u2010-\u2015]+")


def fold(name: str) -> str:
    """Return a name normalised for comparison, without case, hyphens, underscores, spaces and commas.

    Example:
        >>> fold("DSAR_Split_allgather"), fold("Ok-Topk"), fold("Local SGD")
        ('dsarsplitallgather', 'oktopk', 'localsgd')
    """
    return _BETWEEN.sub("", name).casefold()


def suggestion(given: str, known: Iterable[str], text: str = "") -> str:
    """Return the names that were probably meant, in parentheses, or "" if none is close.

    Args:
        given: an unknown name.
        known: the known names.
        text: a docstring.  If its ``Args`` explain a known name by the given word, that name is
            suggested, because users may know a setting by its letter in a paper.

    Example:
        >>> suggestion("oktpk", ["dense", "oktopk"])
        ' (did you mean oktopk?)'
        >>> suggestion("tau", ["group_size", "sync_period"], "    sync_period: tau, in steps.")
        ' (did you mean sync_period?)'
        >>> suggestion("best", ["dense", "oktopk"])
        ''
    """
    spelt = {fold(name): name for name in known}
    said = re.findall(rf"^ +(\w+): {re.escape(given)}(?![\w'])", text, re.MULTILINE)
    near = [name for name in dict.fromkeys(said) if name in spelt.values()] or [
        spelt[name] for name in difflib.get_close_matches(fold(given), spelt)
    ]
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def no_option(
    owner: str,
    unknown: Sequence[str],
    known: Iterable[str],
    text: str = "",
    shown: Callable[[str], str] = str,
) -> ConfigurationError:
    """Return the error for unknown options; its message suggests the nearest ones, then lists all.

    Args:
        owner: the object that lacks the options.
        unknown: the unknown names.
        known: names of the options that exist.
        text: a docstring that explains these options, for ``suggestion``.
        shown: formats an option for the list.
    """
    known = sorted(known)
    asked = ", ".join(f"{name}{suggestion(name, known, text)}" for name in unknown)
    there = ", ".join(map(shown, known)) or "none"
    return ConfigurationError(f"{owner} has no option {asked}; it has {there}")


def naming_options(kind: type[C]) -> type[C]:
    """Decorate a dataclass to refuse unknown keywords with an error that suggests the nearest options.

    A decorator keeps the signature, which ``**kwargs`` would hide, so type checkers still reject
    unknown keywords.

    Raises:
        ConfigurationError: the constructor got an unknown keyword; a plain dataclass would raise
            ``TypeError``.

    Example:
        >>> from dataclasses import dataclass
        >>> @naming_options
        ... @dataclass
        ... class Options:
        ...     period: int = 1
        >>> Options(perod=2)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        sparsync.errors.ConfigurationError: Options has no option perod (did you mean period?); ...
    """
    make: Any = kind.__init__
    known = list(inspect.signature(kind).parameters)

    @functools.wraps(make)
    def init(self: Any, *args: Any, **given: Any) -> None:
        unknown = [name for name in given if name not in known]
        if unknown:
            raise no_option(kind.__name__, unknown, known, text_of(kind))
        make(self, *args, **given)

    setattr(kind, "__init__", init)  # noqa: B010 - mypy takes an assignment for an override
    return kind


def parameters_of(function: Callable[..., Any]) -> dict[str, Parameter]:
    """Return the parameters of a function or class by name, with evaluated annotations if possible."""
    try:
        return dict(inspect.signature(function, eval_str=True).parameters)
    except NameError:  # an annotation names a type that its module imports only for type checkers
        return dict(inspect.signature(function).parameters)


def text_of(*functions: Any) -> str:
    """Return the docstrings of functions or classes; a partial counts as the function inside it."""
    return "\n".join(inspect.getdoc(getattr(one, "func", one)) or "" for one in functions)
