"""Run WAGMA's ablations (section 5.2) on 64 ranks, as in the paper, with S = 8 and tau = 10.

    python benchmarks/averaging_ablations.py     (two hours of a core; .md and .json)

As in ``averaging_convergence.py``, all ranks are coroutines of one process, in virtual time. The
byte-level transformer is small enough for 64 ranks. Finished runs are stored in the .json and not
repeated.
"""

from __future__ import annotations

import argparse
import platform
from pathlib import Path
from statistics import fmean

import averaging_convergence as convergence
import torch

RANKS, LRS = 64, (0.2, 0.4, 0.8)
DELAY = "two of 64 late on every step"
MODEL = {"layers": 1, "width": 64, "batch_size": 2}  # 128 windows per step in all
WAGMA = "WAGMA, S = 8"
# row -> scheme, its options, and the paper's top-1 accuracy
ROWS = {
    "Allreduce-SGD": ("allreduce", {}, "75.9"),
    WAGMA: ("wagma", {"group_size": 8}, "75.3"),
    "no group collectives": ("local", {"period": 10}, "68.5"),
    "fixed groups, S = 8": ("wagma", {"group_size": 8, "dynamic": False}, "72.2"),
    "S = 4": ("wagma", {"group_size": 4}, "72.8"),
    "S = P = 64": ("wagma", {"group_size": 64}, "no higher; 1.24 x slower"),
}


def prepare(steps: int) -> None:
    """Make ``averaging_convergence`` use this benchmark's ranks and rows."""
    convergence.RANKS, convergence.STEPS, convergence.LOOKS = RANKS, steps, ()
    convergence.BETWEEN = steps - 5
    convergence.DELAYS = {DELAY: ("random:2:0.32", 1)}
    convergence.TRAINED = (DELAY,)
    convergence.WORKLOAD_OPTIONS = {"bytes": MODEL}
    convergence.ROWS = {row: (scheme, options) for row, (scheme, options, _) in ROWS.items()}
    convergence.LRS = {"bytes": LRS}


def row_of(
    name: str, runs: list[dict], bases: list[dict], played: dict | None, fastest: dict
) -> str:
    """Return one row, in which each run is compared with WAGMA's run with the same seed."""
    cells = [name, ROWS[name][2], str(len(runs))]
    if any(run["loss"] is None for run in runs):
        return f"| {' | '.join([*cells, 'diverges', '', '', ''])} |"
    over = [100 * (run["loss"] / base["loss"] - 1) for run, base in zip(runs, bases, strict=True)]
    cells += [convergence.spread([run["loss"] for run in runs], 4)]
    cells += [f"{convergence.spread(over, 1, '+')} %"]
    cells += [f"{convergence.spread([100 * run['accuracy'] for run in runs], 2)} %"]
    cells += [f"{fastest['virtual_seconds'] / played['virtual_seconds']:.2f}" if played else ""]
    cells += [f"{fmean(run['own_loss'] / run['between_loss'] - 1 for run in runs):+.1%}"]
    return f"| {' | '.join(cells)} |"


def report(cache: convergence.Cache, seeds: int, steps: int) -> str:
    """Return the document."""
    tried = {lr: cache.find(convergence.specify("bytes", "Allreduce-SGD", 0, lr)) for lr in LRS}
    losses = ", ".join(
        f"{convergence.shown(run['loss'])} at {lr:g}" for lr, run in tried.items() if run
    )
    found = {row: convergence.found(cache, "bytes", row, seeds, DELAY) for row in ROWS}
    lines = []
    for row, runs in found.items():
        both = sorted(set(runs) & set(found[WAGMA]))
        if both:
            pairs = [runs[s] for s in both], [found[WAGMA][s] for s in both]
            fastest = convergence.played(cache, WAGMA, DELAY)
            lines.append(row_of(row, *pairs, convergence.played(cache, row, DELAY), fastest))
    size = next((run["parameters"] for runs in found.values() for run in runs.values()), 0)
    return f"""# The ablations of WAGMA on 64 ranks

`python benchmarks/averaging_ablations.py`, torch {torch.__version__}, {platform.machine()}: {RANKS}
ranks, tau = 10. As in section 5.2, two ranks, drawn anew for every step, are late by 320 ms. Time is
virtual (see `benchmarks/averaging-convergence.md`). The model is the byte transformer with one layer of
width 64 ({size:,} parameters), 2 windows per rank, {steps} steps of SGD with momentum 0.9 after 20 of
warm-up, at Allreduce-SGD's best learning rate for all schemes: {losses}.

*Over WAGMA*: held-out loss relative to WAGMA's run with the same seed, mean and standard deviation.
*Throughput*: steps per virtual second, relative to WAGMA's. *Own models*: mean of the ranks' own losses,
relative to the loss of their mean model, midway between two global averages. *Paper*: top-1 accuracy of
ResNet-50 after 90 epochs, %.

The ordering is the same as in the paper: without groups is worst by far, then fixed groups, then smaller
groups. The difference between S = P and S = 8 is within the differences between seeds. S = P costs no
throughput here, because passive participation is free in the simulator
(`benchmarks/averaging-throughput.md`). Allreduce-SGD is further ahead than in the paper: {steps} steps
instead of 28,000 end while the models still change fast.

| scheme | paper | seeds | held-out loss | over WAGMA | accuracy | throughput | own models |
|---|---|---|---|---|---|---|---|
{chr(10).join(lines)}
"""


def main() -> None:
    """Make the missing runs, seed by seed; write the results after each run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    default = Path(__file__).with_name("averaging-ablations.md")
    parser.add_argument("--out", type=Path, default=default)
    args = parser.parse_args()
    torch.set_num_threads(1)  # models are small
    prepare(args.steps)
    cache = convergence.Cache(args.out.with_suffix(".json"), "")
    for row in ROWS:
        cache.make({"row": row, "seed": 0, "delay": DELAY})
    for lr in LRS:
        cache.make(convergence.specify("bytes", "Allreduce-SGD", 0, lr))
    for seed in range(args.seeds):
        for row in ROWS:
            cache.make(convergence.specify("bytes", row, seed, cache.best_lr("bytes")))
            args.out.write_text(report(cache, args.seeds, args.steps), encoding="utf-8")


if __name__ == "__main__":
    main()
