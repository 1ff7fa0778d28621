"""The tables and the Pareto plot, from finished runs."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from frontier.methods import METHODS
from frontier.results import Row, chosen, loss_of, settings_of
from frontier.tasks import TASKS

Place = tuple[str, int, int, int]  # task, steps, ranks, batch
MARKERS = {"adamw": "o", "muon": "s", "sgd": "^"}
EARLIER = 2 / 3  # more methods reach dense's loss after this part of its run than its final loss
OURS = "updates"  # the method of ``attach(model, optimizer)``
MANY = 9  # smallest number of methods in a section that is drawn
PANEL_INCHES = (6.4, 5.6)
FONT_POINTS = 7
TICKS = (-10, -5, -2, 0, 2, 5, 10, 20, 50, 100)  # percent
LINEAR_PERCENT = 5.0  # the plot is linear up to this distance from dense, logarithmic beyond


@dataclass(frozen=True)
class Entry:
    """All trials of a method outside the lab, for one optimizer and one setting of the task."""

    method: str
    optimizer: str
    trials: Sequence[Row]

    @cached_property
    def best(self) -> list[Row]:
        """The rows with the best settings, by seed."""
        return chosen(self.trials)

    @cached_property
    def by_seed(self) -> dict[int, Row]:
        """The same by seed."""
        return {row["seed"]: row for row in self.best}

    @property
    def diverged(self) -> bool:
        """Whether any seed has no loss."""
        return any(row["loss"] is None for row in self.best)

    def gaps(self, base: Entry) -> list[float]:
        """Return the loss relative to ``base``'s loss, minus 1, for every seed that both have."""
        return [
            loss_of(row) / loss_of(base.by_seed[seed]) - 1
            for seed, row in self.by_seed.items()
            if seed in base.by_seed
        ]

    def volume(self, timed: Row | None, same: Row | None) -> tuple[float, float, float, str]:
        """Return bytes per parameter and step: sent, received, and sent after the dense start.

        The lab's counts are preferred; the last value names the source.  ``same`` is a run outside the
        lab that is as long as ``timed``.  If the first steps send more, runs of other lengths send other
        bytes per step, so the lab's count is scaled by the ratio of the library's own counts.
        """
        row, source = self.best[0], timed or self.best[0]

        def bytes_of(name: str, way: str) -> float:
            if not (timed and timed[name]):
                return float(row[name][way])
            ratio = row[name][way] / same[name][way] if same and same[name] else 1.0
            return float(timed[name][way] * ratio)

        names = [name for name in ("dense", "rest") if row[name]]
        each = row["steps"] * row["parameters"]
        sent, received = (
            sum(row[name]["steps"] * bytes_of(name, way) for name in names) / each
            for way in ("sent", "received")
        )
        return sent, received, bytes_of(names[-1], "sent") / row["parameters"], source["counted"]

    def seconds(self, steps: float, timed: Row) -> float:
        """Return the seconds of this many steps in the lab, including the dense start."""
        first = min(steps, self.best[0]["dense"]["steps"] if self.best[0]["dense"] else 0)
        dense = first * timed["dense"]["seconds"] if first and timed["dense"] else 0.0
        return dense + (steps - first) * timed["rest"]["seconds"]


def reached(curve: Iterable[Sequence[float]], loss: float) -> float | None:
    """Return the (interpolated) step at which a curve reaches a loss, or None if it never does.

    Example:
        >>> reached([(10, 4.0), (20, 2.0)], 3.0), reached([(10, 4.0)], 3.0)
        (15.0, None)
    """
    points = [(float(step), float(value)) for step, value in curve if value is not None]
    if points and points[0][1] <= loss:
        return points[0][0]
    for (step, before), (next_step, after) in pairwise(points):
        if after <= loss:
            return step + (next_step - step) * (before - loss) / (before - after)
    return None


def value_at(curve: Sequence[Sequence[float]], step: float) -> float:
    """Return a curve's loss at a step, by interpolation.

    Example:
        >>> value_at([(10, 4.0), (20, 2.0)], 15)
        3.0
    """
    for (first, before), (last, after) in pairwise(curve):
        if step <= last:
            return before + (after - before) * (step - first) / (last - first)
    return float(curve[-1][1])


