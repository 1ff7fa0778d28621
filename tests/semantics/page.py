"""Writes the matrix as a page: ``python -m tests.semantics.page > docs/semantics.md``."""

from __future__ import annotations

import sys
import textwrap

from .matrix import COLUMNS, Cell, Row
from .table import TABLE

__all__ = ["page"]

_BEGIN = """\
# What keeps its meaning

What training scripts do besides `loss.backward(); optimizer.step()`, and what becomes of it.

- *works*: it means what it means without sparsync, and a test compares the two.
- *refused*: an error says so, in one line, before anything is wrong.
- *-*: there is no such thing there.
- *untested*: the code takes it, but no test has run it whole.

The columns: `sparsync.attach` to a DDP model; `sparsync.LocalUpdates`; `UpdateSpaceSGD` and
`UpdateSpaceAdamW`; the averagers of `sparsync.averaging`.

How it is compared: with everything exchanged (density 1, period 1) and SGD, all four are the same
training, that of one process which has the batches of all ranks. So each case is trained by all of them
and by that process, and weights must agree. Then, at density 10 %, what came in is compared with what was
delivered and what was kept, on every step:

    sum over ranks(residual + gradient) == world_size * average + sum over ranks(residual afterwards)

Two ranks on CPU; `torch.distributed` over gloo, the exchange as `attach` chooses.

This page and the tests are made of one table, `tests/semantics/table.py`;
`python -m tests.semantics.page > docs/semantics.md` writes it anew.
"""

_WRAP = textwrap.TextWrapper(
    104, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
)
_MARKS = {"works": "works", "refused": "refused", "not applicable": "-", "untested": "*untested*"}


def page() -> str:
    """Return the page as Markdown."""
    parts = [_BEGIN]
    for title, rows in TABLE.items():
        parts.append(f"\n## {title}\n\n| | {' | '.join(f'`{c}`' for c in COLUMNS)} |\n")
        parts.append("|---|" + "---|" * len(COLUMNS) + "\n")
        parts += [_line(row) for row in rows]
        parts += [_notes(row) for row in rows]
    return "".join(parts)


def _line(row: Row) -> str:
    marks = " | ".join(_MARKS[cell.verdict] for cell in row.cells.values())
    return f"| {row.name} | {marks} |\n"


def _notes(row: Row) -> str:
    """Say of every column what happens; columns of which the same is said, together."""
    together: dict[Cell, list[str]] = {}
    for column, cell in row.cells.items():
        if cell.verdict != "not applicable":
            together.setdefault(cell, []).append(column)
    notes = [f"\n**{row.name[0].upper() + row.name[1:]}**\n\n"]
    for cell, columns in together.items():
        names = ", ".join(f"`{column}`" for column in columns)
        note = f"- {names}: {cell.verdict}. {cell.says} ({_where(cell.proof)})"
        notes.append(_WRAP.fill(note) + "\n")
    return "".join(notes)


def _where(proof: str) -> str:
    if proof.startswith("case "):
        return f"`tests/semantics/cases.py`: {proof.removeprefix('case ')}"
    path, _, name = proof.partition("::") if "::" in proof else proof.partition(".")
    return f"`{path}`: `{name}`" if "::" in proof else f"`tests/semantics/{path}.py`: `{name}`"


if __name__ == "__main__":
    sys.stdout.write(page())
