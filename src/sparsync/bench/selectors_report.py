"""What ``sparsync bench --selectors`` shows: tables over sizes, and RedSync's Figure 3."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from sparsync.bench.report import format_ratio
from sparsync.bench.selectors import SelectorRow
from sparsync.bench.selectors_settings import format_size

__all__ = ["tables", "write_plot"]

_MS = 1e3
_STYLES = (  # in the order of the rows
    ("black", "-"),
    ("#1a7a4c", "-"),
    ("#d95f02", "--"),
    ("#1b6ca8", "--"),
    ("#1b6ca8", "-"),
    ("#8e4b9e", "-."),
    ("#c2185b", "-"),
    ("#9a9a9a", ":"),
    ("#606060", "-"),
)
_LABEL_GAP = 0.045  # of the height of the picture, between the labels of two lines


def tables(rows: Sequence[SelectorRow]) -> Group:
    """Show the selectors over the sizes: ratios to torch.topk, entries over k, milliseconds."""
    first = rows[0]
    return Group(
        Text(f"{first.input} input, density {first.density:g}, {first.device}\n"),
        _table("Times faster than torch.topk", rows, lambda row: format_ratio(row.speedup)),
        _table("Selected entries, over k", rows, _selected),
        _table("ms per call", rows, lambda row: _ms(row.seconds)),
    )


def _ms(seconds: float) -> str:
    return f"{_MS * seconds:.4f}" if seconds < 1e-5 else format_ratio(_MS * seconds)


def _selected(row: SelectorRow) -> str:
    return format_ratio(row.entries_over_k) if row.correct else "WRONG"


def _table(title: str, rows: Sequence[SelectorRow], cell: Callable[[SelectorRow], str]) -> Table:
    """Return one line per selector, one column per size."""
    by_size = [list(group) for _, group in groupby(rows, key=lambda row: row.nbytes)]
    shown = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", padding=0, pad_edge=False)
    shown.add_column("", no_wrap=True)
    for group in by_size:
        shown.add_column(format_size(group[0].nbytes), justify="right", no_wrap=True)
    for line in zip(*by_size, strict=True):
        shown.add_row(line[0].selector, *map(cell, line))
    return shown


def write_plot(rows: Sequence[SelectorRow], path: Path) -> None:
    """Draw milliseconds over the size, both logarithmic; every line is labelled where it ends."""
    from matplotlib.figure import Figure  # the object interface: no display, no global state

    first, last = rows[0], rows[-1]
    lines = [[row for row in rows if row.selector == name] for name in _names(rows)]
    figure = Figure(figsize=(8.4, 4.8), layout="constrained")
    axis = figure.subplots()
    for line, (colour, style) in zip(lines, _STYLES, strict=True):
        x, y = [row.nbytes for row in line], [_MS * row.seconds for row in line]
        axis.loglog(x, y, color=colour, linestyle=style, marker="o", markersize=3, linewidth=1.4)
    low, high = (math.log(limit) for limit in axis.get_ylim())
    ends = [(math.log(_MS * line[-1].seconds) - low) / (high - low) for line in lines]
    for line, (colour, _), height in zip(lines, _STYLES, _apart(ends), strict=True):
        axis.annotate(
            f"{line[-1].selector}: {format_ratio(line[-1].speedup)}x",
            (last.nbytes, _MS * line[-1].seconds),
            (1.04, height),
            textcoords="axes fraction",
            color=colour,
            verticalalignment="center",
            fontsize=8,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.5,
                "relpos": (0, 0.5),
            },
        )
    sizes = [row.nbytes for row in lines[0]]
    axis.set_xticks(sizes, [format_size(size).replace(" ", "\n") for size in sizes])
    axis.yaxis.set_major_formatter("{x:g}")
    axis.minorticks_off()
    axis.set(xlabel="residual, float32", ylabel="ms per call")
    axis.grid(alpha=0.3, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"Selecting {100 * first.density:g} % of a residual ({first.input}, {first.device}); "
        f"beside the names: times faster than torch.topk at {format_size(last.nbytes)}",
        fontsize="medium",
    )
    figure.savefig(path, dpi=150)


def _names(rows: Sequence[SelectorRow]) -> list[str]:
    return [row.selector for row in rows if row.nbytes == rows[0].nbytes]


def _apart(heights: Sequence[float]) -> list[float]:
    """Move labels apart, as little as is needed from the top down, in the order that they have."""
    order = sorted(range(len(heights)), key=lambda at: -heights[at])
    placed = dict.fromkeys(order, 0.0)
    above = math.inf
    for at in order:
        placed[at] = above = min(heights[at], above - _LABEL_GAP)
    below = min(placed.values())
    for at in reversed(order):  # none below the picture
        placed[at] = below = max(placed[at], below, 0.0)
        below += _LABEL_GAP
    return [placed[at] for at in range(len(heights))]
