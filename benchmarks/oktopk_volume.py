"""Compare volume and simulated time per rank with the claimed bounds, by world size and input.

    python benchmarks/oktopk_volume.py        (about 2 minutes; writes benchmarks/oktopk_volume.md)

Everything is counted in the simulator, so the table is the same on every machine.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from sparsync.cli.bench.command import BenchSettings, bench
from sparsync.cli.bench.inputs import INPUTS
from sparsync.cli.bench.rows import Row
from sparsync.collectives.costs import lower_bound_words
from sparsync.presets import PRESETS
from sparsync.published.oktopk.allreduce import bound_words

RANKS = (2, 4, 8, 16, 32)
K = 8192  # k / P >= 256 up to 32 ranks
SIZE = 32 * K
STEPS = 6
ALONE = "the entries alone take 4 k words: the one case beyond the bound"


def measure(collective: str, kind: str, ranks: int) -> Row:
    """Measure one row; raise an error if a result is wrong."""
    settings = BenchSettings(
        (collective,), ranks, (SIZE,), (K / SIZE,), steps=STEPS - 1, warmup=1, input=kind
    )
    rows = bench(settings)
    assert rows is not None
    (row,) = rows
    assert row.correct, row
    return row


def table(head: list[str], lines: list[list[str]]) -> str:
    """Format a Markdown table with right-aligned numbers."""
    rule = ["---", *("---:" for _ in head[1:])]
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, rule, *lines])


def by_input() -> str:
    """Return the words per k of "oktopk", one row per input."""
    lines = []
    for kind, described in INPUTS.items():
        line = [f"{kind}"]
        for ranks in RANKS:
            row = measure("oktopk", kind, ranks)
            over = row.words_per_k_max > row.bound_words_per_k
            line.append(f"{row.words_per_k_max:.2f}{' (a)' if over else ''}")
        lines.append(line)
        print(line, described.meaning)
    for name, exchangeable in (("6 (P - 1) / P", True), ("6 - 4 / P", False)):
        bounds = [bound_words(K, p, exchangeable=exchangeable) / K for p in RANKS]
        which = "the first four" if exchangeable else "the others"
        lines.append([f"*bound of {which}: {name}*", *(f"{b:.2f}" for b in bounds)])
    lower = [lower_bound_words(K, p) / K for p in RANKS]
    lines.append(["*Theorem 3.1: 2 (P - 1) / P*", *(f"{b:.2f}" for b in lower)])
    return table(["input", *(f"P = {p}" for p in RANKS)], lines)


def by_collective(kind: str) -> str:
    """Return the words per k, and the median milliseconds, of every collective."""
    lines = []
    for name in sorted(PRESETS):
        rows = [measure(name, kind, ranks) for ranks in RANKS]
        lines.append(
            [name, *(f"{r.words_per_k_max:.2f} / {1e3 * r.seconds_median:.2f}" for r in rows)]
        )
        print(lines[-1])
    return table([f"{kind}: words per k / ms", *(f"P = {p}" for p in RANKS)], lines)


def report() -> str:
    """Measure all rows and return the page."""
    meanings = "\n".join(f"- {kind}: {i.meaning}" for kind, i in INPUTS.items())
    return f"""# Volume of Ok-Topk by world size and input

n = {SIZE:,}, k = {K:,}; {STEPS} steps with error feedback, including the first; every result was checked.
Volume: the maximum of sent and received over all ranks and steps, in 4-byte words per requested k,
including headers and histograms. Made by `python benchmarks/oktopk_volume.py`.

## Preset `oktopk`

{by_input()}

(a) {ALONE}.

{meanings}

## All presets, with simulated time

1 Gbit/s and 50 us, communication only, median step. `oktopk-paper` has no bound per requested k: its
exact steps allgather all reduced entries, and a reused threshold selects more and more entries as the
residual grows.

{by_collective("uniform")}

{by_collective("clustered")}
"""


def main() -> None:
    """Measure, then write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.write_text(report(), encoding="utf-8")
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
