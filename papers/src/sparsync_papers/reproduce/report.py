"""Show an outcome on the console; write its rows as CSV, its panels as PNG, and everything as JSON."""

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

from sparsync_papers.reproduce import Artifact, Cell, Outcome, Unavailable

_MOST_ROWS = 60  # largest number of rows on the console; oktopk-table1 has 56
_COMPARED = ("what", "paper", "this run", "same conclusion?", "seeds, steps")

Lines = Sequence[tuple[str, ...]]


@dataclass(frozen=True)
class Finished:
    """The record of an artifact's run."""

    artifact: Artifact  # the artifact that was run
    outcome: Outcome | None  # None if the run failed
    seconds: float  # duration of the run
    seed: int  # seed of the run
    quick: bool  # whether the run was scaled down
    error: str = ""  # the reason for a failure, "" if none
    # the panels as PNG; None if there are no panels or no picture was requested
    picture: bytes | None = None

    @property
    def heading(self) -> str:
        """The artifact's name and title, and its paper."""
        return f"{self.artifact.name}: {self.artifact.title} ({self.artifact.paper})"

    @property
    def counts(self) -> dict[str, Cell]:
        """The numbers of seeds and steps behind the answers, if there are any.

        An answer from a formula has no seeds, and only training has steps.
        """
        used = {} if self.outcome is None else self.outcome.settings
        return {"seeds": used.get("seeds", 1), "steps": used.get("steps")}


def evidence(seeds: Cell, steps: Cell) -> str:
    """Format the evidence for an answer, i.e. the numbers of seeds and steps, as a cell.

    Example:
        >>> evidence(3, 600), evidence(1, None), evidence(0, None)
        ('3, 600', '1, -', 'formula')
    """
    return f"{format_cell(seeds)}, {format_cell(steps)}" if seeds else "formula"


def _notes(finished: Finished, outcome: Outcome) -> list[str]:
    """Return sentences with the conclusion, the settings and the differences."""
    used = ", ".join(f"{name} {format_cell(v)}" for name, v in outcome.settings.items())
    quick = "Quick: scaled down to run in seconds: no statement about the paper."
    return [
        f"The paper's conclusion: {finished.artifact.conclusion}.",
        *([quick] if finished.quick else []),
        f"Settings: {used}; seed {finished.seed}; {finished.seconds:.0f} s.",
        f"Differs from the paper: {outcome.differs}",
    ]


def format_cell(value: Cell) -> str:
    """Format a value for a table.

    Example:
        >>> format_cell(0.123456), format_cell(12), format_cell(True), format_cell(None)
        ('0.1235', '12', 'yes', '-')
    """
    if value is None or isinstance(value, bool):
        return {None: "-", True: "yes", False: "no"}[value]
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _rows(outcome: Outcome) -> tuple[list[str], Lines]:
    """Return the names of the columns, and the rows as text."""
    columns = list(outcome.rows[0])
    return columns, [tuple(format_cell(row[key]) for key in columns) for row in outcome.rows]


def _compared(finished: Finished, outcome: Outcome) -> Lines:
    """Return the rows of the comparison with the paper; ``_COMPARED`` names the columns."""
    rests_on = evidence(**finished.counts)
    return [
        (
            c.what,
            f"{c.says} ({c.where})",
            c.ours,
            ("yes" if c.same else "no") + (f": {c.why}" if c.why else ""),
            rests_on,
        )
        for c in outcome.comparisons
    ]


def shown(finished: Finished) -> Group:
    """Format a run for the console: the comparison, then the rows, then the settings."""
    outcome, heading = finished.outcome, Text(finished.heading, style="bold")
    if outcome is None:
        return Group(heading, Text(f"failed: {finished.error}", style="bold"))
    columns, lines = _rows(outcome)
    rows = _table(columns, lines[:_MOST_ROWS])
    if len(lines) > _MOST_ROWS:
        rows.caption = f"and {len(lines) - _MOST_ROWS} more rows: --out DIR writes all"
    *before, settings, differs = map(Text, _notes(finished, outcome))
    return Group(
        heading, *before, _table(_COMPARED, _compared(finished, outcome)), rows, settings, differs
    )


def catalogue(artifacts: Sequence[Artifact], unavailable: Sequence[Unavailable]) -> Group:
    """List the artifacts, and the figures that cannot be reproduced, with reasons."""
    there = [
        (a.name, a.paper, a.title, f"{a.minutes:g}", f"{a.steps:,}" if a.steps else "")
        for a in artifacts
    ]
    missing = [(item.what, item.paper, item.reason) for item in unavailable]
    return Group(
        _table(("name", "paper", "shows", "minutes", "steps"), there),
        _table(("not here", "paper", "reason"), missing),
    )


def write_files(finished: Finished, folder: Path) -> list[Path]:
    """Write NAME.csv, NAME.json and, if there are panels, NAME.png; return their paths."""
    outcome, artifact = finished.outcome, finished.artifact
    if outcome is None:
        return []
    written = [folder / f"{artifact.name}.csv", folder / f"{artifact.name}.json"]
    with written[0].open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(outcome.rows[0]))
        writer.writeheader()
        writer.writerows(outcome.rows)
    content = {
        **{key: getattr(artifact, key) for key in ("name", "paper", "title", "conclusion")},
        **{key: getattr(finished, key) for key in ("quick", "seed", "seconds")},
        "settings": dict(outcome.settings),
        **finished.counts,
        "differs": outcome.differs,
        "comparisons": [
            {
                "stated": {"what": c.what, "says": c.says, "where": c.where},
                **{key: getattr(c, key) for key in ("ours", "same", "why")},
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
    """Return a Markdown page: first a table of all comparisons, then a section per artifact."""
    done = [(run, run.outcome) for run in finished if run.outcome is not None]
    same = [c.same for _, outcome in done for c in outcome.comparisons]
    failed = [(r.artifact.name, f"failed: {r.error}", "", "", "", "") for r in finished if r.error]
    compared = [(run.artifact.name, *line) for run, found in done for line in _compared(run, found)]
    parts = [
        "# The papers, reproduced",
        f"{len(finished)} artifacts, {sum(same)} of {len(same)} conclusions are the papers'"
        + (f"; {len(failed)} failed." if failed else "."),
        _markdown(("artifact", *_COMPARED), [*compared, *failed]),
    ]
    for run, outcome in done:
        parts += [f"## {run.heading}", *_notes(run, outcome)]
        if run.picture is not None:
            parts.append(f"![{run.artifact.title}]({run.artifact.name}.png)")
        parts.append(_markdown(*_rows(outcome)))
    missing = [(item.what, item.paper, item.reason) for item in unavailable]
    parts += ["## What cannot be done here", _markdown(("what", "paper", "why not"), missing)]
    return "\n\n".join(parts) + "\n"


def _markdown(columns: Sequence[str], lines: Lines) -> str:
    """Format a Markdown table; vertical bars in cells are replaced, because they would end the cell."""
    rows: list[Sequence[str]] = [columns, ["---"] * len(columns), *lines]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)


def _table(columns: Iterable[str], lines: Lines) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_lines=False, pad_edge=False)
    for column in columns:
        table.add_column(Text(column), overflow="fold")
    for line in lines:
        table.add_row(*map(Text, line))
    return table
