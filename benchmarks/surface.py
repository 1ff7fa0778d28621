"""Measure the seconds to dense's loss by rate and round-trip time, for every method in every cell.

    python benchmarks/surface.py --curves     (about 40 minutes: trains methods that have no curve yet)
    python benchmarks/surface.py --cells      (about 2 hours; Linux, root; resumes)
    python benchmarks/surface.py --report     (only writes the report)
    python benchmarks/surface.py --predict    (the study's predictions, before any cell is measured)

4 ranks train the frontier's GPT with 8.4 M parameters. The loss at a given step does not depend on
the network, so the curves come from ``frontier/results.jsonl``. In each cell, the seconds and bytes
of a few steps are measured. The time to the loss is the number of steps to the loss, times the
seconds per step.

``surface/predicted.json`` was written before the nine networks were measured. ``predicted_2.json``
followed after these had led to a revision of the study, before two other networks were measured,
and ``predicted_3.json`` after a second revision, before two more were measured.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Final, NamedTuple

from frontier.methods import METHODS
from frontier.report import reached, table, value_at
from frontier.results import Results, Row, chosen, comparable, loss_of
from frontier.training import Run
from rich.console import Console

from sparsync.cli.lab_links import parse_links
from sparsync.cli.launch import RankError
from sparsync.cli.network_choice import Connection
from sparsync.cost.machine import Machine
from sparsync.presets import candidates
from sparsync_papers.time_to_loss.methods import plan_loss

HERE = Path(__file__).parent
CURVES, CELLS = HERE / "frontier" / "results.jsonl", HERE / "surface" / "results.jsonl"
OUT, PICTURE = HERE / "surface.md", HERE.parent / "docs" / "images" / "surface.png"
RATES, RTTS = ("10mbit", "100mbit", "1gbit"), (0, 20, 80)
FASTEST = RATES[-1]
# networks outside the tables: two were measured after the study's first revision, and two after the
# second
HELD_OUT, LAST = ("30mbit,40ms", "300mbit,10ms"), ("20mbit,30ms", "200mbit,50ms")
RANKS, STEPS, GOAL = 4, 300, 200  # the goal: dense's loss after this many steps
LONG = 600  # steps of methods that have not reached the loss after 300; a few need 400
BATCH, RATE, SGD_RATES = 2, 1e-3, (0.1, 0.3)
SEEDS = 1, 2, 3  # for SGD, whose curves are flat where they are compared; others have one seed
SEEDED = "dense", "powersgd-r4", "gradients"
SMALLER = ("gpt-1m", 8), ("gpt-100k", 4)  # (task, batch), for the fit of steps with SGD
# inputs of predictions: the model's elements, the seconds of a message without distance, and the
# seconds of a step without exchange, from the frontier's runs of this model in the lab
PARAMETERS, ALPHA, COMPUTATION = 8_443_552, 50e-6, 0.23
FRAMED = 1514 / 1448  # bytes on a link per byte that TCP carries
# at rates below FEW_STEPS, methods that send more than MANY_BYTES per parameter and step are
# measured for 10 steps, and all others for 20
MANY_BYTES: Final = 1.0
FEW_STEPS: Final = 50e6


class Line(NamedTuple):
    """A row of the surface."""

    label: str
    method: str
    optimizer: str
    bytes_per_parameter: float  # approximate bytes per parameter and step
    steps: int = STEPS
    default: bool = False  # whether ``attach(model, optimizer)`` gives this row
    choice: bool = False  # whether this row has other settings, which the study may choose instead


LINES = (
    Line("dense, AdamW", "dense", "adamw", 6.0),
    Line("PyTorch's fp16 hook", "fp16", "adamw", 3.0),
    Line("PyTorch's PowerSGD hook, rank 4", "powersgd-r4", "adamw", 0.1),
    Line("DiLoCo, H = 30", "diloco-h30", "adamw", 0.2, LONG),
    Line("DiLoCo, H = 100", "diloco-h100", "adamw", 0.06, LONG),
    Line("SparseLoCo", "sparseloco", "adamw", 0.003, LONG),
    # one bit was the default at the time of the measurements, and still is the setting for slow
    # links
    Line("attach(model, adamw), 1 bit", "updates-1bit", "adamw", 0.1, default=True),
    Line("H = 2 in 2 fragments, delay 1", "updates-overlap", "adamw", 0.1, choice=True),
    Line("H = 4 in 4 fragments, delay 1", "updates-h4-overlap1", "adamw", 0.06, choice=True),
    Line(
        "H = 10 in 10 fragments, delay 2", "updates-h10-overlap2", "adamw", 0.03, 400, choice=True
    ),
    Line("dense, SGD", "dense", "sgd", 6.0),
    Line("PyTorch's fp16 hook, SGD", "fp16", "sgd", 3.0),
    Line("PyTorch's PowerSGD hook, SGD", "powersgd-r4", "sgd", 0.1),
    Line("attach(model, sgd)", "gradients", "sgd", 0.05, 400, default=True),
)


def networks() -> list[str]:
    """Return the links of every cell."""
    return [f"{rate},{rtt}ms" if rtt else rate for rate, rtt in product(RATES, RTTS)]


def run_of(line: Line, lr: float) -> Run:
    """Return a run with the published settings."""
    knobs = METHODS[line.method].untuned
    return Run("gpt-9m", line.steps, RANKS, BATCH, line.method, line.optimizer, lr, 1, knobs)


def train(curves: Results, line: Line) -> None:
    """Train for a method's curves; with SGD, also at two rates and on smaller models, for the fit."""
    runs = [run_of(line, lr) for lr in (SGD_RATES if line.optimizer == "sgd" else (RATE,))]
    seeded, places = line.optimizer == "sgd" and line.method in SEEDED, [runs]
    for task, batch in SMALLER if seeded else ():
        places.append([replace(run, task=task, batch=batch, steps=STEPS) for run in runs])
    for place in places:
        won = min(place, key=lambda run: loss_of(curves.get(run)))
        for seed in SEEDS[1:] if seeded else ():
            curves.get(replace(won, seed=seed))


