"""The report of a soak test (``soak.py``): a table, and a plot of memory over time."""

from __future__ import annotations

import os
import platform
from collections import Counter
from pathlib import Path
from statistics import median

import torch

WARM = 0.3  # share of a life after which memory must be flat
FLAT = 0.02  # share by which memory may grow and still count as flat


def growth(samples: list[list[float]], column: int) -> float:
    """Return a column's growth after the warm-up, from the first third to the last."""
    warm = [row[column] for row in samples if row[0] >= WARM * samples[-1][0]]
    third = max(len(warm) // 3, 1)
    return median(warm[-third:]) / median(warm[:third]) - 1


def report(record: dict, path: Path) -> None:
    """Write the table."""
    lives = record["lives"]
    total = Counter[str]()
    for one in lives:
        total.update(one["counts"])
    rows, verdicts = [], []
    for number, one in enumerate(lives):
        grown = max(growth(samples, 1) for samples in one["samples"])
        more = [max(s[-1][c] - s[len(s) // 3][c] for s in one["samples"]) for c in (2, 3)]
        last = max(samples[-1][1] for samples in one["samples"])
        verdicts.append(
            grown <= FLAT
            and one["worst"] <= 1
            and one["survivors named it"]
            and not one["unexpected"]
            and one["residual moved by"] <= 1
        )
        rows.append(
            f"| {number} | {one['algorithm']} | {one['ranks']} | {one['counts']['steps']} | "
            f"{one['counts'].get('restarts', 0)} | {one['counts'].get('overflows refused', 0)} | "
            f"{'killed, named' if one['died'] else 'planned'} | {one['worst']:.3f} | "
            f"{one['residual moved by']:.2f} | {last:.0f} | {100 * grown:+.2f} % | "
            f"{more[0]:+.0f}, {more[1]:+.0f} | {'yes' if verdicts[-1] else 'NO'} |"
        )
    path.write_text(
        "\n".join(
            [
                "# Soak",
                "",
                f"`python benchmarks/soak.py --minutes {record['minutes']:g}` on {os.cpu_count()} cores, "
                f"{platform.machine()}, torch {torch.__version__}; {len(lives)} lives of "
                f"{record['seconds']:.0f} s, {total['steps']} steps, {total['checks']} checks of the law "
                "and of equal replicas.",
                "",
                "| life | algorithm | ranks | steps | restarts inside | overflows refused | end | "
                "law, of its rounding | residual between lives, of its rounding | MiB | memory grew | "
                "threads, files | held |",
                "|---:|---|---:|---:|---:|---:|---|---:|---:|---:|---:|---:|---|",
                *rows,
                "",
                "Memory is a rank's resident set, excluding garbage and memory that glibc retains. It "
                f"may grow by {100 * FLAT:g} % after the first {100 * WARM:g} % of a life (the worst "
                "rank's medians). `soak.png` shows it over time; it falls where the kernel reclaims "
                "file pages (the code of libraries) that have not been used recently. *Residual "
                "between lives* compares the sum over ranks in the checkpoint with the sum after "
                "loading, usually on a different number of ranks: the worst element's difference, "
                "divided by the rounding error of its sum.",
                "",
                f"**Everything held: {'yes' if all(verdicts) else 'NO'}.**",
                "",
            ]
        )
    )


def draw(record: dict, path: Path) -> None:
    """Plot every rank's memory over time, life after life."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4))
    start = 0.0
    for one in record["lives"]:
        for rank, samples in enumerate(one["samples"]):
            minutes = [(start + row[0]) / 60 for row in samples]
            axes.plot(minutes, [row[1] for row in samples], color=f"C{rank}", linewidth=1)
        start += record["seconds"]
        axes.axvline(start / 60, color="grey", linewidth=0.5, linestyle=":")
    axes.set_xlabel("minutes; dotted: all processes end, one is killed in every second life")
    axes.set_ylabel("resident memory of a rank, MiB")
    axes.set_ylim(bottom=0)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
