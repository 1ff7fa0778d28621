"""Show an outcome on the console, and write it: CSV of the rows, PNG of the panels, JSON of all."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from sparsync_papers.reproduce import Artifact, Cell, Comparison, Outcome, Unavailable

_MOST_ROWS = 40  # on the console


@dataclass(frozen=True)
class Finished:
    """An artifact that was run."""

    artifact: Artifact  # what was run
    outcome: Outcome | None  # None where it failed
    seconds: float  # that it took
    seed: int  # it was run with
    quick: bool  # it was scaled down
    error: str = ""  # why it failed, "" where it did not
    # the panels as PNG; None where there are none or none was asked for
    picture: bytes | None = None

    def notes(self, outcome: Outcome) -> list[str]:
        """Return the conclusion, settings and differences, a sentence or two each."""
        used = ", ".join(f"{name} {format_cell(v)}" for name, v in outcome.settings.items())
        quick = "Quick: scaled down to run in seconds: no statement about the paper."
        return [
            f"The paper's conclusion: {self.artifact.conclusion}.",
            *([quick] if self.quick else []),
            f"Settings: {used}; seed {self.seed}; {self.seconds:.0f} s.",
            f"Differs from the paper: {outcome.differs}",
        ]


def answer(comparison: Comparison) -> str:
    """Say whether the conclusion is the paper's, with the reason or remark."""
    why = f": {comparison.why}" if comparison.why else ""
    return ("yes" if comparison.same else "no") + why


def format_cell(value: Cell) -> str:
    """Write a value for a table.

    Example:
        >>> format_cell(0.123456), format_cell(12), format_cell(True), format_cell(None)
        ('0.1235', '12', 'yes', '-')
    """
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def table_of(outcome: Outcome) -> tuple[list[str], list[list[str]]]:
    """Return the columns of the rows, and their cells as text."""
    columns = list(dict.fromkeys(key for row in outcome.rows for key in row))
    return columns, [[format_cell(row.get(key)) for key in columns] for row in outcome.rows]


def shown(finished: Finished) -> Group:
    """Return a run for the console: the comparison first, then rows, then settings."""
    artifact, outcome = finished.artifact, finished.outcome
    heading = Text(f"{artifact.name}: {artifact.title} ({artifact.paper})", style="bold")
    if outcome is None:
        return Group(heading, Text(f"failed: {finished.error}", style="bold"))
    compared = [(c.what, f"{c.says}\n[{c.where}]", c.ours, answer(c)) for c in outcome.comparisons]
    columns, lines = table_of(outcome)
    rows = _table(columns, lines[:_MOST_ROWS])
    if len(lines) > _MOST_ROWS:
        rows.caption = f"and {len(lines) - _MOST_ROWS} rows more: --out DIR writes all"
    *before, settings, differs = map(Text, finished.notes(outcome))
    comparison = _table(("what", "paper", "this run", "same\nconclusion?"), compared)
    return Group(heading, *before, comparison, rows, settings, differs)


def catalogue(artifacts: Sequence[Artifact], unavailable: Sequence[Unavailable]) -> Group:
    """Return the list of what can be reproduced, and of what cannot with the reason."""
    there = [(a.name, a.paper, a.title, f"{a.minutes:g}") for a in artifacts]
    missing = [(item.what, item.paper, item.reason) for item in unavailable]
    return Group(
        _table(("name", "paper", "shows", "minutes"), there),
        _table(("not here", "paper", "reason"), missing),
    )


def write_files(finished: Finished, folder: Path) -> list[Path]:
    """Write NAME.csv, NAME.json and, if there are panels, NAME.png; return their paths."""
    outcome, artifact = finished.outcome, finished.artifact
    if outcome is None:
        return []
    written = [folder / f"{artifact.name}.csv", folder / f"{artifact.name}.json"]
    with written[0].open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, table_of(outcome)[0])
        writer.writeheader()
        writer.writerows(outcome.rows)
    content = {
        **{key: getattr(artifact, key) for key in ("name", "paper", "title", "conclusion")},
        **{key: getattr(finished, key) for key in ("quick", "seed", "seconds")},
        "settings": dict(outcome.settings),
        "differs": outcome.differs,
        "comparisons": [
            {
                "stated": {"what": c.what, "says": c.says, "where": c.where},
                "ours": c.ours,
                "same": c.same,
                "why": c.why,
            }
            for c in outcome.comparisons
        ],
        "rows": [dict(row) for row in outcome.rows],
    }
    text = json.dumps(content, indent=1, ensure_ascii=False)
    written[1].write_text(text + "\n", encoding="utf-8")
    if finished.picture is not None:
        written.append(folder / f"{artifact.name}.png")
        written[-1].write_bytes(finished.picture)
    return written


def page(finished: Sequence[Finished], unavailable: Sequence[Unavailable]) -> str:
    """Write all outcomes as Markdown: the table of all comparisons first, then every artifact."""
    compared = [c for run in finished if run.outcome for c in run.outcome.comparisons]
    same, failed = sum(c.same for c in compared), [run for run in finished if run.outcome is None]
    parts = [
        "# The papers, reproduced",
        f"{len(finished)} artifacts, {same} of {len(compared)} conclusions are the papers'"
        + (f"; {len(failed)} failed." if failed else "."),
        _markdown(
            ("artifact", "what", "paper", "this run", "same conclusion?"),
            [
                (
                    run.artifact.name,
                    c.what,
                    f"{c.says} ({c.where})",
                    c.ours,
                    answer(c),
                )
                for run in finished
                if run.outcome is not None
                for c in run.outcome.comparisons
            ]
            + [(run.artifact.name, f"failed: {run.error}", "", "", "") for run in failed],
        ),
    ]
    for run in finished:
        if run.outcome is None:
            continue
        name, title = run.artifact.name, run.artifact.title
        parts += [f"## {name}: {title} ({run.artifact.paper})", *run.notes(run.outcome)]
        if run.picture is not None:
            parts.append(f"![{title}]({name}.png)")
        parts.append(_markdown(*table_of(run.outcome)))
    missing = [(item.what, item.paper, item.reason) for item in unavailable]
    parts += ["## What cannot be done here", _markdown(("what", "paper", "why not"), missing)]
    return "\n\n".join(parts) + "\n"


def _markdown(columns: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """Write a table; a bar in a cell would end it."""
    columns = list(columns)
    rows = [columns, ["---"] * len(columns), *lines]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)


def _table(columns: Iterable[str], lines: Iterable[Iterable[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_lines=False, pad_edge=False)
    for column in columns:
        table.add_column(Text(column), overflow="fold")
    for line in lines:
        table.add_row(*map(Text, line))
    return table
