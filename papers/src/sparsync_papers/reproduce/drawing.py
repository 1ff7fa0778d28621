"""Draw panels that are readable even in grey, because line styles, markers and hatches differ."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sparsync_papers.reproduce import Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("black", "#d95f02", "#1b6ca8", "#7a7a7a", "#1a7a4c", "#8e44ad", "#b5a000", "#444444")
_DASHES = (6, 1, 1, 1, 1, 1), (1, 1), (8, 2), (3, 1, 1, 1)
_LINES = ("-", "--", "-.", ":", *((0, dashes) for dashes in _DASHES))
_FILLS = ("#e8e8e8", "#9fb8cc", "#f0b98d", "#8a8a8a", "#c8d8b8", "#d5bfe0", "#ffffff")
_HATCHES = ("", "///", "...", "", "xxx", "\\\\\\", "++")
_FEW_POINTS = 20  # a curve with more points is drawn without markers
_WIDTH_INCHES, _HEIGHT_INCHES = 4.9, 4.0  # size of a panel
_FIT = 40  # letters that fit below a panel of bars; if the labels need more, they are rotated
_BAR_SPACE = 0.8  # width of a group of bars, as a share of the distance between two groups


def png(panels: Sequence[Panel], *, dots_per_inch: int = 110) -> bytes:
    """Draw panels next to each other; return the content of a PNG file."""
    from matplotlib.figure import Figure  # the object interface: no display, no global state

    size = (_WIDTH_INCHES * len(panels), _HEIGHT_INCHES)
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, panel in zip(axes, panels, strict=True):
        _draw(axis, panel)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=dots_per_inch, metadata={"Software": None})
    return file.getvalue()


def _draw(axis: Axes, panel: Panel) -> None:
    legend = _curves(axis, panel) if panel.kind == "curves" else _bars(axis, panel)
    for name in panel.log:
        getattr(axis, f"set_{name}scale")("log")
        low, high = getattr(axis, f"get_{name}lim")()
        getattr(axis, f"{name}axis").set_major_formatter("{x:g}")
        getattr(axis, f"{name}axis").set_minor_formatter("{x:g}" if high < 10 * low else "")
    if panel.kind == "curves" and "x" in panel.log:
        values = sorted({float(x) for points in panel.series.values() for x, _ in points})
        if len(values) <= _FEW_POINTS // 2:  # label every value, e.g. 2, 4, 8 ranks
            axis.set_xticks(values, [f"{x:g}" for x in values])
            axis.xaxis.minorticks_off()
    if panel.level is not None:
        axis.axhline(panel.level, color="black", linewidth=0.6, linestyle=(0, (1, 3)))
    axis.set_title(panel.title, fontsize="medium")
    axis.set(xlabel=panel.x, ylabel=panel.y, axisbelow=True)
    axis.grid(alpha=0.3, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8, **legend)


def _curves(axis: Axes, panel: Panel) -> dict[str, Any]:
    axis.set_prop_cycle(color=_COLOURS, linestyle=_LINES, marker=list("os^DvPX*"))
    for name, points in panel.series.items():
        unmarked: dict[str, Any] = {"marker": ""} if len(points) > _FEW_POINTS else {}
        xs, ys = zip(*points, strict=True)
        axis.plot(xs, ys, linewidth=1.5, markersize=4, label=name, **unmarked)
    return {}


def _bars(axis: Axes, panel: Panel) -> dict[str, Any]:
    """Draw bars; return options that put the legend below the plot, because bars leave no room inside."""
    groups = list(dict.fromkeys(x for points in panel.series.values() for x, _ in points))
    bottom = dict.fromkeys(groups, 0.0)
    stacked = panel.kind == "stacks"
    width = _BAR_SPACE / (1 if stacked else len(panel.series))
    for number, (name, points) in enumerate(panel.series.items()):
        shift = 0.0 if stacked else (number - (len(panel.series) - 1) / 2) * width
        axis.bar(
            [groups.index(x) + shift for x, _ in points],
            [height for _, height in points],
            width,
            [bottom[x] for x, _ in points] if stacked else 0.0,
            color=_FILLS[number % len(_FILLS)],
            edgecolor="black",
            linewidth=0.6,
            hatch=_HATCHES[number % len(_HATCHES)],
            label=name,
        )
        for x, height in points:
            bottom[x] += height
    names = [x if isinstance(x, str) else f"{x:g}" for x in groups]
    turned = len("".join(names)) > _FIT
    axis.set_xticks(range(len(groups)), names, rotation=40 if turned else 0)
    below = (0.5, -0.36 if turned else -0.16)
    return {"ncols": min(len(panel.series), 3), "loc": "upper center", "bbox_to_anchor": below}
