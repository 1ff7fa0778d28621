"""Loss against bytes: fixed densities, and one that follows signal and noise of the gradient.

    python benchmarks/adaptive_density.py          (writes adaptive-density.md, .json)

All ranks run in one process.  Finished runs stand in the .json and are not made again.
"""

from __future__ import annotations

import argparse
import math
import platform
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import torch
from virtual import Cache, sgd, spread, train, workload_of

from sparsync.feedback.schedule import AdaptiveDensity
from sparsync.presets import resolve

RANKS, STEPS, BATCH, LR = 4, 300, 8, 0.2
FIXED = (0.001, 0.003, 0.01, 0.02, 0.05)
AT_EQUAL = (0.003, 0.01)
PERIOD = 20  # steps between measurements: 15 in all


def run(spec: dict, bar) -> dict:
    """Train once; note the density of every step."""
    densities: list[float] = []
    density = spec["density"]
    if spec["rule"] == "adaptive":
        density = AdaptiveDensity(density, low=0.0005, high=0.1, period=PERIOD)

    def after_step(reducer, comm) -> None:
        if comm.rank == 0:
            densities.append(reducer.plan.density)

    result = train(
        workload_of("bytes"),
        resolve("dense") if spec["rule"] == "dense" else resolve("budgeted"),
        density,
        sgd(LR),
        ranks=RANKS,
        steps=STEPS,
        batch_size=BATCH,
        seed=spec["seed"],
        bar=bar,
        after_step=after_step,
    )
    tenths = [fmean(densities[i : i + STEPS // 10]) for i in range(0, STEPS, STEPS // 10)]
    return {**result, "tenths": tenths}


def specify(rule: str, density: float, seed: int) -> dict:
    """Return what tells a run apart."""
    return {"rule": rule, "density": density, "seed": seed}


ROWS = (
    ("dense", 1.0),
    *(("fixed", density) for density in FIXED),
    *(("adaptive", density) for density in AT_EQUAL),
)


def on_the_curve(cache: Cache, seed: int, sent: float) -> float | None:
    """Return the loss of fixed densities at as many bytes, between its neighbours on a log scale."""
    runs = [run for d in FIXED if (run := cache.find(specify("fixed", d, seed)))]
    points = sorted((math.log(run["sent"]), run["loss"]) for run in runs)
    for (x, y), (z, w) in pairwise(points):
        if x <= math.log(sent) <= z:
            return y + (w - y) * (math.log(sent) - x) / (z - x)
    return None


def report(cache: Cache, seeds: int) -> str:
    """Return the document."""
    lines = [
        "| density | seeds | MB sent per rank | held-out loss | over fixed at as many bytes "
        "| density of every tenth, % (seed 0) |",
        "|---|---|---|---|---|---|",
    ]
    for rule, density in ROWS:
        runs = {s: run for s in range(seeds) if (run := cache.find(specify(rule, density, s)))}
        if not runs:
            continue
        over = [
            100 * (run["loss"] / fixed - 1)
            for seed, run in runs.items()
            if (fixed := on_the_curve(cache, seed, run["sent"]))
        ]
        tenths = ", ".join(f"{100 * x:.2g}" for x in next(iter(runs.values()))["tenths"])
        lines.append(
            f"| {rule} {density:g} | {len(runs)} | {fmean(r['sent'] for r in runs.values()) / 1e6:.2f} "
            f"| {spread([run['loss'] for run in runs.values()])} "
            f"| {f'{spread(over, 1)} %' if over and rule == 'adaptive' else ''} "
            f"| {tenths if rule == 'adaptive' else ''} |"
        )
    table = "\n".join(lines)
    return f"""# A density that follows the gradient's signal and noise

`python benchmarks/adaptive_density.py`, torch {torch.__version__}, {platform.machine()}: the byte
transformer with 2 layers of width 96 (277,440 parameters), {RANKS} ranks, {STEPS} steps of SGD with
momentum 0.9 and learning rate {LR:g}, batch {BATCH} per rank, `budgeted`. *adaptive d*:
`AdaptiveDensity(d, low=0.0005, high=0.1, period={PERIOD})`, d being the density where signal and noise
are equal; what its measurements send is in the bytes. *Over fixed at as many bytes*: of the same seed,
interpolated between fixed densities on a logarithmic scale of bytes; below 0 the rule pays.

{table}
"""


def main() -> None:
    """Run the rows; write after every run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", default="", help="a part of a run's name")
    default = Path(__file__).with_name("adaptive-density.md")
    parser.add_argument("--out", type=Path, default=default)
    args = parser.parse_args()
    torch.set_num_threads(1)  # models are small
    cache = Cache(args.out.with_suffix(".json"), args.only)
    for seed in range(args.seeds):
        for rule, density in ROWS:
            spec = specify(rule, density, seed)
            cache.make(spec, lambda bar, spec=spec: run(spec, bar))
            args.out.write_text(report(cache, args.seeds), encoding="utf-8")


if __name__ == "__main__":
    main()
