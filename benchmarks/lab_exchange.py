"""Compare one exchange of every collective on real links with gloo's dense allreduce.

    python benchmarks/lab_exchange.py     (about 15 minutes; Linux; writes benchmarks/lab_exchange.md)

This runs the equivalent of these commands, one after the other, and shows the ratios first:

    sparsync bench --lab 1gbit --ranks 8 --size 14728266 --density 0.01 \
        --collectives dense,allgather,oktopk,budgeted,halving
    sparsync bench --lab 1gbit --ranks 4 ...
    sparsync bench --lab 100mbit --ranks 8 ...
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).parent
SIZE = 14_728_266  # VGG-16 on CIFAR-10
COLLECTIVES = "dense,allgather,oktopk,budgeted,halving"
RUNS = (
    ("1gbit", 8, COLLECTIVES, "auto"),
    ("1gbit", 4, COLLECTIVES, "auto"),
    ("100mbit", 8, "dense,oktopk,budgeted", "auto"),
    ("1gbit", 8, "dense,oktopk,budgeted", "torch"),  # shows the gain from the default transport
)
HEADINGS = (
    "collective",
    "speed-up, whole",
    "speed-up, exchange",
    "exchange / wire",
    "local / add_",
    "processor / add_",
    "whole, ms",
    "exchange, ms",
    "add_, ms",
    "processor, ms",
    "words per k",
    "bound",
    "kernel / ledger bytes",
    "wrong",
)


def measure(rate: str, ranks: int, collectives: str, transport: str) -> list[dict]:
    """Run one ``sparsync bench`` in a separate process; return its rows."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "sparsync", "bench", "--lab", rate, "--ranks", str(ranks)]
        command += ["--size", str(SIZE), "--density", "0.01", "--collectives", collectives]
        command += ["--transport", transport, "--json", str(rows)]
        subprocess.run(command, check=True, timeout=3600)
        return json.loads(rows.read_text("utf-8"))


def line(row: dict) -> str:
    """Return one row of a table."""
    most = max(row["bytes_sent_max"], row["bytes_received_max"])
    bound = row["bound_words_per_k"]
    cells = [
        row["collective"],
        f"{row['speedup']:.1f}",
        f"{row['speedup_exchange']:.1f}",
        f"{row['exchange_over_wire']:.1f}",
        f"{row['local_over_add']:.2f}",
        f"{row['processor_over_add']:.2f}",
        f"{1e3 * row['seconds_median']:.0f}",
        f"{1e3 * row['seconds_exchange_median']:.1f}",
        f"{1e3 * row['seconds_add_median']:.0f}",
        f"{1e3 * row['processor_exchange_median']:.1f}",
        f"{row['words_per_k_max']:.2f}",
        "-" if bound is None else f"{bound:.2f}",
        f"{row['bytes_kernel_max'] / most:.3f}",
        str(row["wrong"]),
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Run all commands, and write the results after each."""
    parser = argparse.ArgumentParser(description="Every collective on real links of this machine.")
    parser.add_argument("--output", type=Path, default=HERE / "lab_exchange.md")
    arguments = parser.parse_args()
    text = [
        "# One exchange on real links",
        "",
        f"n = {SIZE:,}, density 1 %, uniform gradients with error feedback; every rank in a network",
        "namespace, links shaped in both directions. Medians; `dense` is gloo's native allreduce.",
        f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, one thread per rank.",
        "",
        "*Whole*: `reduce()`, from accumulation to the average. *Exchange*: from selected entries to",
        "the total. *Wire*: the link's time for the row's bytes, minus tbf's burst. *Local*: whole",
        "minus exchange, relative to `residual.add_(gradient)` on all ranks at once in the same run.",
        "*Processor*: processor time of an exchange over all threads of a rank, mean over ranks,",
        "relative to `residual.add_(gradient)`. Made by `python benchmarks/lab_exchange.py`.",
    ]
    for rate, ranks, collectives, transport in RUNS:
        rows = measure(rate, ranks, collectives, transport)
        used = "/".join(sorted({row["transport"] for row in rows}))
        text += ["", f"## {rate}, {ranks} ranks ({used})", "", f"| {' | '.join(HEADINGS)} |"]
        text += [f"| --- |{' ---: |' * (len(HEADINGS) - 1)}", *(line(row) for row in rows)]
        arguments.output.write_text("\n".join(text) + "\n", "utf-8")


if __name__ == "__main__":
    main()
