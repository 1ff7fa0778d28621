"""Draw panels so that they are readable in grey: line styles, markers and hatches differ."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sparsync_papers.reproduce import Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CURVES = (  # colour, line style, marker
    ("black", "-", "o"),
    ("#d95f02", "--", "s"),
    ("#1b6ca8", "-.", "^"),
    ("#7a7a7a", ":", "D"),
    ("#1a7a4c", (0, (6, 1, 1, 1, 1, 1)), "v"),
    ("#8e44ad", (0, (1, 1)), "P"),
    ("#b5a000", (0, (8, 2)), "X"),
    ("#444444", (0, (3, 1, 1, 1)), "*"),
)
_BARS = (  # fill, hatch
    ("#e8e8e8", ""),
    ("#9fb8cc", "///"),
    ("#f0b98d", "..."),
    ("#8a8a8a", ""),
    ("#c8d8b8", "xxx"),
    ("#d5bfe0", "\\\\\\"),
    ("#ffffff", "++"),
)
_FEW_POINTS = 20  # of a curve with markers
_WIDTH_INCHES, _HEIGHT_INCHES = 4.9, 4.0  # of a panel
_FIT = 40  # letters below a panel of bars; more are turned
_BAR_SPACE = 0.8  # of the distance of two groups


def png(panels: Sequence[Panel], *, dots_per_inch: int = 110) -> bytes:
    """Draw panels side by side; return the file's content."""
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
    if panel.kind == "curves":
        _curves(axis, panel)
    else:
        _bars(axis, panel.series, stacked=panel.kind == "stacks")
    for name in panel.log:
        getattr(axis, f"set_{name}scale")("log")
        low, high = getattr(axis, f"get_{name}lim")()
        getattr(axis, f"{name}axis").set_major_formatter("{x:g}")
        getattr(axis, f"{name}axis").set_minor_formatter("{x:g}" if high < 10 * low else "")
    if panel.kind == "curves":
        _name_few(axis, panel)
    if panel.level is not None:
        axis.axhline(panel.level, color="black", linewidth=0.6, linestyle=(0, (1, 3)))
    axis.set_title(panel.title, fontsize="medium")
    axis.set_xlabel(panel.x)
    axis.set_ylabel(panel.y)
    axis.grid(alpha=0.3, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    if panel.kind == "curves":
        axis.legend(frameon=False, fontsize=8)
    else:  # bars leave no room inside
        turned = any(label.get_rotation() for label in axis.get_xticklabels())
        axis.legend(
            frameon=False,
            fontsize=8,
            ncols=min(len(panel.series), 3),
            loc="upper center",
            bbox_to_anchor=(0.5, -0.36 if turned else -0.16),
        )


def _curves(axis: Axes, panel: Panel) -> None:
    for number, (name, points) in enumerate(panel.series.items()):
        colour, style, marker = _CURVES[number % len(_CURVES)]
        xs, ys = zip(*points, strict=True)
        shown: dict[str, Any] = {"marker": marker, "markersize": 4}
        axis.plot(
            xs,
            ys,
            color=colour,
            linestyle=style,
            linewidth=1.5,
            label=name,
            **(shown if len(points) <= _FEW_POINTS else {}),
        )


def _name_few(axis: Axes, panel: Panel) -> None:
    """Write the values of a logarithmic axis where they are few: 2, 4, 8 ranks."""
    values = sorted({float(x) for points in panel.series.values() for x, _ in points})
    if "x" in panel.log and len(values) <= _FEW_POINTS // 2:
        axis.set_xticks(values, [f"{x:g}" for x in values])
        axis.xaxis.minorticks_off()


def _bars(
    axis: Axes, series: Mapping[str, Sequence[tuple[float | str, float]]], *, stacked: bool
) -> None:
    groups = list(dict.fromkeys(x for points in series.values() for x, _ in points))
    bottom = dict.fromkeys(groups, 0.0)
    width = _BAR_SPACE / (1 if stacked else len(series))
    for number, (name, points) in enumerate(series.items()):
        fill, hatch = _BARS[number % len(_BARS)]
        shift = 0.0 if stacked else (number - (len(series) - 1) / 2) * width
        axis.bar(
            [groups.index(x) + shift for x, _ in points],
            [height for _, height in points],
            width,
            [bottom[x] for x, _ in points] if stacked else 0.0,
            color=fill,
            edgecolor="black",
            linewidth=0.6,
            hatch=hatch,
            label=name,
        )
        for x, height in points:
            bottom[x] += height
    names = [x if isinstance(x, str) else f"{x:g}" for x in groups]
    axis.set_xticks(range(len(groups)), names)
    if len("".join(names)) > _FIT:
        axis.tick_params("x", rotation=40)