class Section:
    """The entries for one setting of the task, and its short runs in the lab."""

    def __init__(self, place: Place, rows: Sequence[Row]) -> None:
        self.task, self.steps, self.ranks, self.batch = place
        here = (self.task, self.ranks, self.batch)
        near = [row for row in rows if (row["task"], row["ranks"], row["batch"]) == here]
        lengths = {row["steps"] for row in near if not row["lab"]}
        self.runs = {steps: entries(near, steps) for steps in lengths}
        self.entries = self.runs[self.steps]
        self.labs: dict[str, dict[tuple[str, str], Row]] = {}
        for row in near:
            if row["lab"] and row.get("rest"):
                self.labs.setdefault(row["lab"], {})[row["method"], row["optimizer"]] = row

    @property
    def base(self) -> Entry:
        """Dense AdamW."""
        return self.entries["dense", "adamw"]

    def timed(self, key: tuple[str, str]) -> Row | None:
        """Return the method's run in any lab; all of them count the same bytes."""
        return next((rows[key] for rows in self.labs.values() if key in rows), None)

    def volume(self, key: tuple[str, str]) -> tuple[float, float, float, str]:
        """Return a method's bytes per parameter and step, as ``Entry.volume`` does."""
        timed = self.timed(key)
        same = self.runs.get(timed["steps"], {}).get(key) if timed else None
        return self.entries[key].volume(timed, same.best[0] if same else None)

    def steps_to(self, key: tuple[str, str], part: float) -> float | None:
        """Return the fewest steps to the loss of dense AdamW after ``part`` of its run.

        Runs of all lengths count.

        The result is the mean over seeds, or None if a seed never reaches the loss.
        """
        if key == ("dense", "adamw"):
            return part * self.steps
        goals = {
            seed: value_at(row["curve"], part * self.steps)
            for seed, row in self.base.by_seed.items()
        }
        found = []
        for entry in (entries[key] for entries in self.runs.values() if key in entries):
            steps = [
                reached(row.get("curve", ()), goals[seed])
                for seed, row in entry.by_seed.items()
                if seed in goals
            ]
            if steps and None not in steps:
                found.append(fmean(step for step in steps if step is not None))
        return min(found, default=None)


def entries(rows: Sequence[Row], steps: int) -> dict[tuple[str, str], Entry]:
    """Return the entries for runs of one length, by method and optimizer, in the order of methods."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["steps"] == steps and not row["lab"]:
            found.setdefault((row["method"], row["optimizer"]), []).append(row)
    keys = [(method, kind) for kind in MARKERS for method in METHODS]
    return {key: Entry(*key, found[key]) for key in keys if key in found}


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a table as Markdown; the first two columns are text."""
    lines = ["| " + " | ".join(heads) + " |", "|---|---|" + "---:|" * (len(heads) - 2)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows)]


def percent(gaps: Sequence[float]) -> str:
    """Format the mean and the spread of gaps.

    Example:
        >>> percent([0.01, 0.03]), percent([0.02]), percent([])
        ('+2.0 ± 1.4 %', '+2.0 %', '-')
    """
    if not gaps:
        return "-"
    spread = f" ± {100 * stdev(gaps):.1f}" if len(gaps) > 1 else ""
    return f"{100 * fmean(gaps):+.1f}{spread} %"


def cells(section: Section, entry: Entry) -> list[str]:
    """Return a method's row."""
    key = (entry.method, entry.optimizer)
    own = section.entries.get(("dense", entry.optimizer))
    rates = {row["lr"] for row in entry.trials}
    lr = entry.best[0]["lr"]
    trials = len({settings_of(row) for row in entry.trials})
    tuned = ", ".join(f"{name} {value}" for name, value in entry.best[0]["knobs"].items()) or "-"
    last = [f"{lr:g}" + ("*" if lr in (min(rates), max(rates)) else ""), tuned, str(trials)]
    if entry.diverged:
        return [entry.method, entry.optimizer, *["-"] * 4, "diverges", *["-"] * 4, *last]
    sent, received, after, counted = section.volume(key)
    loss = f"{fmean(loss_of(row) for row in entry.best):.4f}"
    if TASKS[section.task].workload.classifies:
        loss += f" ({fmean(row['accuracy'] for row in entry.best):.1%} right)"
    steps = [section.steps_to(key, part) for part in (EARLIER, 1.0)]
    return [
        entry.method,
        entry.optimizer,
        f"{sent:.3g}",
        f"{received:.3g}",
        f"{after:.3g}",
        counted,
        loss,
        percent(entry.gaps(section.base)),
        percent(entry.gaps(own)) if own else "-",
        *("never" if step is None else f"{step:.0f}" for step in steps),
        *last,
    ]


