"""Compare quantised top-k SGD (SparCML, Algorithm 1; 16 of every 512 entries at 4 bits) with dense.

    python benchmarks/sparcml.py        (5 minutes; writes benchmarks/sparcml.md, .json; resumes)

This is equivalent to ``sparsync train --ranks 4 --steps 300 --density 0.03125 --lr LR --algorithm
NAME``.
"""

from __future__ import annotations

import argparse
import platform
from pathlib import Path

import torch
from runs import Runs

ENTRIES, BLOCK = 16, 512
RANKS = 4
LRS = (0.1, 0.15, 0.2)  # 0.1 is the demo's


def spec(steps: int, algorithm: str, lr: float) -> dict:
    """Return the settings that identify a run."""
    return {
        "part": "sparcml",
        "steps": steps,
        "density": ENTRIES / BLOCK,
        "lr": lr,
        "algorithm": algorithm,
    }


def report(runs: Runs, steps: int) -> str:
    """Return the table."""
    found = {
        (name, lr): run
        for name in ("dense", "sparcml")
        for lr in LRS
        if (run := runs.find(spec(steps, name, lr))) and run["eval_loss"]
    }
    losses = {key: run["eval_loss"] for key, run in found.items()}
    demo = losses.get(("dense", LRS[0]))
    best = min((loss for (name, _), loss in losses.items() if name == "dense"), default=None)
    rows = []
    for (name, lr), run in found.items():
        over = [f"{losses[name, lr] / base:.4f}" if base else "" for base in (demo, best)]
        whole = found.get(("dense", lr), run)
        fewer = whole["bytes_sent_per_step_mean"] / run["bytes_sent_per_step_mean"]
        equal = "yes" if run["replicas_equal"] else "NO"
        cells = [name, f"{lr:g}", *over, f"{losses[name, lr]:.4f}", f"{fewer:.1f}", equal]
        rows.append("| " + " | ".join(cells) + " |")
    parameters = next((run["parameters"] for run in found.values()), 0)
    table = "\n".join(rows)
    return f"""# SparCML: quantised top-k SGD

`python benchmarks/sparcml.py`, torch {torch.__version__}, {platform.machine()}; {parameters:,} parameters
of the demo's byte transformer, {RANKS} ranks, {steps} steps, SGD with momentum 0.9, seed 0. Preset
`sparcml`: {ENTRIES} of every {BLOCK} entries, 4 bits, layer by layer; the quantisation error is lost (as
published), and sums are applied at 1/{RANKS} of the learning rate. Embeddings, norms and the output layer
are exchanged dense, because the gradient of a byte's row is large as a whole, and {ENTRIES} of {BLOCK}
entries hold a third of its energy. *Over demo*: held-out loss relative to dense's at the demo's learning
rate; *over best*: relative to dense's at its best rate. Two seeds of dense differ by up to 1 %.

| | lr | over demo | over best | held-out loss | fewer bytes | replicas equal |
|---|---|---|---|---|---|---|
{table}
"""


def main() -> None:
    """Train, then write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()

    def write() -> None:
        args.out.write_text(report(runs, args.steps), encoding="utf-8")

    runs = Runs(args.out.with_suffix(".json"), RANKS, after=write)
    for lr in LRS:
        for name in ("dense", "sparcml"):
            runs.make(spec(args.steps, name, lr))
    write()


if __name__ == "__main__":
    main()
