"""Compare the study's predictions of the time to dense's loss with the frontier's curves and lab.

    python benchmarks/time_to_loss.py     (seconds; writes benchmarks/time_to_loss.md)

Nothing is trained. The curves come from `frontier/results.jsonl`; the seconds per step on real
links and the computation time come from `surface/results.jsonl` and the frontier's lab. The page
answers four questions.

1. What did the study predict for the surface before any of its cells was measured
(`surface/predicted.json`)? Seven of the nine networks were completely new; at 10 and 100 Mbit/s
without distance, some methods had been measured before. The fit of steps included AdamW's curves
for this model, but no curves with SGD.

2. What did a revised study predict for two other networks before they were measured
(`surface/predicted_2.json`)? The revision added PowerSGD's dense start, the windows that TCP halves in
pauses (also for sparse exchanges), DDP's buckets, two at a time, and headers. It chooses the simplest
method within 10 %, and its fit of steps includes the new curves.

3. What did a second revision predict for two more networks before they were measured
(`surface/predicted_3.json`)? By then, the causes of the other misses had been found. The lab's send
buffers were too small where acknowledgements queue behind data in the other direction, so dense
took up to 1.3 times the time of its bytes over slow and far links. The buffers now have Linux's
default size, and all far cells were measured again. Connections that share a link lose packets in
its queue, and the connection that lost the most finishes last. A segment of gloo's ring waits for
one latency, not 1.2. SGD's steps are means of three seeds, in the surface and in the fit. The fit
also treats low-rank gradients separately for SGD, and includes SGD's curves for a second model. A
method is chosen only if it reaches the loss even at the upper end of its likely steps.

4. What does the study predict for a task held out of the fit of steps, with each cell's own
computation time? By now, the fit includes SGD's curves for a third model. (PowerSGD's dense start
is excluded here, both in predictions and in measurements.)
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from frontier.report import table
from frontier.results import Results, Row
from rich.console import Console
from steps import left_out, observations
from surface import CELLS, CURVES, LAST, LINES, PREDICTED, machine_of, surface
from surface import Cell as Measured

from sparsync.presets import candidates
from sparsync_papers.time_to_loss.methods import METHODS, plan_loss, step_seconds

OUT = Path(__file__).parent / "time_to_loss.md"
PARTS = (2 / 3, 1.0)  # parts of dense's run whose final losses are targets
TITLES = (
    "The surface, before it was measured",
    "Two other networks, after the revision",
    "Two more, after the second revision",
)
SEEN = ("10mbit", "100mbit")  # networks that had been seen when the constants were set
AS_DENSE = ("dense", "fp16")  # methods that take dense's steps
NEAR, ALIKE = 1.25, 1.1  # largest factor between near times; largest factor over the best time


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
    """A cell's time to dense's loss after a part of its run."""

    cell: Cell
    steps: int
    part: float
    measured: float
    predicted: float

    @property
    def place(self) -> tuple[Any, ...]:
        """The setting in which methods compete."""
        one = self.cell
        return one.task, one.ranks, one.batch, one.lab, one.optimizer, self.steps, self.part


def cells(rows: Sequence[Row]) -> list[Cell]:
    """Return all methods that the study describes and that ran in the lab, each with its last run."""
    found = {}
    for row in rows:
        if not row["lab"] or not row.get("rest"):
            continue
        seconds = predicted(row)
        if seconds is not None:
            key = (
                row["task"],
                row["ranks"],
                row["batch"],
                row["lab"],
                row["method"],
                row["optimizer"],
            )
            found[key] = Cell(*key, row["rest"]["seconds"], seconds)
    return list(found.values())


def predicted(row: Row) -> float | None:
    """Return a method's planned seconds per step, or None if the study does not describe it."""
    machine, size, ranks = machine_of(row["lab"], row["ranks"]), row["parameters"], row["ranks"]
    compute = row["computation"]
    if row["method"] == "gradients":
        given = {"optimizer": row["optimizer"], "compute": compute}
        table = plan_loss(size, ranks, machine, candidates(), **given).table
        return next(one.seconds_step for one in table if one.way == "sparse gradients")
    known = {method.name: method for method in METHODS}
    if row["method"] not in known:
        return None
    return step_seconds(known[row["method"]], size, ranks, machine, compute)[0]


def times(rows: Sequence[Row], timed: Sequence[Cell]) -> Iterator[Time]:
    """Yield measured and predicted times, including dense's, if steps and seconds were measured."""
    for cell in timed:
        place = (cell.task, cell.ranks, cell.batch)
        if cell.method in AS_DENSE:
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
    """Format the share of predictions that differ from the measurement by at most 25 %."""
    ratios = [one.predicted / one.measured for one in found]
    return f"{fmean(1 / NEAR <= ratio <= NEAR for ratio in ratios):.0%} of {len(ratios)}"


def simplicity(time: Time) -> int:
    """Return a method's position in the study's order of simplicity; 0 is the simplest."""
    names = [method.name for method in METHODS]
    known = time.cell.method in names
    return names.index(time.cell.method) if known else len(names)