def lab_cells(
    section: Section, entry: Entry, timed: Mapping[tuple[str, str], Row]
) -> list[str] | None:
    """Return a method's row for a lab, or None if it was not run there."""
    key, dense = (entry.method, entry.optimizer), timed.get(("dense", "adamw"))
    if key not in timed or entry.diverged:
        return None
    row, line = timed[key], [entry.method, entry.optimizer]
    step, computation = row["rest"]["seconds"], row["computation"]
    line += [f"{step:.3f}", f"{computation:.3f}", f"{max(step - computation, 0.0):.3f}"]
    hidden = row.get("hidden")
    line.append("-" if hidden is None else f"{hidden:.0%}")
    for part in (EARLIER, 1.0):
        steps = section.steps_to(key, part)
        if steps is None or dense is None:
            line += ["never" if steps is None else f"{entry.seconds(steps, row):.3g}", "-"]
            continue
        seconds = entry.seconds(steps, row)
        of_dense = section.base.seconds(part * section.steps, dense)
        line += [f"{seconds:.3g}", f"{of_dense / seconds:.1f}"]
    return line


def written(section: Section) -> list[str]:
    """Return the tables of a section."""
    row = section.base.best[0]
    heads = ["method", "optimizer", "sent", "received", "after", "counted by", "held-out loss"]
    heads += ["over dense AdamW", "over dense, same optimizer", "steps to dense's loss at 2/3"]
    heads += ["at its end", "rate", "knobs", "trials"]
    lines = [
        "",
        f"## {section.task}: {row['parameters']:,} parameters, {section.steps} steps",
        "",
        f"{section.ranks} ranks x {section.batch}, seeds {', '.join(map(str, section.base.by_seed))}.",
        "",
        *table(heads, [cells(section, entry) for entry in section.entries.values()]),
    ]
    heads = ["method", "optimizer", "seconds per step", "of which computation", "rest", "hidden"]
    heads += ["seconds to dense's loss at 2/3", "times faster", "at its end", "times faster"]
    for lab, timed in sorted(section.labs.items()):
        found = [lab_cells(section, entry, timed) for entry in section.entries.values()]
        lines += ["", f"### Links of {lab}", "", *table(heads, [line for line in found if line])]
    return lines


def picture(sections: Sequence[Section], path: Path) -> None:
    """Plot loss over bytes, and the Pareto front: the rows that no other row beats in both.

    Each section with many methods and as many ranks as the first gets a panel.
    """
    drawn = [section for section in sections if len(section.entries) >= MANY]
    sections = [s for s in drawn if s.ranks == sections[0].ranks] or sections
    from matplotlib.figure import Figure  # the object interface: no display, no global state

    width, height = PANEL_INCHES
    figure = Figure(figsize=(width * len(sections), height), layout="constrained")
    axes = figure.subplots(1, len(sections), squeeze=False)[0]
    for axis, section in zip(axes, sections, strict=True):
        points: dict[tuple[float, float], Entry] = {}
        for key, entry in section.entries.items():
            gaps = [] if entry.diverged else entry.gaps(section.base)
            most = 0.0 if entry.diverged else max(section.volume(key)[:2])
            if gaps and most:  # methods that sent nothing cannot be shown on a logarithmic axis
                x, y = most, 100 * fmean(gaps)
                points[x, y] = entry
                axis.plot(x, y, MARKERS[entry.optimizer], color="black", markersize=4)
        front = [(x, y) for x, y in sorted(points) if all(b >= y for a, b in points if a <= x)]
        axis.step(*zip(*front, strict=True), where="post", color="#d95f02", linewidth=1)
        axis.axhline(0, color="black", linewidth=0.6, linestyle=(0, (1, 3)))
        axis.set_xscale("log")
        axis.set_yscale("symlog", linthresh=LINEAR_PERCENT)
        axis.margins(0.08)
        left, right = axis.get_xlim()
        steps = [digit * 10.0**power for power in range(-5, 3) for digit in (1, 2, 5)]
        axis.set_xticks([step for step in steps if left <= step <= right])
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter("")
        low, high = axis.get_ylim()
        axis.set_yticks([tick for tick in TICKS if low <= tick <= high])
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set(
            title=f"{section.task}, {section.steps} steps, {section.ranks} ranks",
            xlabel="bytes per parameter and step, the larger of sent and received",
            ylabel="held-out loss over dense AdamW, %",
        )
        axis.spines[["top", "right"]].set_visible(False)
        label(axis, points)
    figure.suptitle(
        "circles: AdamW, squares: Muon, triangles: SGD; the line joins what no other row beats in both",
        fontsize="medium",
    )
    figure.savefig(path, dpi=150)


