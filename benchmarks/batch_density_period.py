"""Measure how batch size, density and the threshold period tau' affect the final loss.

    python benchmarks/batch_density_period.py            (writes batch-density-period.md, .json)
    python benchmarks/batch_density_period.py --seeds 1

All ranks run in one process. Finished runs are stored in the .json and not repeated.
"""

from __future__ import annotations

import argparse
import math
import platform
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import nn
from virtual import Cache, sgd, spread, train, workload_of

from sparsync.presets import resolve
from sparsync.published.oktopk import oktopk

RANKS, STEPS, WIDTH = 4, 600, 256
BATCHES, DENSITIES, PERIODS = (4, 16, 64), (0.001, 0.01, 0.1), (1, 32, "auto")
LR = 0.05


class Perceptron:
    """A perceptron with two hidden layers, which learns the digits in seconds."""

    def __init__(self) -> None:
        self.digits = workload_of("digits")

    def make_model(self, seed: int) -> nn.Module:
        """Return a seed's initial model, with 85 k parameters."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            hidden = (nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
            return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(WIDTH, 10))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.digits, name)


def run(spec: dict, bar) -> dict:
    """Train once."""
    whole = spec["period"] == "dense"
    return train(
        Perceptron(),
        resolve("dense") if whole else oktopk(threshold_period=spec["period"]),
        spec["density"],
        sgd(LR),
        ranks=RANKS,
        steps=STEPS,
        batch_size=spec["batch"],
        seed=spec["seed"],
        bar=bar,
    )


def specify(batch: int, density: float, period, seed: int) -> dict:
    """Return the settings that identify a run."""
    return {"batch": batch, "density": density, "period": period, "seed": seed}


def over_dense(cache: Cache, batch: int, density: float, period, seeds: int) -> list[float]:
    """Return the logarithm of the loss relative to dense for every finished seed."""
    found = []
    for seed in range(seeds):
        base = cache.find(specify(batch, 1.0, "dense", seed))
        one = cache.find(specify(batch, density, period, seed))
        if base and one and one["loss"]:
            found.append(math.log(one["loss"] / base["loss"]))
    return found


def effect(cache: Cache, axis: int, seeds: int) -> str:
    """Return the mean of log(loss / dense's loss) at each value of one axis, over all other axes."""
    levels = (BATCHES, DENSITIES, PERIODS)[axis]
    cells = []
    for level in levels:
        values = [
            value
            for cell in product(BATCHES, DENSITIES, PERIODS)
            if cell[axis] == level
            for value in over_dense(cache, *cell, seeds)
        ]
        cells.append(f"{level:g}" if isinstance(level, float | int) else level)
        cells[-1] += f": {100 * math.expm1(fmean(values)):+.0f} %" if values else ": -"
    return ", ".join(cells)


def report(cache: Cache, seeds: int) -> str:
    """Return the document."""
    lines = [
        "| batch per rank | dense | density | " + " | ".join(f"tau' = {p}" for p in PERIODS) + " |",
        "|---" * (3 + len(PERIODS)) + "|",
    ]
    for batch in BATCHES:
        found = [cache.find(specify(batch, 1.0, "dense", seed)) for seed in range(seeds)]
        losses = [one["loss"] for one in found if one]
        for density in DENSITIES:
            cells = []
            for period in PERIODS:
                logs = over_dense(cache, batch, density, period, seeds)
                ratio = f"{100 * math.expm1(fmean(logs)):+.0f} %" if logs else ""
                cells.append(ratio + (f" ± {100 * stdev(logs):.0f}" if len(logs) > 1 else ""))
            base = spread(losses, 3) if losses else ""
            lines.append(f"| {batch} | {base} | {100 * density:g} % | {' | '.join(cells)} |")
    table = "\n".join(lines)
    return f"""# Batch, density and tau' together

`python benchmarks/batch_density_period.py`, torch {torch.__version__}, {platform.machine()}: a perceptron
(85 k parameters) on digits, {RANKS} ranks, {STEPS} steps of SGD with momentum 0.9 and learning
rate {LR:g}, preset `oktopk`, {seeds} seeds. Cells: held-out loss over that of dense
training with the same batch and seed (geometric mean, and the standard deviation of its logarithm, both
in %).

{table}

Means over everything else: batch {effect(cache, 0, seeds)}; density {effect(cache, 1, seeds)}; tau'
{effect(cache, 2, seeds)}.

Conclusions: **the period does not affect** the loss, because the cap keeps exactly k entries whatever a
threshold finds, so the cheapest period ("auto") is the best choice. **The density matters, and more so
for larger batches.** With 4 samples per rank, whose gradients are mostly noise, 1 % is indistinguishable
from dense. With 16 and 64, noise costs less than waiting entries do, and 10 % is needed. Some of the
bytes that a larger batch saves (through fewer steps) should therefore go into the density. Losses are
small here, as the model has already learnt the training part, so relative differences are larger than for
models that still improve.
"""


def main() -> None:
    """Run the grid; write the results after every run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="a part of a run's name")
    default = Path(__file__).with_name("batch-density-period.md")
    parser.add_argument("--out", type=Path, default=default)
    args = parser.parse_args()
    torch.set_num_threads(1)  # models are small
    cache = Cache(args.out.with_suffix(".json"), args.only)
    for seed in range(args.seeds):
        for batch in BATCHES:
            grid = [(1.0, "dense"), *product(DENSITIES, PERIODS)]
            for density, period in grid:
                spec = specify(batch, density, period, seed)
                cache.make(spec, lambda bar, spec=spec: run(spec, bar))
                args.out.write_text(report(cache, args.seeds), encoding="utf-8")


if __name__ == "__main__":
    main()