@dataclass(frozen=True)
class Said:
    """A method in a cell of the surface: prediction and measurement."""

    lab: str
    optimizer: str
    label: str
    predicted: float | None  # seconds to the loss; None: does not reach it
    measured: float | None
    picked: bool

    @property
    def ratio(self) -> float | None:
        """The prediction relative to the measurement."""
        if self.predicted is None or self.measured is None:
            return None
        return self.predicted / self.measured

    @property
    def near(self) -> bool:
        """Whether prediction and measurement differ by at most 25 %."""
        return self.ratio is not None and 1 / NEAR <= self.ratio <= NEAR


def of_surface(
    found: Mapping[tuple[str, str], Measured], path: Path, labs: Sequence[str]
) -> list[Said]:
    """Return every measured cell for which a file has a prediction."""
    written = json.loads(path.read_text("utf-8"))
    made, known = [], {method.name for method in METHODS}
    for lab, line in product(labs, LINES):
        if (line.label, lab) not in found:
            continue
        it = written[f"{lab} {line.optimizer}"]
        entries = it["methods"]
        # one collective represents all sparse gradients
        name = line.method
        if name == "gradients":
            name = next(other for other in entries if other not in known)
        entry = entries[name]
        said = entry["seconds"] if entry["reached"] else None
        measured = found[line.label, lab].to_goal
        made.append(Said(lab, line.optimizer, line.label, said, measured, it["pick"] == name))
    return made


def of_surface_report(title: str, made: Sequence[Said]) -> list[str]:
    """Return the section on one file's predictions."""
    both = [one for one in made if one.ratio is not None]
    new = [one for one in both if one.lab not in SEEN]
    agreed = sum((one.predicted is None) == (one.measured is None) for one in made)
    rows, good, good_new, of, of_new = [], 0, 0, 0, 0
    for lab, optimizer in dict.fromkeys((one.lab, one.optimizer) for one in made):
        here = [one for one in made if (one.lab, one.optimizer) == (lab, optimizer)]
        picked = next((one for one in here if one.picked), None)
        there = [one for one in here if one.measured is not None]
        if picked is None or not there:
            continue
        best = min(there, key=lambda one: one.measured or math.inf)
        over = (picked.measured or math.inf) / (best.measured or math.inf)
        of, good = of + 1, good + (over <= ALIKE)
        of_new, good_new = (
            of_new + (lab not in SEEN),
            good_new + (over <= ALIKE and lab not in SEEN),
        )
        rows.append([f"{lab}, {optimizer}", picked.label, best.label, f"{over:.2f}"])

    def within(ones: Sequence[Said]) -> str:
        return f"{fmean(one.near for one in ones):.0%} of {len(ones)}"

    if not both:
        return []
    unseen = of_unseen = ""
    if len(new) < len(both):
        unseen = f" ({within(new)} in networks that had not been seen)"
        of_unseen = f" ({good_new} of {of_new})"
    return [
        f"## {title}",
        "",
        f"Within 25 %: {within(both)} times to the loss{unseen}.",
        f"Correct on whether a method reaches the loss: {agreed} of {len(made)} cells. The pick was the",
        f"best, or within 10 % of it: {good} of {of}{of_unseen}.",
        "",
        *table(["network", "pick", "best", "pick over best, measured"], rows),
        "",
        *table(
            ["network", "method", "measured", "predicted", "ratio"],
            [
                [
                    one.lab,
                    one.label,
                    "not reached" if one.measured is None else f"{one.measured:.3g} s",
                    "not reached" if one.predicted is None else f"{one.predicted:.3g} s",
                    "-" if one.ratio is None else f"{one.ratio:.2f}",
                ]
                for one in made
            ],
        ),
        "",
    ]


def report(
    curves: Sequence[Row], surfaced: Sequence[Row], said: Mapping[str, Sequence[Said]]
) -> str:
    """Return the page."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    rows = [*curves, *surfaced]
    timed = cells(rows)
    found = list(times(rows, timed))
    picks = []
    for place in dict.fromkeys(time.place for time in found):
        here = [time for time in found if time.place == place]
        if len(here) > 1:
            best = min(here, key=lambda time: time.measured)
            near = ALIKE * min(time.predicted for time in here)
            picked = min((t for t in here if t.predicted <= near), key=simplicity)
            picks.append((place, picked, best))
    others = [time for time in found if time.cell.method != "dense"]
    unseen = [time for time in found if time.cell.lab in LAST]
    good = fmean(picked.measured <= ALIKE * best.measured for _, picked, best in picks)
    lines = [
        "# Time to a loss: planned and measured",
        "",
        "`python benchmarks/time_to_loss.py`",
        "",
        (__doc__ or "").split("\n\n", 2)[2].strip(),
        "",
        *(line for title, made in said.items() for line in of_surface_report(title, made)),
        "## With the task left out of the fit",
        "",
        f"Within 25 %: seconds per step {share(timed)}, times to a loss {share(found)}, without dense's",
        f"own {share(others)}, in the last two networks {share(unseen)}. The pick is the best of what",
        f"was measured, or within 10 % of it, in {good:.0%} of {len(picks)}.",
        "",
        "Seconds per step:",
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
        "Seconds to the loss of dense:",
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
        "Picks:",
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
    curves, timed = Results(CURVES), Results(CELLS)
    found = surface(curves, timed)
    said = {
        title: of_surface(found, path, labs)
        for title, (path, labs) in zip(TITLES, PREDICTED.items(), strict=True)
    }
    OUT.write_text(report(curves.rows, timed.rows, said), encoding="utf-8")
    Console().print(f"wrote {OUT}", markup=False)


if __name__ == "__main__":
    main()
