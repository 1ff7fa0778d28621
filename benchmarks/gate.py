"""Compare the speed of two installations; fail if the second is slower by more than the noise.

    python benchmarks/gate.py RELEASE_PYTHON HEAD_PYTHON [--runs 3]

The installations take turns to run ``sparsync bench --kernels`` and ``sparsync bench``, several
times each. The noise of a row is the largest ratio between two runs of the same installation. A row
fails if the ratio of the medians is above its noise and above ``--floor``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

__all__ = ["Row", "judge", "measure", "table"]

KERNELS = "--kernels --size 4000000"
EXCHANGES = (
    "--transport auto --ranks 2 --size 1000000 --steps 20 --warmup 5 "
    "--collectives dense,allgather,oktopk,budgeted,halving,quantised"
)


@dataclass(frozen=True)
class Row:
    """One measurement in both installations; the ratio is the head's seconds / the release's seconds."""

    name: str
    ratio: float
    noise: float  # >= 1
    slower: bool


def judge(
    release: Sequence[Mapping[str, float]], head: Sequence[Mapping[str, float]], floor: float
) -> list[Row]:
    """Compare the rows that all runs have.

    Args:
        release: seconds by row, for every run of the release.
        head: seconds by row, for every run of the head.
        floor: ratio up to which a row never counts as slower, even if its noise is smaller.

    Example:
        >>> judge([{"top": 1.0}, {"top": 1.1}], [{"top": 1.5}, {"top": 1.6}], floor=1.2)
        [Row(name='top', ratio=1.476, noise=1.1, slower=True)]
    """
    rows = []
    for name in release[0]:
        if all(name in run for run in (*release, *head)):
            before, after = ([run[name] for run in runs] for runs in (release, head))
            ratio = median(after) / median(before)
            noise = max(max(one) / min(one) for one in (before, after))
            slower = ratio > max(noise, floor)
            rows.append(Row(name, round(ratio, 3), round(noise, 3), slower))
    return rows


def measure(python: str, kernels: str = KERNELS, exchanges: str = EXCHANGES) -> dict[str, float]:
    """Return the seconds of every row, measured by the sparsync that ``python`` has installed."""
    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        for options in (kernels, exchanges):
            file = Path(folder) / "rows.json"
            # runs outside the checkout, whose sources would otherwise be imported
            subprocess.run(
                [python, "-m", "sparsync", "bench", *options.split(), "--json", str(file)],
                check=True,
                cwd=folder,
                stdout=subprocess.DEVNULL,
            )
            for row in json.loads(file.read_text()):
                name = row.get("kernel") or f"{row['collective']} over {row['transport']}"
                seconds[name] = row.get("seconds", row.get("seconds_median"))
    return seconds


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a table in Markdown, the slowest first."""
    lines = ["| | seconds over the release's | noise | |", "|---|---:|---:|---|"]
    for row in sorted(rows, key=lambda row: -row.ratio):
        verdict = "**slower**" if row.slower else ""
        lines.append(f"| {row.name} | {row.ratio:.2f} | {row.noise:.2f} | {verdict} |")
    return "\n".join(lines)


def main() -> None:
    """Measure both installations in turn, print the table, and exit with 1 if a row is slower."""
    parser = argparse.ArgumentParser(description="Compare the speed of two installations.")
    parser.add_argument("release", help="interpreter of the environment with the release")
    parser.add_argument("head", help="interpreter of the environment with the commit to judge")
    parser.add_argument("--runs", type=int, default=3, help="runs of each; at least 2")
    parser.add_argument("--floor", type=float, default=1.15, help="ratio that never fails a row")
    parser.add_argument("--kernels", default=KERNELS, help="options of bench, for the kernels")
    parser.add_argument("--exchanges", default=EXCHANGES, help="options of bench, for exchanges")
    options = parser.parse_args()
    if options.runs < 2:
        parser.error(f"--runs is {options.runs}; one run shows no noise, give at least 2")
    runs: dict[str, list[dict[str, float]]] = {"release": [], "head": []}
    for _ in range(options.runs):
        for which, python in (("release", options.release), ("head", options.head)):
            runs[which].append(measure(python, options.kernels, options.exchanges))
    rows = judge(runs["release"], runs["head"], options.floor)
    print(table(rows))
    sys.exit(any(row.slower for row in rows))


if __name__ == "__main__":
    main()