def label(axis: Any, points: Mapping[tuple[float, float], Entry]) -> None:
    """Write every method's name next to its point, in the first free place."""
    width, height = (72 * inches for inches in PANEL_INCHES)
    to_points = axis.transScale + axis.transLimits
    taken: list[tuple[float, float, float, float]] = []

    def free(box: tuple[float, float, float, float]) -> bool:
        return all(
            box[2] < left or right < box[0] or box[3] < low or high < box[1]
            for left, low, right, high in taken
        )

    ends = {place: to_points.transform(place) * (width, height) for place in points}
    taken += [(x - 2, y - 2, x + 2, y + 2) for x, y in ends.values()]
    for place, (x, y) in ends.items():
        name = points[place].method
        long = 0.55 * FONT_POINTS * len(name)
        spots = [(4, 3), (4, -9), (-4 - long, 3), (-4 - long, -9), (-long / 2, 7), (-long / 2, -13)]
        boxes = {s: (x + s[0], y + s[1], x + s[0] + long, y + s[1] + FONT_POINTS) for s in spots}
        spot = next((s for s in spots if free(boxes[s])), spots[0])
        taken.append(boxes[spot])
        weight = "bold" if name == OURS else "normal"
        axis.annotate(
            name, place, spot, weight=weight, textcoords="offset points", fontsize=FONT_POINTS
        )


def write_report(rows: Sequence[dict[str, Any]], out: Path, drawn: Path) -> bool:
    """Write the tables to ``out`` and the plot to ``drawn``, if dense AdamW has run."""
    order = list(TASKS)
    places = {
        (row["task"], row["steps"], row["ranks"], row["batch"])
        for row in rows
        if (row["method"], row["optimizer"]) == ("dense", "adamw") and not row["lab"]
    }
    sections = [
        Section(place, rows)
        for place in sorted(places, key=lambda place: (order.index(place[0]), place))
    ]
    if not sections:
        return False
    lines = [
        "# Bytes against loss under AdamW and Muon",
        "",
        f"`python benchmarks/frontier.py` on {os.cpu_count()} cores, {platform.machine()}, torch "
        f"{torch.__version__}, Python {platform.python_version()}; one thread per rank.",
        "",
        f"![held-out loss over bytes]({os.path.relpath(drawn, out.parent)})",
        "",
        "Sent, received: bytes per parameter and step, including a dense warm-up, for the rank with the",
        "most bytes; after: bytes sent per step after the warm-up. Bytes are counted by the kernel on",
        "the lab's links (including Ethernet, IP and TCP headers), counted by this library (ledger), or",
        "computed for a bandwidth-optimal allreduce (formula). Loss: of the weights that all ranks",
        "share, without the dense exchange of `finish`; over dense: ratio to dense with the same seed,",
        "mean and standard deviation over seeds. Rate, knobs: the best settings tried with the first",
        "seed; * marks the smallest or largest rate tried. Steps to a loss: measured on an eighth of",
        "the held-out samples; the fewest of all the method's runs, whatever their length. Seconds: the",
        "time of these steps, measured in short runs in the lab; computation: forward, backward and",
        "optimizer on all ranks at once, without exchange; hidden: the share of the exchanges' time for",
        'which training did not wait. "updates" is the default of models from a million parameters;',
        "smaller ones send more bits, on every step (`benchmarks/schedules.md`).",
    ]
    for section in sections:
        lines += written(section)
    picture(sections, drawn)
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return True
