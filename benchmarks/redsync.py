"""Measure RedSync's convergence on 4 ranks, with a small VGG on digits and a small LSTM on text.

    python benchmarks/redsync.py                        (writes benchmarks/redsync.md, .json)
    python benchmarks/redsync.py --only lstm --seeds 1  (runs with "lstm" in their name, one seed)

Part "convergence" asks the question of Table 1 and Figure 6: are RedSync and its quantised form as
good as dense after the same number of steps? Part "batches" asks the question of Table 2: are they
as good with large batches, after the same number of epochs? Finished runs are stored in the .json
and not repeated, so a run can be interrupted; the table shows all finished runs.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean, stdev

import torch
from runs import Runs, spread

from sparsync.cli.workloads import workload_class
from sparsync.cli.workloads.digits import DigitsWorkload

RANKS = 4
DENSITIES = (0.01, 0.001)
BATCHES = (128, 256, 512, 1024, 2048)  # images of all ranks together (Table 2)
BATCH_DENSITY = 0.001
BATCH_LRS = (0.5, 1, 2)  # factors on the default learning rate; all methods use dense's best rate
WARMUP = 15  # the learning rate rises over a fifteenth of the steps


WHY = (
    "",
    "## Where RedSync is worse than dense, and why",
    "",
    "- **Few steps.** At 0.1 %, a rank delivers one entry in a thousand per step, or 0.3 entries per "
    "parameter in 300 steps, so most of the model's change is still in residuals at the end. The gap "
    "shrinks in longer runs: after 1,200 steps (`benchmarks/redsync-long.md`), the LSTM at 1 % is as "
    "good as dense, and at 0.1 %, a quarter to a third of the gap in nats remains.",
    "- **Digits.** Compressed runs differ much more between seeds than dense runs do: the small VGG is "
    "trained at dense's best constant learning rate, and single seeds are behind at step 300. After "
    "1,123 steps (batch 128 above), all three end within 0.6 points of each other.",
    "- **Large batches.** From 512 on, 100 epochs are at most 281 steps, too few for this network at "
    "all three learning rates: dense itself stays near ln 10 = 2.303, or ends far from its loss with "
    "batches of 128. These rows are no evidence for or against compression.",
)


# ---- what is run -----------------------------------------------------------------------------------


def rows(args: argparse.Namespace) -> Iterator[tuple[str, float]]:
    """Yield algorithms and densities, beginning with dense."""
    yield "dense", 1.0
    for name in args.algorithms:
        yield from ((name, density) for density in DENSITIES)


def convergence(
    args: argparse.Namespace, workload: str, algorithm: str, density: float, seed: int
) -> dict:
    """Return the settings of a run in part "convergence"."""
    return {
        "part": "convergence",
        "workload": workload,
        "algorithm": algorithm,
        "density": density,
        "seed": seed,
        "steps": args.steps,
        "lr": workload_class(workload).defaults.sgd_lr,
        "clip": args.clip,
    }


def batch(args: argparse.Namespace, total: int, algorithm: str, lr: float) -> dict:
    """Return the settings of a run in part "batches", with equally many epochs for every batch size."""
    images = len(DigitsWorkload().parts[0][1])
    return {
        "part": "batches",
        "workload": "digits",
        "algorithm": algorithm,
        "density": 1.0 if algorithm == "dense" else BATCH_DENSITY,
        "seed": 0,
        "steps": max(1, round(args.epochs * images / total)),
        "lr": lr,
        "batch_size": total // RANKS,
    }


def best_dense(args: argparse.Namespace, runs: Runs, total: int) -> dict | None:
    """Return dense's run at its best learning rate, once all of dense's runs are done."""
    base = workload_class("digits").defaults.sgd_lr
    tried = [runs.find(batch(args, total, "dense", times * base)) for times in BATCH_LRS]
    if any(run is None for run in tried):
        return None
    return min((run for run in tried if run), key=lambda run: run["eval_loss"] or math.inf)


def make(runs: Runs, spec: dict) -> None:
    """Make one run; the learning rate warms up over a fifteenth of the steps."""
    runs.make(spec, lr_warmup_steps=max(1, spec["steps"] // WARMUP))


def run_all(args: argparse.Namespace, runs: Runs) -> None:
    """Make the missing runs: first each row with all seeds, then the batch sizes."""
    for workload in ("digits", "lstm"):
        for algorithm, density in rows(args):
            for seed in range(args.seeds):
                make(runs, convergence(args, workload, algorithm, density, seed))
    base = workload_class("digits").defaults.sgd_lr
    for total in BATCHES:
        for times in BATCH_LRS:
            make(runs, batch(args, total, "dense", times * base))
        best = best_dense(args, runs, total)
        for algorithm in args.algorithms if best else ():
            make(runs, batch(args, total, algorithm, best["settings"]["lr"]))


# ---- what is shown ---------------------------------------------------------------------------------


def report(args: argparse.Namespace, runs: Runs) -> str:
    """Return all tables as Markdown."""
    command = f"python benchmarks/redsync.py --steps {args.steps} --epochs {args.epochs}"
    lines = [
        "# RedSync compared with dense",
        "",
        f"`{command}` on {os.cpu_count()} cores, torch {torch.__version__}, Python "
        f"{platform.python_version()}; {RANKS} ranks, SGD with momentum 0.9, constant "
        "learning rate, no dense steps first.",
        *convergence_table(
            args, runs, "digits", "accuracy %", lambda run: 100 * run["accuracy"], 1
        ),
        *convergence_table(
            args, runs, "lstm", "perplexity", lambda run: math.exp(run["eval_loss"]), -1
        ),
        *batch_table(args, runs),
        *WHY,
    ]
    return "\n".join(lines) + "\n"


def convergence_table(
    args: argparse.Namespace,
    runs: Runs,
    workload: str,
    heading: str,
    measure: Callable[[dict], float],
    sign: int,
) -> list[str]:
    """Return mean and standard deviation over seeds, and whether the results are as good as dense.

    Larger values of ``sign * measure`` are better.
    """
    defaults = workload_class(workload).defaults
    clip = f", clip {defaults.clip:g}" if defaults.clip else ""
    lines = [
        "",
        f"## {workload}: {args.steps} steps, lr {defaults.sgd_lr:g}{clip}, batch "
        f"{defaults.batch_size} per rank",
        "",
        "Mean and standard deviation over seeds; *as dense*: not worse by more than one standard "
        "deviation of dense (how many it is worse).",
        "",
        f"| algorithm | density | seeds | held-out loss | as dense | {heading} | as dense "
        "| bytes sent per step | of dense | replicas equal |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    dense: list[dict] = []
    for algorithm, density in rows(args):
        specs = [convergence(args, workload, algorithm, density, s) for s in range(args.seeds)]
        done = [run for run in map(runs.find, specs) if run]
        if not done:
            continue
        dense = dense or done
        if any(run["eval_loss"] is None for run in (*done, *dense)):
            lines.append(f"| {algorithm} | {density:g} | {len(done)} | diverges | | | | | | |")
            continue
        cells = []
        for value, better in ((lambda run: run["eval_loss"], -1), (measure, sign)):
            ours, theirs = list(map(value, done)), list(map(value, dense))
            cells += [spread(ours), verdict(ours, theirs, better) if dense is not done else ""]
        sent, whole = (fmean(r["bytes_sent_per_step_mean"] for r in part) for part in (done, dense))
        equal = "yes" if all(run["replicas_equal"] for run in done) else "NO"
        lines.append(
            f"| {algorithm} | {density:g} | {len(done)} | {' | '.join(cells)} | {sent:,.0f} "
            f"| {sent / whole:.2%} | {equal} |"
        )
    return lines if dense else []


def verdict(ours: list[float], dense: list[float], better: int) -> str:
    """Return whether the mean is worse than dense's by more than dense's standard deviation."""
    if len(dense) < 2:
        return ""
    worse, deviation = better * (fmean(dense) - fmean(ours)), stdev(dense)
    count = f" ({worse / deviation:+.1f})" if deviation else ""
    return ("yes" if worse <= deviation else "**no**") + count


def batch_table(args: argparse.Namespace, runs: Runs) -> list[str]:
    """Return held-out error and loss by batch size."""
    names = ("dense", *args.algorithms)
    lines = [
        "",
        f"## digits: batch sizes, {args.epochs} epochs each, one seed",
        "",
        f"Held-out error in % (loss) at density {BATCH_DENSITY:g}; the learning rate is dense's best "
        f"of {len(BATCH_LRS)}. One of the held-out images is 0.28 %; a batch of 2,048 is more than the "
        "1,438 training images.",
        "",
        f"| total batch | steps | lr | {' | '.join(names)} |",
        "|---" * (3 + len(names)) + "|",
    ]
    for total in BATCHES:
        best = best_dense(args, runs, total)
        if best is None:
            continue
        lr = best["settings"]["lr"]
        done = [runs.find(batch(args, total, name, lr)) for name in names]
        cells = " | ".join(map(error, done))
        lines.append(f"| {total} | {best['settings']['steps']} | {lr:g} | {cells} |")
    return lines if any(best_dense(args, runs, total) for total in BATCHES) else []


def error(run: dict | None) -> str:
    """Format a run's held-out error and loss."""
    if run is None:
        return ""
    loss = "diverges" if run["eval_loss"] is None else f"{run['eval_loss']:.3f}"
    return f"{100 * (1 - run['accuracy']):.2f} ({loss})"


def main() -> None:
    """Run the grid."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="of the first part")
    parser.add_argument("--steps", type=int, default=300, help="of the first part")
    parser.add_argument("--epochs", type=int, default=100, help="of the second part")
    parser.add_argument(
        "--only", default="", help='a part of a run\'s name, as "lstm" or "batches"'
    )
    parser.add_argument("--algorithms", nargs="+", default=["redsync", "redsync-quantized"])
    parser.add_argument("--clip", type=float, help="of both workloads; default: each one's own")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    args = parser.parse_args()

    def write() -> None:
        args.out.write_text(report(args, runs))

    runs = Runs(args.out.with_suffix(".json"), RANKS, args.only, write)
    run_all(args, runs)
    write()


if __name__ == "__main__":
    main()
