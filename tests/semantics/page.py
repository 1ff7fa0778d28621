"""Write the tests' results as a page: ``python -m tests.semantics.page > docs/semantics.md``."""

from __future__ import annotations

import sys
import textwrap
from itertools import groupby

from . import test_gradients, test_loops, test_models
from .practice import COLUMNS, ELSEWHERE, PRACTICES, Practice

__all__ = ["page"]

FILES = (test_gradients, test_models, test_loops)  # their order is that of the page's sections

_BEGIN = """\
# Semantics: what works, and what is refused

This page lists practices of training scripts beyond `loss.backward(); optimizer.step()`, and shows
whether they work with each integration.

- *works*: the practice has the same meaning as without sparsync, and a test compares the two.
- *refused*: a one-line error says so before any harm is done.
- *-*: the practice does not exist with this integration.
- *untested*: the code accepts the practice, but no test has run all of it.

The columns stand for four integrations:

- `attach`: `sparsync.attach` with a DDP model, exchanging gradients;
- `updates`: `sparsync.attach` with the optimizer and `exchange="updates"`, the default for AdamW and
  Muon;
- `UpdateSpace`: the optimizers `UpdateSpaceSGD` and `UpdateSpaceAdamW` of `sparsync_papers`;
- `averaging`: the averagers of `sparsync.averaging`.

If everything is exchanged (density 1, period 1) with SGD, all four are equivalent to training in one
process with the batches of all ranks. Each set-up is therefore trained by all four integrations and in
one process, and the weights must agree. At density 10 %, every step must satisfy

    sum over ranks(residual + gradient) == world_size * average + sum over ranks(residual afterwards)

The tests use two ranks on CPUs, `torch.distributed` over gloo, and the transport that `attach` chooses
by default.

The tests in `tests/semantics` write this page: `python -m tests.semantics.page > docs/semantics.md`.
"""

_WRAP = textwrap.TextWrapper(
    104, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
)
_MARKS = {"works": "works", "refused": "refused", "untested": "*untested*"}


def page() -> str:
    """Return the page as Markdown."""
    parts = [_BEGIN]
    order = [module.__name__ for module in FILES]
    rows = sorted(PRACTICES, key=lambda row: order.index(row.file))
    for title, group in groupby(rows, lambda row: row.section):
        section = list(group)
        parts.append(f"\n## {title}\n\nTests: `{section[0].file.replace('.', '/')}.py`.\n")
        parts.append(f"\n| | {' | '.join(f'`{c}`' for c in COLUMNS)} |\n")
        parts.append("|---|" + "---|" * len(COLUMNS) + "\n")
        parts += [_line(row) for row in section]
        parts += [_notes(row) for row in section]
    return "".join(parts)


def _line(row: Practice) -> str:
    marks = [_MARKS[row.cells[c].partition(".")[0]] if c in row.cells else "-" for c in COLUMNS]
    return f"| {row.name} | {' | '.join(marks)} |\n"


def _notes(row: Practice) -> str:
    """Return the notes of a row; columns with the same note share it."""
    columns: dict[str, list[str]] = {}
    for column, said in row.cells.items():
        columns.setdefault(ELSEWHERE.sub(r" (`\1`: `\2`)", said), []).append(f"`{column}`")
    notes = [_WRAP.fill(f"- {', '.join(names)}: {said}") for said, names in columns.items()]
    title = f"**{row.name[0].upper()}{row.name[1:]}**" + (f" (`{row.test}`)" if row.test else "")
    return f"\n{title}\n\n" + "\n".join(notes) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
