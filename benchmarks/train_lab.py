"""Measure how much faster than DDP each method reaches DDP's loss on a slow network.

    python benchmarks/train_lab.py        (20 to 30 minutes; Linux; writes benchmarks/train_lab.md, .json)

This is equivalent to

    sparsync train --lab 100mbit --ranks 4 --width 416 --batch-size 2 --steps 300 --target-step 100 \
        --algorithm dense,fp16,powersgd,budgeted --json train_lab.json --plot train_lab.png

Every rank is behind a real link with this rate. All runs see the same batches in the same order; a
run ends when it reaches the loss that dense has at the target step.
"""

from __future__ import annotations

import argparse
import os
import platform
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from sparsync.cli.output import write_json
from sparsync.cli.train.command import train
from sparsync.cli.train.results import TrainResult
from sparsync.cli.train.settings import TrainSettings
from sparsync.cost.wording import format_bytes

HERE = Path(__file__).parent
SETTINGS = TrainSettings(
    ranks=4,
    steps=300,  # three times the target, after which a run counts as not reaching it
    width=416,  # 8.6 M parameters
    batch_size=2,  # 4 ranks on 2 cores compute a step in less than 0.6 s
    target_step=100,
    timeout=600.0,
)
ALGORITHMS = ("dense", "fp16", "powersgd", "budgeted")


def row(result: TrainResult, half: TrainResult | None) -> str:
    """Return one row of the table."""
    over_half = "-"
    if half is not None and half.seconds_to_target and result.seconds_to_target:
        over_half = f"{half.seconds_to_target / result.seconds_to_target:.2f}"
    reached = result.seconds_to_target is not None
    kernel = "-" if result.bytes_kernel is None else format_bytes(median(result.bytes_kernel))
    cells = [
        result.algorithm,
        f"{result.speedup_to_target:.2f}" if result.speedup_to_target else "-",
        over_half,
        f"{result.seconds_to_target:.1f}" if reached else "never",
        str(result.steps_to_target) if reached else f"> {result.steps}",
        f"{result.seconds_per_step_median:.2f}",
        f"{result.seconds_computation_median:.2f}",
        f"{result.seconds_rest_median:.2f}",
        format_bytes(median(result.bytes_sent)),
        kernel,
        "yes" if result.replicas_equal else "NO",
    ]
    return "| " + " | ".join(cells) + " |"


def report(results: list[TrainResult], settings: TrainSettings) -> str:
    """Return the table as Markdown."""
    first = results[0]
    half = next((r for r in results if r.algorithm == "fp16"), None)
    heads = (
        "| algorithm | times faster than dense | than fp16 | seconds to the loss | steps "
        "| seconds per step | of which computation | rest | sent per step | counted by the kernel "
        "| replicas equal |"
    )
    return "\n".join(
        [
            f"# Time to loss on links of {settings.lab}",
            "",
            f"`python benchmarks/train_lab.py --lab {settings.lab} --density {settings.density:g}` "
            f"on {os.cpu_count()} cores, torch {torch.__version__}, Python "
            f"{platform.python_version()}; {first.ranks} ranks, {first.parameters:,} parameters, "
            f"{first.optimizer}, lr {first.lr:g}, seed {first.seed}, transport of the last row "
            f"{results[-1].transport}.",
            "",
            f"The loss is {first.target_loss:.3f} nats per byte, dense's loss at step "
            f"{first.target_step}, mean of the last {first.target_window} steps. Times per step are "
            "medians. Bytes are those of the rank that sends most (for PyTorch's hooks, by formula).",
            "",
            heads,
            "|---|" + "---:|" * 10,
            *(row(result, half) for result in results),
            "",
        ]
    )


def main() -> None:
    """Train and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lab", default="100mbit")
    parser.add_argument("--density", type=float, default=SETTINGS.density)
    parser.add_argument("--target-step", type=int, default=SETTINGS.target_step)
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS))
    parser.add_argument("--out", type=Path, default=HERE / "train_lab.md")
    arguments = parser.parse_args()
    settings = replace(
        SETTINGS,
        lab=arguments.lab,
        density=arguments.density,
        target_step=arguments.target_step,
    )
    settings.connection().prepare()
    results = train(settings, arguments.algorithms.split(","))
    assert results is not None
    write_json(arguments.out.with_suffix(".json"), results)
    arguments.out.write_text(report(results, settings), encoding="utf-8")
    print(arguments.out.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