def best(curves: Results, line: Line) -> dict[int, Row]:
    """Return a method's finished curves by seed, at its best rate."""
    rows = comparable(curves.rows, run_of(line, RATE))
    rows = [row for row in rows if row["knobs"] == METHODS[line.method].untuned]
    return {row["seed"]: row for row in chosen(rows)} if rows else {}


def steps_to_goal(curves: Results, line: Line) -> float | None:
    """Return the mean steps to dense's loss with the same seed; None if a seed never reaches it."""
    dense = best(curves, Line("", "dense", line.optimizer, 6.0))
    steps = [
        reached(row["curve"], value_at(dense[seed]["curve"], GOAL))
        for seed, row in best(curves, line).items()
        if seed in dense
    ]
    there = [step for step in steps if step is not None]
    return fmean(there) if there and len(there) == len(steps) else None


def as_adamw(line: Line, lab: str) -> bool:
    """Return whether a method's times with AdamW, which are mostly exchanges, also serve for SGD."""
    return line.optimizer == "sgd" and not line.default and not lab.startswith(FASTEST)


def time(cells: Results, line: Line, lab: str, lr: float) -> None:
    """Measure seconds and bytes per step in a cell, over whole periods; a dense phase is 2 steps."""
    method = METHODS[line.method]
    knobs = {**method.untuned}
    period = {**method.settings, **knobs}.get("period", 1)
    if as_adamw(line, lab) or any(_is_of(row, line, lab) for row in cells.rows):
        return
    slow = parse_links(lab, RANKS)[0].up < FEW_STEPS
    wanted = 10 if line.bytes_per_parameter > MANY_BYTES and slow else 20
    steps = -(-wanted // period) * period
    knobs |= {"start": 2} if knobs.get("start") else {}
    cells.get(replace(run_of(line, lr), knobs=knobs, lab=lab, steps=steps))


PREDICTED = {
    HERE / "surface" / "predicted.json": networks(),
    HERE / "surface" / "predicted_2.json": list(HELD_OUT),
    HERE / "surface" / "predicted_3.json": list(LAST),
}


class Cell(NamedTuple):
    """A method on a network."""

    seconds: float  # seconds per step
    computation: float  # seconds of computation per step
    sent: float  # bytes per step, as counted by the kernel
    received: float
    to_goal: float | None  # seconds to the goal; None: not reached in the steps that were trained
    at_least: float  # seconds of the steps that were trained


def surface(curves: Results, cells: Results) -> dict[tuple[str, str], Cell]:
    """Return every measured cell by label and network."""
    found, timed = {}, cells.rows
    for line in LINES:
        if not best(curves, line):
            continue
        steps = steps_to_goal(curves, line)
        for lab in (*networks(), *HELD_OUT, *LAST):
            timing = line._replace(optimizer="adamw") if as_adamw(line, lab) else line
            same = [row for row in timed if _is_of(row, timing, lab)]
            if not same:
                continue
            row = same[-1]
            phase = row["rest"]
            seconds, before = phase["seconds"], 0.0
            if row["dense"] is not None:  # add the steps before compression begins
                before = METHODS[line.method].untuned["start"] * (row["dense"]["seconds"] - seconds)
            found[line.label, lab] = Cell(
                seconds,
                row["computation"],
                phase["sent"],
                phase["received"],
                None if steps is None else steps * seconds + before,
                line.steps * seconds + before,
            )
    return found


def _is_of(row: Row, line: Line, lab: str) -> bool:
    asked = {"method": line.method, "optimizer": line.optimizer, "lab": lab, "batch": BATCH}
    return asked.items() <= row.items()


def machine_of(lab: str, ranks: int) -> Machine:
    """Return the study's input for a network, from its settings alone."""
    link, *_ = parse_links(lab, ranks)
    way = link.rtt / 2
    return Machine(alpha=ALPHA + way, beta=8 * FRAMED / min(link.up, link.down), distance=way)


# ---- predictions -------------------------------------------------------------------------------------


def predict(labs: Iterable[str], path: Path) -> None:
    """Write the current study's predictions for all cells; never overwrite an existing file."""
    said: dict[str, dict[str, object]] = {}
    for lab in labs:
        for optimizer in ("adamw", "sgd"):
            made = plan_loss(
                PARAMETERS,
                RANKS,
                machine_of(lab, RANKS),
                candidates(),
                optimizer=optimizer,
                steps=GOAL,
                compute=COMPUTATION,
            )
            said[f"{lab} {optimizer}"] = {
                "pick": made.choice,
                "methods": {
                    entry.method: {
                        "seconds_step": entry.seconds_step,
                        "steps": entry.steps.mean,
                        "seconds": entry.seconds.mean,
                        "reached": entry.steps.reached,
                    }
                    for entry in made.table
                },
            }
    with path.open("x", encoding="utf-8") as file:
        file.write(json.dumps(said, indent=1) + "\n")


# ---- the report ---------------------------------------------------------------------------------------


def seconds_of(cell: Cell) -> str:
    """Format a cell's time to the loss."""
    return f"> {cell.at_least:,.0f}" if cell.to_goal is None else f"{cell.to_goal:,.0f}"


def write(found: dict[tuple[str, str], Cell]) -> None:
    """Return the tables."""
    labs = networks()
    about = (__doc__ or "").split("\n\n")[2].replace("``", "`")
    text = [
        f"# Seconds to dense's loss after {GOAL} of {STEPS} steps",
        "",
        about,
        "",
        "`python benchmarks/surface.py --curves --cells` on 2 cores; one thread per rank. Dense and "
        "fp16 at 10 Mbit/s are extrapolated from 10 steps, all others from 20, or a whole period. With "
        "SGD, the goal is dense SGD's loss; up to 100 Mbit/s, the seconds per step of dense and "
        f"PyTorch's hooks are those with AdamW. Settings are as published, at rate {RATE:g} (SGD: the "
        f"better of {SGD_RATES}). Steps are from one seed with AdamW and fp16, and the mean of three "
        "seeds with SGD. The three lines with fragments are settings that the study may choose instead "
        "of `attach`'s default.",
        "",
        *(f"- {said}" for said in verdict(found)),
        "",
        "![times sooner than dense](../docs/images/surface.png)",
        "",
    ]
    tables: dict[str, Callable[[Cell], str]] = {
        "Seconds to the loss; `>`: not reached in the steps trained.": seconds_of,
        "Seconds per step.": lambda cell: f"{cell.seconds:.3g}",
        "Share of computation in these seconds.": lambda cell: (
            f"{min(1.0, cell.computation / cell.seconds):.0%}"
        ),
        "kB sent and received per rank and step, counted by the kernel.": lambda cell: (
            f"{cell.sent / 1000:,.0f}, {cell.received / 1000:,.0f}"
        ),
    }
    for title, shown in tables.items():
        rows = [
            [
                line.label,
                *(shown(c) if (c := found.get((line.label, lab))) else "-" for lab in labs),
            ]
            for line in LINES
        ]
        text += [title, "", *table(["method", *labs], rows), ""]
    OUT.write_text("\n".join(text), encoding="utf-8")


def draw(found: dict[tuple[str, str], Cell]) -> None:
    """Plot each method's speed-up to dense's loss over dense with the same optimizer."""
    import matplotlib.pyplot as plt
    from matplotlib.colors import TwoSlopeNorm

    shown = [line for line in LINES if line.method != "dense"]
    labs, values = networks(), []
    figure, axis = plt.subplots(figsize=(10, 0.36 * len(shown) + 1.3), layout="constrained")
    for row, line in enumerate(shown):
        base = f"dense, {'SGD' if line.optimizer == 'sgd' else 'AdamW'}"
        values.append([math.nan] * len(labs))
        for column, lab in enumerate(labs):
            cell, dense = found.get((line.label, lab)), found.get((base, lab))
            said = "not reached" if cell and cell.to_goal is None else "-"
            if cell and dense and cell.to_goal and dense.to_goal:
                ratio = dense.to_goal / cell.to_goal
                values[-1][column], said = math.log2(ratio), f"{ratio:.3g}"
            axis.text(column, row, said, ha="center", va="center", fontsize=8)
    axis.imshow(values, cmap="RdYlGn", norm=TwoSlopeNorm(0.0, -2.0, 6.5), aspect="auto")
    axis.set_xticks(range(len(labs)), [_named(lab) for lab in labs], fontsize=8)
    axis.set_yticks(range(len(shown)), [line.label for line in shown], fontsize=8)
    for tick, line in zip(axis.get_yticklabels(), shown, strict=True):
        tick.set_fontweight("bold" if line.default else "normal")
    axis.set_title("times sooner than dense of the same optimizer at its loss", fontsize=10)
    figure.savefig(PICTURE, dpi=110)
    plt.close(figure)


def _named(lab: str) -> str:
    """Format a network in two lines."""
    rate, _, rtt = lab.partition(",")
    return f"{rate[:-4]} {'Gbit/s' if rate.endswith('gbit') else 'Mbit/s'}\n{rtt or '0 ms'}"


def verdict(found: dict[tuple[str, str], Cell]) -> list[str]:
    """Report the cells in which the default reaches the loss first, and its lag in the others."""
    said = []
    for mine in (line for line in LINES if line.default):
        others = [
            line
            for line in LINES
            if not (line.default or line.choice) and line.optimizer == mine.optimizer
        ]
        ratios = {}
        for lab in networks():
            cell = found.get((mine.label, lab))
            times = [found[o.label, lab].to_goal for o in others if (o.label, lab) in found]
            rest = [seconds for seconds in times if seconds]
            if cell and cell.to_goal and rest:
                ratios[lab] = cell.to_goal / min(rest)
        if ratios:
            each = ", ".join(f"{lab} {ratio:.2f}" for lab, ratio in ratios.items())
            said.append(f"{mine.label}: seconds over the best other's: {each}")
    return said


def main() -> None:
    """Make the missing runs, then write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--curves", action="store_true", help="train what has no curve yet")
    parser.add_argument("--cells", action="store_true", help="measure cells that are not there")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--predict", action="store_true", help="write the study's predictions")
    parser.add_argument("--networks", help="of the cells, with semicolons (default: all)")
    parser.add_argument("--methods", help="labels, with semicolons (default: all)")
    given = parser.parse_args()
    if given.predict:
        for path, labs in PREDICTED.items():
            if not path.exists():
                predict(labs, path)
        return
    console, curves, cells = Console(stderr=True), Results(CURVES), Results(CELLS)
    chosen_lines = [
        line for line in LINES if not given.methods or line.label in given.methods.split(";")
    ]
    labs = given.networks.split(";") if given.networks else networks()
    if given.cells:
        Connection(lab=labs[0]).prepare()
    for line in chosen_lines if given.curves else ():
        train(curves, line)
    for lab, line in product(labs, chosen_lines) if given.cells else ():
        trained = best(curves, line)
        try:
            time(cells, line, lab, next(iter(trained.values()))["lr"] if trained else RATE)
        except RankError as error:  # continue with the other cells
            console.print(f"failed: {line.label} at {lab}: {error}", markup=False)
    found = surface(curves, cells)
    write(found)
    if found:
        draw(found)
    Console().print(f"wrote {OUT}", *verdict(found), sep="\n", markup=False)


if __name__ == "__main__":
    main()
