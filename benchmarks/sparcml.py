"""Quantised top-k SGD (SparCML, Algorithm 1): 16 of every 512 entries at 4 bits, against dense.

    python benchmarks/sparcml.py        (5 minutes; writes benchmarks/sparcml.md)

Runs what ``sparsync train --ranks 4 --steps 300 --density 0.03125 --algorithm dense,sparcml`` runs.
"""

from __future__ import annotations

import argparse
import platform
from pathlib import Path

import torch

from sparsync.bench.train import train
from sparsync.bench.train_settings import TrainSettings

ENTRIES, BLOCK = 16, 512
RANKS, STEPS = 4, 300


def main() -> None:
    """Train, then write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    settings = TrainSettings(ranks=RANKS, steps=arguments.steps, density=ENTRIES / BLOCK)
    results = train(settings, ["dense", "sparcml"])
    assert results is not None, "start this script without a launcher"
    dense = results[0]
    rows = "\n".join(
        f"| {r.algorithm} | {r.eval_loss / dense.eval_loss:.4f} | {r.eval_loss:.4f} "
        f"| {dense.bytes_sent_per_step_max / r.bytes_sent_per_step_max:.1f} "
        f"| {'yes' if r.replicas_equal else 'NO'} |"
        for r in results
    )
    arguments.out.write_text(
        f"""# SparCML: quantised top-k SGD

`python benchmarks/sparcml.py`, torch {torch.__version__}, {platform.machine()}; {dense.parameters:,}
parameters of the demo's byte transformer, {RANKS} ranks, {arguments.steps} steps, SGD with momentum 0.9,
seed {settings.seed}. Preset `sparcml`: {ENTRIES} of every {BLOCK} entries, 4 bits, layer by layer, the
quantisation error lost (as published), sums applied at 1/{RANKS} of the learning rate. Embeddings,
norms and the output layer go dense: the gradient of a byte's row is large as a whole, and {ENTRIES} of
{BLOCK} entries hold a third of its energy.

| | held-out loss over dense's | held-out loss | fewer bytes | replicas equal |
|---|---|---|---|---|
{rows}
""",
        encoding="utf-8",
    )
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
