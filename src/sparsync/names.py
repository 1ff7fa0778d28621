"""Names of rows and of their options: how they may be spelt, and which are nearest to one of no row."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from inspect import Parameter
from typing import Any, Final

from sparsync.errors import ConfigurationError

__all__ = ["fold", "no_option", "parameters_of", "suggestion", "text_of"]

# hyphens as they are typed and as papers print them, underscores, spaces, the commas in names of codecs
_BETWEEN: Final = re.compile(r"[-_,\s\u2010-\u2015]+")


def fold(name: str) -> str:
    """Return a name without its spelling: case, hyphens, underscores, spaces and commas do not count.

    Example:
        >>> fold("DSAR_Split_allgather"), fold("Ok-Topk"), fold("Local SGD")
        ('dsarsplitallgather', 'oktopk', 'localsgd')
    """
    return _BETWEEN.sub("", name).casefold()


def suggestion(given: str, known: Iterable[str], text: str = "") -> str:
    """Return the names that were probably meant, in brackets; "" if none is like the given one.

    Args:
        given: a name that nobody has.
        known: those that there are.
        text: a docstring.  If its ``Args`` explain one of the names by the given word, that is meant:
            papers call their settings by a letter.

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
    """Return the error of options that do not exist: it names the nearest, and lists those that do.

    Args:
        owner: does not have the options.
        unknown: their names.
        known: names of the options that it has.
        text: a docstring that explains these, for ``suggestion``.
        shown: writes an option for the list.
    """
    known = sorted(known)
    asked = ", ".join(f"{name}{suggestion(name, known, text)}" for name in unknown)
    there = ", ".join(map(shown, known)) or "none"
    return ConfigurationError(f"{owner} has no option {asked}; it has {there}")


def parameters_of(function: Callable[..., Any]) -> dict[str, Parameter]:
    """Return the parameters of a function or a class by name, with their types evaluated if possible."""
    try:
        return dict(inspect.signature(function, eval_str=True).parameters)
    except NameError:  # a type that its module imports for type checkers alone
        return dict(inspect.signature(function).parameters)


def text_of(*functions: Any) -> str:
    """Return the docstrings of functions or classes; of a partial one, that of the function inside."""
    return "\n".join(inspect.getdoc(getattr(one, "func", one)) or "" for one in functions)
