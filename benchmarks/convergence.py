"""Compare Ok-Topk's loss with dense's after equally many steps, at dense's best learning rate.

    python benchmarks/convergence.py --optimizer sgd        (writes benchmarks/convergence-sgd.md, .json)
    python benchmarks/convergence.py --optimizer adam

Dense is trained at several learning rates, and Ok-Topk at the best of them.  Every figure is the
mean over three seeds (of data and initial weights). Every row is written once it is done, so a run
can be interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path
from statistics import fmean

import numpy as np
import torch

from sparsync.cli.train.command import train
from sparsync.cli.train.settings import TrainSettings

HERE = Path(__file__).parent
LEARNING_RATES = {"sgd": (0.1, 0.3, 0.03), "adam": (1e-3, 3e-3)}
SEEDS = (0, 1, 2)


def measure(
    algorithm: str, optimizer: str, lr: float, density: float, warmup_steps: int, args
) -> dict:
    """Train once per seed; return the mean and the spread."""
    losses, results = [], []
    for seed in SEEDS:
        settings = TrainSettings(
            ranks=args.ranks,
            steps=args.steps,
            density=density,
            seed=seed,
            optimizer=optimizer,
            lr=lr,
            warmup_steps=warmup_steps,
        )
        (result,) = train(settings, [algorithm])
        losses.append(result.eval_loss)
        results.append(result)
    return {
        "algorithm": algorithm,
        "optimizer": optimizer,
        "lr": lr,
        "density": 1.0 if algorithm == "dense" else density,
        "warmup_steps": warmup_steps,
        "eval_loss": float(np.mean(losses)),
        "spread": float(np.std(losses, ddof=1)),
        "eval_losses": losses,
        "bytes_sent_per_step_max": max(r.bytes_sent_per_step_max for r in results),
        "bytes_sent_per_step_mean": fmean(fmean(r.bytes_sent) for r in results),
        "seconds_per_step_median": fmean(r.seconds_per_step_median for r in results),
        "replicas_equal": all(r.replicas_equal for r in results),
    }


def best_dense(rows: list[dict]) -> dict:
    """Return dense's row at its best learning rate, ignoring runs that diverged (NaN)."""
    return min(
        (row for row in rows if row["algorithm"] == "dense"),
        key=lambda row: np.nan_to_num(row["eval_loss"], nan=np.inf),
    )


def table(rows: list[dict], args) -> str:
    """Return the rows as Markdown."""
    best = best_dense(rows)
    lines = [
        f"# Loss after {args.steps} steps, {args.ranks} ranks, {args.optimizer}",
        "",
        f"`python benchmarks/convergence.py --optimizer {args.optimizer} --steps {args.steps}` on "
        f"{os.cpu_count()} cores, torch {torch.__version__}, Python {platform.python_version()}; "
        f"byte-level transformer, mean of seeds {', '.join(map(str, SEEDS))}.",
        "",
        "| algorithm | lr | density | dense steps first | eval loss | spread | over dense's best "
        "| bytes sent per step, mean | replicas equal |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        over = row["eval_loss"] / best["eval_loss"] - 1
        loss = f"{row['eval_loss']:.4f} | {row['spread']:.4f} | {over:+.1%}"
        if np.isnan(row["eval_loss"]):
            diverged = sum(map(np.isnan, row["eval_losses"]))
            loss = f"diverges for {diverged} of {len(SEEDS)} seeds | |"
        lines.append(
            f"| {row['algorithm']} | {row['lr']:g} | {row['density']:g} | {row['warmup_steps']} "
            f"| {loss} "
            f"| {row['bytes_sent_per_step_mean']:,.0f} "
            f"| {'yes' if row['replicas_equal'] else 'NO'} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the grid."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--optimizer", choices=sorted(LEARNING_RATES), default="sgd")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--ranks", type=int, default=4)
    args = parser.parse_args()
    rows: list[dict] = []

    def run(algorithm: str, lr: float, density: float = 0.01, warmup_steps: int = 0) -> dict:
        rows.append(measure(algorithm, args.optimizer, lr, density, warmup_steps, args))
        (HERE / f"convergence-{args.optimizer}.json").write_text(
            json.dumps(rows, indent=1).replace("NaN", "null") + "\n"
        )
        (HERE / f"convergence-{args.optimizer}.md").write_text(table(rows, args))
        print(table(rows, args).splitlines()[-1], flush=True)
        return rows[-1]

    for lr in LEARNING_RATES[args.optimizer]:
        run("dense", lr)
    best = best_dense(rows)["lr"]
    run("oktopk", best)
    if args.optimizer == "adam":  # Adam's loss suffers more, so also measure remedies
        run("oktopk", best, warmup_steps=args.steps // 10)
        run("oktopk", best, density=0.05)


if __name__ == "__main__":
    main()
