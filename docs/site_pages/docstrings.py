"""Docstrings in parts, and as Markdown."""

from __future__ import annotations

import inspect
import re
from typing import Any

__all__ = ["arguments", "as_markdown", "parts", "summary"]

_INDENTED = ("Args", "Attributes", "Example", "Raises", "Returns")
_RUNNING = ("Cost", "State", "Differs from the paper", "References")
_LABEL = re.compile(rf"(?:^|(?<=   ))({'|'.join(_INDENTED + _RUNNING)}):[ \n]", re.MULTILINE)
_LINK = re.compile(r"`([^`<]+?)\s+<(https?://[^>]+)>`_")
_ARGUMENT = re.compile(r"^    (\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)


def parts(documented: Any) -> dict[str, str]:
    r"""Divide a docstring at its labels; what stands before the first one is under "".

    Example:
        >>> def f(): "Sums.\n\nCost: 2 messages.   State: none.\n\nReferences: X, 2020."
        >>> parts(f)
        {'': 'Sums.', 'Cost': '2 messages.', 'State': 'none.', 'References': 'X, 2020.'}
    """
    text, *rest = _LABEL.split((inspect.getdoc(documented) or "") + "\n")
    found = {"": text.strip()}
    for label, body in zip(rest[::2], rest[1::2], strict=True):
        if label in _INDENTED:
            body, rest = _indented(body)
            found[""] = f"{found['']}\n\n{rest}".strip()
        found[label] = inspect.cleandoc(body) if label == "Example" else body.strip("\n")
        if label in _RUNNING:
            found[label] = " ".join(body.split())
    return found


def _indented(body: str) -> tuple[str, str]:
    """Divide a section where its indentation ends."""
    end = re.search(r"^\S", body, re.MULTILINE)
    return (body[: end.start()], body[end.start() :].strip()) if end else (body, "")


def summary(documented: Any) -> str:
    """Return the first line of a docstring, as Markdown."""
    return as_markdown(parts(documented)[""].split("\n\n")[0].replace("\n", " "))


def arguments(documented: Any) -> dict[str, str]:
    r"""Return what a docstring says of every argument.

    Example:
        >>> def f(): "Sums.\n\nArgs:\n    a: the one,\n        and more.\n    b: the other."
        >>> arguments(f)
        {'a': 'the one, and more.', 'b': 'the other.'}
    """
    section = parts(documented).get("Args", "")
    return {name: as_markdown(" ".join(said.split())) for name, said in _ARGUMENT.findall(section)}


def as_markdown(text: str) -> str:
    """Turn the few marks of reStructuredText in docstrings into those of Markdown.

    Example:
        >>> as_markdown("``a`` in `Paper <https://example.org>`_, as follows::")
        '`a` in [Paper](https://example.org), as follows:'
    """
    text = _LINK.sub(lambda link: f"[{' '.join(link[1].split())}]({link[2]})", text)
    lines, literal = [], None  # the indentation that a literal block exceeds
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip())
        if literal is not None and line.strip() and indent <= literal:
            literal = None
        lines.append(line.replace("``", "" if literal is not None else "`"))
        if line.endswith("::"):
            literal = indent
            lines[-1] = "" if line.strip() == "::" else lines[-1][:-1]
    return "\n".join(lines)
