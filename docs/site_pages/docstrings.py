"""Divide docstrings into their parts, and convert them to Markdown."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

from site_pages.tables import table_row

__all__ = ["arguments", "as_markdown", "parts", "summary"]

_INDENTED = ("Args", "Attributes", "Example", "Raises", "Returns")
_RUNNING = ("Cost", "State", "Differs from the paper", "References")
_LABEL = re.compile(rf"(?:^|(?<=   ))({'|'.join(_INDENTED + _RUNNING)}):[ \n]", re.MULTILINE)
_LINK = re.compile(r"`([^`<]+?)\s+<(https?://[^>]+)>`_")
_RULE = re.compile(r"^( *)=+(?:  ?=+)+$")
_ARGUMENT = re.compile(r"^    (\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)


def parts(documented: Any) -> dict[str, str]:
    r"""Divide a docstring at its labels; the key "" holds the text before the first label.

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
    """Split a section at the end of its indented lines; return both parts."""
    end = re.search(r"^\S", body, re.MULTILINE)
    return (body[: end.start()], body[end.start() :].strip()) if end else (body, "")


def summary(documented: Any) -> str:
    """Return the first line of a docstring, as Markdown."""
    return as_markdown(parts(documented)[""].split("\n\n")[0].replace("\n", " "))


def arguments(documented: Any) -> dict[str, str]:
    r"""Return the descriptions of arguments in a docstring's ``Args`` section, by argument name.

    Example:
        >>> def f(): "Sums.\n\nArgs:\n    a: the one,\n        and more.\n    b: the other."
        >>> arguments(f)
        {'a': 'the one, and more.', 'b': 'the other.'}
    """
    section = parts(documented).get("Args", "")
    return {name: as_markdown(" ".join(said.split())) for name, said in _ARGUMENT.findall(section)}


def as_markdown(text: str) -> str:
    """Convert the reStructuredText marks that occur in docstrings to Markdown.

    Example:
        >>> as_markdown("``a`` in `Paper <https://example.org>`_, as follows::")
        '`a` in [Paper](https://example.org), as follows:'
    """
    text = _LINK.sub(lambda link: f"[{' '.join(link[1].split())}]({link[2]})", text)
    # a literal block continues while its lines are indented further than ``literal``
    lines, literal = [], None
    for line in _with_tables(text.split("\n")):
        indent = len(line) - len(line.lstrip())
        if literal is not None and line.strip() and indent <= literal:
            literal = None
        lines.append(line.replace("``", "" if literal is not None else "`"))
        if line.endswith("::"):
            literal = indent
            lines[-1] = "" if line.strip() == "::" else lines[-1][:-1]
    return "\n".join(lines)


def _with_tables(lines: list[str]) -> Iterator[str]:
    r"""Rewrite simple tables, with or without a head; a line with an empty first cell continues a row.

    Example:
        >>> list(_with_tables(["== ==", "a  b", "== ==", "1  2", "   3", "== ==", "", "end"]))
        ['| a | b |', '| --- | --- |', '| 1 | 2 3 |', '', 'end']
        >>> list(_with_tables(["== ==", "1  2", "== =="]))
        ['|  |  |', '| --- | --- |', '| 1 | 2 |']
    """
    rest = iter(lines)
    for line in rest:
        if not _RULE.match(line):
            yield line
            continue
        starts = [part.start() for part in re.finditer("=+", line)]
        rows: list[list[str]] = []
        head = 0  # number of rows above the second rule
        for inner in rest:
            if not inner.strip():
                break
            if _RULE.match(inner):
                head, closed = (len(rows), False) if not head else (head, True)
                continue
            cells = [inner[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)]
            if cells[0]:
                rows.append(cells)
            else:
                rows[-1] = [
                    " ".join(filter(None, pair)) for pair in zip(rows[-1], cells, strict=True)
                ]
        if not closed:  # a table with only two rules has no head
            rows.insert(0, [""] * len(starts))
        yield table_row(*rows[0])
        yield table_row(*["---"] * len(starts))
        yield from (table_row(*row) for row in rows[1:])
        if not inner.strip():
            yield inner
