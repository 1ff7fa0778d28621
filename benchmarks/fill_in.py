"""Measure the density of sums of sparse gradients by number of ranks (SparCML, Figure 1).

    python benchmarks/fill_in.py        (half a minute; writes benchmarks/fill_in.md and fill_in.png)

The script sums the k largest entries of real gradients of the demo's byte-level transformer, with
one batch per virtual rank. It compares them with uniformly random positions (appendix B), whose sums
are denser.
"""

from __future__ import annotations

import argparse
import platform
from pathlib import Path

import torch

from sparsync.collectives.costs import expected_union
from sparsync_papers.reproduce.sparcml_fill_in import gradients, union_densities

RANKS = (1, 2, 4, 8, 16, 32, 64)
DENSITIES = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1)
TRAINED = {"at the start": 0, "after 200 steps": 200}
BATCH = 8  # windows per rank
WIDTH_INCHES, HEIGHT_INCHES = 9.0, 3.9


def table(measured: dict[float, dict[int, float]], size: int) -> str:
    """Return the densities of the sums in percent, in brackets for uniformly random positions."""
    lines = [
        "| density of a rank | " + " | ".join(f"P = {p}" for p in RANKS) + " |",
        "|---|" + "---|" * len(RANKS),
    ]
    for density, found in measured.items():
        uniform = {p: expected_union(round(density * size), size, p) / size for p in RANKS}
        cells = [f"{100 * found[p]:.3g} ({100 * uniform[p]:.3g})" for p in RANKS]
        lines.append(f"| {100 * density:g} % | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def picture(measured: dict[str, dict[float, dict[int, float]]], size: int, path: Path) -> None:
    """Plot the density of the sum over ranks: measured (solid), for random positions (dotted)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES), layout="constrained")
    axes = figure.subplots(1, len(measured), sharey=True)
    markers = "osD^vP"
    for axis, (title, rows) in zip(axes, measured.items(), strict=True):
        for number, (density, found) in enumerate(rows.items()):
            shade = str(0.65 * number / len(rows))
            axis.loglog(
                RANKS,
                [100 * found[p] for p in RANKS],
                color=shade,
                marker=markers[number],
                markersize=4,
                label=f"{100 * density:g} %",
            )
            uniform = [100 * expected_union(round(density * size), size, p) / size for p in RANKS]
            axis.loglog(RANKS, uniform, color=shade, linestyle=":", linewidth=1)
        axis.axhline(50, color="#d95f02", linewidth=0.8)
        axis.set(title=f"model {title}", xlabel="ranks P", xticks=RANKS, xticklabels=RANKS)
        axis.minorticks_off()
    axes[0].set_ylabel("density of the sum, %")
    axes[0].annotate("dense is shorter above", (1, 54), fontsize=7, color="#d95f02")
    handles, labels = axes[0].get_legend_handles_labels()
    title = "of a rank\n(dotted: uniform)"
    figure.legend(
        handles[::-1], labels[::-1], title=title, fontsize=8, title_fontsize=8, loc="outside right"
    )
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measure, then write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    arguments = parser.parse_args()
    measured, size = {}, 0
    stages = gradients(list(TRAINED.values()), max(RANKS), batch_size=BATCH)
    for title, flat in zip(TRAINED, stages, strict=True):
        size = flat[0].numel()
        measured[title] = {density: union_densities(flat, density, RANKS) for density in DENSITIES}
    picture(measured, size, arguments.out.with_suffix(".png"))
    tables = "\n\n".join(f"## Model {t}\n\n{table(rows, size)}" for t, rows in measured.items())
    arguments.out.write_text(
        f"""# Fill-in: the density of the sum

`python benchmarks/fill_in.py`, torch {torch.__version__}, {platform.machine()}; {size:,} parameters of
the demo's byte transformer, {BATCH} windows per rank, each rank's k largest gradient entries (no error
feedback). In percent; values in brackets are for uniformly random supports (SparCML, appendix B), which
fill in more than real gradients.

![density of the sum over the number of ranks](fill_in.png)

{tables}

Real gradients overlap, so their sums fill in less than those of random supports. They fill in even less
at the start, where the same few entries are large on all ranks. From 50 % on, a dense vector is shorter
than coo.
""",
        encoding="utf-8",
    )
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
