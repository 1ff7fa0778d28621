"""Trainings side by side, as a picture: the loss over seconds, and over bytes."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from sparsync.bench.report import TrainResult, check_writable
from sparsync.bench.target import smoothed
from sparsync.errors import ConfigurationError
from sparsync.workloads import workload_class

__all__ = ["check_plot_path", "write_plot"]

_PICTURE_FORMATS = (".png", ".pdf", ".svg")
_STYLES = (
    ("black", "-"),
    ("#d95f02", "--"),
    ("#1b6ca8", "-."),
    ("#7a7a7a", ":"),
    ("#1a7a4c", (0, (6, 1, 1, 1, 1, 1))),
)


def check_plot_path(path: Path) -> None:
    """Refuse a picture that could not be drawn or written, before work begins."""
    if path.suffix not in _PICTURE_FORMATS:
        raise ConfigurationError(
            f"cannot draw '{path}'; give a name that ends in {', '.join(_PICTURE_FORMATS)}"
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigurationError("--plot needs matplotlib: pip install sparsync[report]")
    check_writable(path)


def write_plot(results: Sequence[TrainResult], path: Path) -> None:
    """Draw the loss over seconds, where anything was sent over bytes, and over steps.

    Readable in grey: every algorithm has a line style of its own.  Thin lines are single steps, thick
    ones averages over a twentieth of the run.  What lies above the loss at the start is cut off.
    """
    from matplotlib.figure import Figure  # the object interface: no display, no global state
    from matplotlib.ticker import EngFormatter

    sent_anything = any(result.bytes_sent_per_step_max for result in results)
    panels = ["seconds", *["bytes"] * sent_anything, "steps"]
    figure = Figure(figsize=(4.9 * len(panels), 4.2), layout="constrained")
    axes = dict(zip(panels, figure.subplots(1, len(panels), sharey=True), strict=True))
    for number, result in enumerate(results):
        colour, style = _STYLES[number % len(_STYLES)]
        over: dict[str, list[float]] = {
            "seconds": list(accumulate(result.seconds)),
            "bytes": [float(total) for total in accumulate(result.bytes_sent)],
            "steps": [float(step) for step in range(1, result.steps + 1)],
        }
        curve = smoothed(result.loss, result.steps // 40)
        for panel, axis in axes.items():
            x = over[panel]
            axis.plot(x, result.loss, color=colour, linewidth=0.6, alpha=0.25)
            axis.plot(
                x, curve, linestyle=style, color=colour, linewidth=1.8, label=result.algorithm
            )
    first = results[0]
    axes["seconds"].set_ylim(top=1.05 * max(result.loss[0] for result in results))
    axes["seconds"].set_xlabel(_clock(first))
    target = workload_class(first.workload).target
    axes["seconds"].set_ylabel(f"training loss (nats per {target})")
    axes["seconds"].legend(frameon=False)
    axes["steps"].set_xlabel("step")
    if sent_anything:
        axes["bytes"].set_xscale("log")
        axes["bytes"].set_xlabel("sent per rank since the start (bytes)")
        axes["bytes"].xaxis.set_major_formatter(EngFormatter(unit="B"))
    for axis in axes.values():
        if first.target_loss is not None:
            axis.axhline(first.target_loss, color="black", linewidth=0.6, linestyle=(0, (1, 3)))
        axis.grid(alpha=0.3, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"{first.workload}, {first.parameters / 1e6:.2f} M parameters, {first.ranks} ranks",
        fontsize="medium",
    )
    figure.savefig(path, dpi=150)


def _clock(result: TrainResult) -> str:
    """Say what the seconds were measured on."""
    if result.lab is None:
        return "seconds (this machine, no network)"
    return f"seconds (links of {result.lab / 1e6:g} Mbit/s)"
