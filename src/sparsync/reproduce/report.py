"""An outcome as people read it, and as files: CSV of the rows, PNG of the panels, JSON of all."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from sparsync.reproduce.base import Artifact, Cell, Comparison, Outcome, Unavailable
from sparsync.reproduce.drawing import png

__all__ = [
    "Finished",
    "catalogue",
    "format_cell",
    "picture_of",
    "shown",
    "verdict",
    "write_files",
]

_MOST_ROWS = 40  # on the console
_QUICK = "scaled down to run in seconds: no statement about the paper"


@dataclass(frozen=True)
class Finished:
    """An artifact that was run.

    Attributes:
        artifact: what was run.
        outcome: None where it failed.
        seconds: that it took.
        seed: it was run with.
        quick: it was scaled down.
        error: why it failed, "" where it did not.
        picture: the panels as PNG; None where there are none or none was asked for.
    """

    artifact: Artifact
    outcome: Outcome | None
    seconds: float
    seed: int
    quick: bool
    error: str = ""
    picture: bytes | None = None

    @property
    def remark(self) -> str:
        """What a reader must know before the numbers: that they are of a quick run, or ""."""
        return _QUICK if self.quick else ""


def verdict(comparison: Comparison) -> str:
    """Say whether the conclusion is the paper's."""
    return "yes" if comparison.same else "no"


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


def shown(finished: Finished) -> Group:
    """Return what the console shows of a run: the comparison first, then rows, then settings."""
    artifact, outcome = finished.artifact, finished.outcome
    heading = Text(f"{artifact.name}: {artifact.title} ({artifact.paper})", style="bold")
    if outcome is None:
        return Group(heading, Text(f"failed: {finished.error}", style="bold"))
    parts = [heading, Text(f"The paper's conclusion: {artifact.conclusion}.")]
    if finished.remark:
        parts.append(Text(f"Quick: {finished.remark}."))
    settings = ", ".join(f"{name} {format_cell(v)}" for name, v in outcome.settings.items())
    return Group(
        *parts,
        _compared(outcome.comparisons),
        _rows(outcome.rows),
        Text(f"Settings: {settings}; seed {finished.seed}; {finished.seconds:.0f} s."),
        Text(f"Differs from the paper: {outcome.differs}"),
    )


def catalogue(artifacts: Sequence[Artifact], unavailable: Sequence[Unavailable]) -> Group:
    """Return the list of what can be reproduced, and of what cannot with the reason."""
    table = _table("name", "paper", "shows", "minutes")
    for artifact in artifacts:
        table.add_row(artifact.name, artifact.paper, artifact.title, f"{artifact.minutes:g}")
    missing = _table("not here", "paper", "reason")
    for item in unavailable:
        missing.add_row(item.what, item.paper, item.reason)
    return Group(table, missing)


def write_files(finished: Finished, folder: Path) -> list[Path]:
    """Write NAME.csv, NAME.json and, if there are panels, NAME.png; return their paths."""
    outcome, name = finished.outcome, finished.artifact.name
    if outcome is None:
        return []
    written = [folder / f"{name}.csv", folder / f"{name}.json"]
    with written[0].open("w", newline="", encoding="utf-8") as file:
        columns = list(dict.fromkeys(key for row in outcome.rows for key in row))
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(outcome.rows)
    text = json.dumps(_as_json(finished, outcome), indent=1, ensure_ascii=False)
    written[1].write_text(text + "\n", encoding="utf-8")
    if finished.picture is not None:
        written.append(folder / f"{name}.png")
        written[-1].write_bytes(finished.picture)
    return written


def picture_of(outcome: Outcome) -> bytes | None:
    """Draw the panels, if there are any."""
    return png(outcome.panels) if outcome.panels else None


def _as_json(finished: Finished, outcome: Outcome) -> dict[str, Any]:
    artifact = finished.artifact
    return {
        "name": artifact.name,
        "paper": artifact.paper,
        "title": artifact.title,
        "conclusion": artifact.conclusion,
        "quick": finished.quick,
        "seed": finished.seed,
        "seconds": finished.seconds,
        "settings": dict(outcome.settings),
        "differs": outcome.differs,
        "comparisons": [asdict(comparison) for comparison in outcome.comparisons],
        "rows": [dict(row) for row in outcome.rows],
    }


def _compared(comparisons: Sequence[Comparison]) -> Table:
    table = _table("what", "paper", "ours", "same\nconclusion?")
    for c in comparisons:
        paper = f"{c.stated.says}\n[{c.stated.where}]"
        answer = verdict(c) + (f": {c.why}" if c.why else "")
        table.add_row(*map(Text, (c.stated.what, paper, c.ours, answer)))
    return table


def _rows(rows: Sequence[Mapping[str, Cell]]) -> Table:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = _table(*columns)
    for row in rows[:_MOST_ROWS]:
        table.add_row(*(Text(format_cell(row.get(column))) for column in columns))
    if len(rows) > _MOST_ROWS:
        table.caption = f"and {len(rows) - _MOST_ROWS} rows more: --out DIR writes all"
    return table


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_lines=False, pad_edge=False)
    for column in columns:
        table.add_column(Text(column), overflow="fold")
    return table
