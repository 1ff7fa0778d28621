"""Time to dense's loss as the planner predicts it, against the frontier's curves and lab.

    python benchmarks/time_to_loss.py     (seconds; writes benchmarks/time_to_loss.md)

Nothing is trained: `frontier/results.jsonl` has the curves, and the seconds per step on real links with
the computation next to them. Ratios of steps are those of `steps.py`'s fit to all other tasks. No
rate of links is held out: the planner's constants of work were set by hand to the cells at 100 Mbit/s,
with those at 10 Mbit/s in view, and the fit's features were chosen by the errors that this page shows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from frontier.report import table
from frontier.results import Results, Row
from rich.console import Console
from steps import DATA, left_out, observations

from sparsync.cli.links import parse_links
from sparsync.cost.machine import Machine
from sparsync.cost.training import METHODS, step_seconds

OUT = Path(__file__).parent / "time_to_loss.md"
PARTS = (2 / 3, 1.0)  # of dense's run
LEAST_ALPHA = 50e-6  # seconds per message of links without a distance
NEAR, ALIKE = 1.25, 1.1  # times another, either way; times the best


@dataclass(frozen=True)
class Cell:
    """A method on links; seconds are per step."""

    task: str
    ranks: int
    batch: int
    lab: str
    method: str
    optimizer: str
    measured: float
    predicted: float


@dataclass(frozen=True)
class Time:
    """A cell's time to the loss that dense has after a part of its run."""

    cell: Cell
    steps: int
    part: float
    measured: float
    predicted: float

    @property
    def place(self) -> tuple[Any, ...]:
        """Where methods compete."""
        one = self.cell
        return one.task, one.ranks, one.batch, one.lab, one.optimizer, self.steps, self.part


def cells(rows: Sequence[Row]) -> list[Cell]:
    """Return all methods that the planner knows and the lab has timed; the last run of each."""
    known, found = {method.name: method for method in METHODS}, {}
    for row in rows:
        if not row["lab"] or not row.get("rest") or row["method"] not in known:
            continue
        (link, *_), size = parse_links(row["lab"], row["ranks"]), row["parameters"]
        beta = 8 / min(link.up, link.down)
        machine = Machine(alpha=max(link.rtt / 2, LEAST_ALPHA), beta=beta)
        method, computation = known[row["method"]], row["computation"]
        seconds = step_seconds(method, size, row["ranks"], machine, computation)[0]
        key = (row["task"], row["ranks"], row["batch"], row["lab"], method.name, row["optimizer"])
        found[key] = Cell(*key, row["rest"]["seconds"], seconds)
    return list(found.values())


def times(rows: Sequence[Row], timed: Sequence[Cell]) -> Iterator[Time]:
    """Yield measured and predicted times wherever steps and seconds were measured; dense's, too."""
    for cell in timed:
        place = (cell.task, cell.ranks, cell.batch)
        if cell.method == "dense":
            lengths = {
                r["steps"]
                for r in rows
                if not r["lab"]
                and r["method"] == "dense"
                and (r["task"], r["ranks"], r["batch"], r["optimizer"]) == (*place, cell.optimizer)
            }
            for steps in sorted(lengths):
                for part in PARTS:
                    yield Time(
                        cell,
                        steps,
                        part,
                        part * steps * cell.measured,
                        part * steps * cell.predicted,
                    )
    for seen, logarithm in left_out(observations(rows)):
        for cell in timed:
            here = (cell.task, cell.ranks, cell.batch, cell.method, cell.optimizer)
            there = (seen.task, seen.ranks, seen.batch, seen.method, seen.optimizer)
            if here == there and seen.part in PARTS and not seen.bound:
                aim = seen.part * seen.steps
                yield Time(
                    cell,
                    seen.steps,
                    seen.part,
                    aim * seen.ratio * cell.measured,
                    aim * math.exp(logarithm) * cell.predicted,
                )


def share(found: Sequence[Cell] | Sequence[Time]) -> str:
    """Write the share of predictions that differ from the measurement by 25 % at most."""
    ratios = [one.predicted / one.measured for one in found]
    return f"{fmean(1 / NEAR <= ratio <= NEAR for ratio in ratios):.0%} of {len(ratios)}"


def report(rows: Sequence[Row]) -> str:
    """Write the page."""
    timed = cells(rows)
    found = list(times(rows, timed))
    picks = []
    for place in dict.fromkeys(time.place for time in found):
        here = [time for time in found if time.place == place]
        if len(here) > 1:
            picked, best = (
                min(here, key=lambda t: getattr(t, n)) for n in ("predicted", "measured")
            )
            picks.append((place, picked, best))
    others = [time for time in found if time.cell.method != "dense"]
    good = fmean(picked.measured <= ALIKE * best.measured for _, picked, best in picks)
    lines = [
        "# Time to a loss: planned and measured",
        "",
        "`python benchmarks/time_to_loss.py`",
        "",
        (__doc__ or "").split("\n\n", 2)[2].strip(),
        "",
        f"Within 25 %: seconds per step {share(timed)}, times to a loss {share(found)}, without dense's",
        f"own {share(others)}. The pick is the best of what was measured, or within 10 % of it, in",
        f"{good:.0%} of {len(picks)}.",
        "",
        "## Seconds per step",
        "",
        *table(
            ["task, links", "method", "measured", "predicted", "ratio"],
            [
                [
                    f"{c.task}, {c.lab}",
                    f"{c.method}, {c.optimizer}",
                    f"{c.measured:.3f}",
                    f"{c.predicted:.3f}",
                    f"{c.predicted / c.measured:.2f}",
                ]
                for c in timed
            ],
        ),
        "",
        "## Seconds to the loss of dense, the task left out of the fit",
        "",
        *table(
            ["task, links", "method", "dense's steps", "measured", "predicted", "ratio"],
            [
                [
                    f"{t.cell.task}, {t.cell.lab}",
                    f"{t.cell.method}, {t.cell.optimizer}",
                    f"{t.part * t.steps:.0f} of {t.steps}",
                    f"{t.measured:.3g}",
                    f"{t.predicted:.3g}",
                    f"{t.predicted / t.measured:.2f}",
                ]
                for t in found
            ],
        ),
        "",
        "## Picks",
        "",
        *table(
            ["task, links", "pick", "best", "dense's steps", "pick over best, measured"],
            [
                [
                    f"{best.cell.task}, {best.cell.lab}",
                    picked.cell.method,
                    best.cell.method,
                    f"{best.part * best.steps:.0f} of {best.steps}",
                    f"{picked.measured / best.measured:.2f}",
                ]
                for _, picked, best in picks
            ],
        ),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the page."""
    OUT.write_text(report(Results(DATA).rows), encoding="utf-8")
    Console().print(f"wrote {OUT}", markup=False)


if __name__ == "__main__":
    main()
