"""Compare ``attach`` with dense AdamW for more ranks and larger models, on virtual ranks.

    python benchmarks/scale.py --tasks gpt-100k --ranks 4,8,16,32 --batches rank,all
    python benchmarks/scale.py --tasks gpt-1m --ranks 8 --rates 0.002 --seeds 1,2
    python benchmarks/scale.py --report    (only writes the table)

With ``rank``, every rank keeps its batch size, so the global batch grows with P; with ``all``, the
global batch stays as large as for four ranks. Dense AdamW trains at every rate, and the comparison
uses its best rate.  Every finished run is a line of ``scale/results.jsonl`` and is not repeated;
``scale.md`` is made from these lines alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from frontier.tasks import BETAS, TASKS, GptWorkload, Task, grouped
from schedules import METHODS, clip_of, rate_at
from virtual_updates import train_dense, train_updates

from sparsync.cli.workloads.workload import Draw

OUT = Path(__file__).parent / "scale.md"
USUAL_RANKS = 4  # with "all", the global batch is as large as for this many ranks
SIZES: Mapping[str, Task] = MappingProxyType(
    {
        "gpt-100k": TASKS["gpt-100k"],
        "gpt-1m": TASKS["gpt-1m"],
        "gpt-30m": Task(GptWorkload(width=576, layers=8), 4, (5e-4, 1e-3, 2e-3)),
    }
)


def batch_of(task: Task, ranks: int, batch: str) -> int:
    """Return the samples per rank and step.

    Example:
        >>> [batch_of(SIZES["gpt-100k"], ranks, "all") for ranks in (4, 8, 16)]
        [4, 2, 1]
    """
    if batch == "rank":
        return task.batch
    samples, rest = divmod(USUAL_RANKS * task.batch, ranks)
    if rest or not samples:
        raise SystemExit(f"a batch of {USUAL_RANKS * task.batch} is not for {ranks} ranks")
    return samples


def make(run: Mapping[str, Any]) -> dict[str, Any]:
    """Train once."""
    task, began = SIZES[run["task"]], time.perf_counter()
    workload, ranks, steps = task.workload, run["ranks"], run["steps"]
    batch = batch_of(task, ranks, run["batch"])

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(grouped(dict(model.named_parameters())), betas=BETAS)

    def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
        inputs, targets = workload.batch(Draw(run["seed"], step, rank, ranks, batch))
        return workload.loss(model(inputs), targets)

    arguments: tuple[Any, ...] = (
        lambda: workload.make_model(run["seed"]),
        optimizer_of,
        loss_of,
        lambda step: run["lr"] * rate_at(run["schedule"], step, steps),
        steps,
    )
    more = {"ranks": ranks, "clip": clip_of(run["method"], task.clip, ranks)}
    if run["method"] == "dense":
        model, sent = train_dense(*arguments, **more), None
    else:
        model, told = train_updates(*arguments, **more, settings=METHODS[run["method"]])
        sent = told["sent"] / sum(p.numel() for p in model.parameters()) / steps
    with torch.no_grad():
        loss = workload.evaluate(model.eval(), rank=0, world_size=4).loss
    return {**run, "loss": loss, "bytes": sent, "seconds": round(time.perf_counter() - began, 1)}


def report(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the page."""
    lines = [
        "# The one line with more ranks and larger models: AdamW",
        "",
        "Held-out loss relative to dense AdamW's, both at the best of the rates that dense AdamW was "
        "trained with; mean and deviation over seeds. Made by `benchmarks/scale.py`, on virtual ranks. "
        '"rank": the batch per rank is fixed; "all": the global batch is. "two-bits" is the default of '
        'models from a million parameters, which smaller models stand for here; "two-bits-every" sends '
        'them on every step. "..., at once" was measured when each local step was lengthened at once, '
        "and not before the exchange.",
        "",
        "| task | steps | schedule | batch | ranks | best rate, of | method | seeds | dense "
        "| over dense | bytes per parameter and step |",
        "|---|---:|---|---|---:|---|---|---:|---:|---:|---:|",
    ]
    cells: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        cell = tuple(row[name] for name in ("task", "steps", "schedule", "batch", "ranks"))
        cells.setdefault(cell, []).append(row)
    for cell, found in sorted(cells.items()):
        dense = [row for row in found if row["method"] == "dense"]
        rates = sorted({row["lr"] for row in dense})
        best = min(
            rates, key=lambda lr: fmean(row["loss"] for row in dense if row["lr"] == lr), default=0
        )
        of_seed = {row["seed"]: row["loss"] for row in dense if row["lr"] == best}
        for method in sorted({row["method"] for row in found} - {"dense"}):
            same = [
                row
                for row in found
                if row["method"] == method and row["lr"] == best and row["seed"] in of_seed
            ]
            if not same:
                continue
            gaps = [100 * (row["loss"] / of_seed[row["seed"]] - 1) for row in same]
            spread = f" ± {stdev(gaps):.1f}" if len(gaps) > 1 else ""
            task, steps, schedule, batch, ranks = cell
            lines.append(
                f"| {task} | {steps} | {schedule} | {batch} | {ranks} "
                f"| {best:g}, {' '.join(f'{lr:g}' for lr in rates)} | {method} | {len(same)} "
                f"| {fmean(of_seed[row['seed']] for row in same):.4g} | {fmean(gaps):+.1f}{spread} % "
                f"| {fmean(row['bytes'] for row in same):.3f} |"
            )
    return "\n".join([*lines, ""])


def main() -> None:
    """Make the missing runs, then write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    words = lambda text: text.split(",")  # noqa: E731
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--tasks", type=words, default=["gpt-100k"], help=", ".join(SIZES))
    parser.add_argument("--ranks", type=numbers, default=[4, 8, 16, 32])
    parser.add_argument("--batches", type=words, default=["all", "rank"])
    parser.add_argument("--seeds", type=numbers, default=[1])
    parser.add_argument("--steps", type=int, default=1_000)
    parser.add_argument("--schedule", default="cosine-0")
    parser.add_argument("--methods", type=words, default=["two-bits"], help=", ".join(METHODS))
    parser.add_argument(
        "--rates", type=lambda text: [float(part) for part in text.split(",")], help="of dense"
    )
    parser.add_argument("--report", action="store_true", help="run nothing")
    given = parser.parse_args()
    torch.set_num_threads(1)
    path = OUT.with_suffix("") / "results.jsonl"
    path.parent.mkdir(exist_ok=True)

    def rows() -> list[dict[str, Any]]:
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def done(run: dict[str, Any]) -> dict[str, Any]:
        """Return a finished run; make it if it is missing."""
        for row in rows():
            if run.items() <= row.items():
                return row
        row = make(run)
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(*run.values(), f"loss {row['loss']:.4g}, {row['seconds']} s", flush=True)
        return row

    cells = [
        {"task": task, "steps": given.steps, "schedule": given.schedule}
        | {"batch": batch, "ranks": ranks, "seed": seed}
        for seed in ([] if given.report else given.seeds)
        for batch in given.batches
        for ranks in given.ranks
        for task in given.tasks
    ]
    for cell in cells:
        rates = given.rates or SIZES[cell["task"]].rates
        dense = [done({**cell, "lr": lr, "method": "dense"}) for lr in rates]
        best = min(dense, key=lambda row: row["loss"])["lr"]
        for method in given.methods:
            done({**cell, "lr": best, "method": method})
    OUT.write_text(report(rows()))


if __name__ == "__main__":
    main()
