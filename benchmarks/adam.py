"""Compare variants of AdamW that exchange sparsely with dense AdamW, on 4 ranks.

    python benchmarks/adam.py                (long; writes benchmarks/adam.md, .json)
    python benchmarks/adam.py --only signs   (only runs with "signs" in their name)

Finished runs are stored in the .json and not repeated.
"""

from __future__ import annotations

import argparse
import platform
from pathlib import Path
from statistics import fmean

import torch
from runs import Runs, spread

RANKS = 4
LRS = (1e-3, 3e-3, 1e-2)
STEPS = (300, 1000)
LIMIT = 1.05
# row -> options of ``sparsync train``
VARIANTS = {
    "local, signs": {"algorithm": "signs", "space": "local"},
    "local, allgather": {"algorithm": "allgather", "space": "local"},
    "local, budgeted": {"algorithm": "budgeted", "space": "local"},
    "local, signs, periods grow over 100 steps": {
        "algorithm": "signs", "space": "local", "warmup_steps": 100
    },
    "update space, local moments": {"algorithm": "allgather", "space": "update"},
    "update space, refreshed second moment": {"algorithm": "allgather", "space": "refreshed"},
    "update space, second moment frozen after 30 dense steps": {
        "algorithm": "allgather", "space": "frozen", "warmup_steps": 30
    },
    "gradient space (Ok-Topk's BERT)": {"algorithm": "oktopk"},
    "gradient space, 30 dense steps first": {"algorithm": "oktopk", "warmup_steps": 30},
}  # fmt: skip
DENSITIES = (0.01, 0.001)


def spec(steps: int, seed: int, lr: float, density: float = 1.0, **options) -> dict:
    """Return the settings that identify a run."""
    return {
        "part": "adam", "steps": steps, "seed": seed, "lr": lr, "density": density, **options
    }  # fmt: skip


def dense(steps: int, seed: int, lr: float) -> dict:
    """Return the settings of a run with dense AdamW."""
    return spec(steps, seed, lr, algorithm="dense")


def best_lr(runs: Runs, steps: int) -> float:
    """Return dense's best learning rate among finished runs, or the middle one if there are no runs."""
    tried = {lr: runs.find(dense(steps, 0, lr)) for lr in LRS}
    known = {lr: run["eval_loss"] for lr, run in tried.items() if run and run["eval_loss"]}
    return min(known, key=known.__getitem__) if known else LRS[1]


def run_all(runs: Runs, seeds: int) -> None:
    """Make the missing runs, beginning with those that determine the learning rate."""
    for steps in STEPS:
        for lr in LRS:
            runs.make(dense(steps, 0, lr), optimizer="adamw")
    for seed in range(seeds):
        for steps in STEPS:
            lr = best_lr(runs, steps)
            runs.make(dense(steps, seed, lr), optimizer="adamw")
            for density in DENSITIES:
                for name in VARIANTS:
                    runs.make(spec(steps, seed, lr, density, **VARIANTS[name]), optimizer="adamw")


def report(runs: Runs, seeds: int) -> str:
    """Return the tables."""
    lines = [
        "# AdamW with a sparse exchange",
        "",
        f"`python benchmarks/adam.py` on torch {torch.__version__}, {platform.machine()}: the byte "
        f"transformer of `sparsync train`, {RANKS} ranks, AdamW with weight decay 0.01, constant "
        "learning rate. Held-out loss is the mean and standard deviation over seeds, at dense's best "
        "learning rate. *Over dense* is this mean relative to dense's mean with the same seeds; values "
        "within 5 % are **bold**. *Words* are the 32-bit words sent per step, divided by n. They "
        "exclude the final dense delivery of `local` (1.5 words per element, once). Index-value pairs "
        "at 1 % (0.1 %) would take 0.02 (0.002) per message, three of which every rank forwards or "
        "sends.",
    ]
    for steps in STEPS:
        lines += section(runs, steps, seeds)
    return "\n".join(lines) + "\n"


def section(runs: Runs, steps: int, seeds: int) -> list[str]:
    """Return the table for runs of one length."""
    tried = {lr: runs.find(dense(steps, 0, lr)) for lr in LRS}
    losses = ", ".join(
        f"{run['eval_loss'] or float('nan'):.4f} at {lr:g}" for lr, run in tried.items() if run
    )
    lines = [
        "",
        f"## {steps} steps",
        "",
        f"Dense, seed 0: {losses}.",
        "",
        "| variant | density | seeds | held-out loss | over dense | words per step | replicas equal |",
        "|---|---|---|---|---|---|---|",
    ]
    lr = best_lr(runs, steps)
    base = {s: r for s in range(seeds) if (r := runs.find(dense(steps, s, lr)))}
    if not base:
        return []
    lines.append(row("dense", 1.0, base, base, steps))
    for density in DENSITIES:
        for name, options in VARIANTS.items():
            specs = {s: spec(steps, s, lr, density, **options) for s in range(seeds)}
            found = {s: run for s, one in specs.items() if (run := runs.find(one)) and s in base}
            if found:
                lines.append(row(name, density, found, base, steps))
    return lines


def row(name: str, density: float, found: dict, base: dict, steps: int) -> str:
    """Write one line."""
    if any(run["eval_loss"] is None for run in found.values()):
        return f"| {name} | {density:g} | {len(found)} | diverges | | | |"
    losses = [run["eval_loss"] for run in found.values()]
    over = fmean(losses) / fmean(base[s]["eval_loss"] for s in found)
    mark = "**" if over <= LIMIT and name != "dense" else ""
    run = next(iter(found.values()))
    sent = fmean(r["bytes_sent_per_step_mean"] for r in found.values())
    if name.startswith("local"):
        sent -= 1.5 * 4 * run["parameters"] / steps  # the last delivery
    words = sent / 4 / run["parameters"]
    equal = "yes" if all(r["replicas_equal"] for r in found.values()) else "NO"
    return (
        f"| {name} | {density:g} | {len(found)} | {spread(losses)} | {mark}{over - 1:+.1%}{mark} "
        f"| {words:.4f} | {equal} |"
    )


def main() -> None:
    """Run the grid."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help='a part of a run\'s name, as "signs"')
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    args = parser.parse_args()

    def write() -> None:
        args.out.write_text(report(runs, args.seeds))

    runs = Runs(args.out.with_suffix(".json"), RANKS, args.only, write)
    run_all(runs, args.seeds)
    write()


if __name__ == "__main__":
    main()
