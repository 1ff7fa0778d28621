"""Simulated steps as a table, as JSON, and as bars that are readable in grey."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from sparsync.bench.report import format_bytes, format_ratio
from sparsync.bench.simulation.settings import SimulationSettings
from sparsync.bench.simulation.training import SimulatedRow, SimulatedStep

__all__ = ["as_json", "tables", "write_plot"]

_PARTS = ("computation", "selection", "packing", "communication")
_FILLS = (("white", ""), ("0.75", "//"), ("0.55", ".."), ("0.25", ""))  # grey, hatch
_MEANS = tuple(f.name for f in fields(SimulatedStep) if f.name not in ("phases", "ports"))


def as_json(rows: Sequence[SimulatedRow]) -> str:
    """Return a list of objects: every row, its mean step, and its steps one by one."""
    entries = [{**asdict(row), **{name: row.mean(name) for name in _MEANS}} for row in rows]
    return json.dumps(entries, indent=1, allow_nan=False) + "\n"


def tables(rows: Sequence[SimulatedRow], settings: SimulationSettings) -> Group:
    """Show the steps and what they consist of; then the phases of the last step."""
    table = Table(box=box.SIMPLE_HEAD, padding=0)  # of 80 columns none is to spare
    table.add_column("algorithm", no_wrap=True, vertical="bottom")
    dense = next((row for row in rows if row.algorithm == "Dense"), None)
    ratios = ["Dense/\nthis"] if dense else []
    shown = ("ms per\nstep", *ratios, "comp.", "select", "pack", "comm.", "sent", "received")
    for heading in (*shown, "scale"):
        table.add_column(heading, justify="right", no_wrap=True, vertical="bottom")
    for row in rows:
        seconds = row.mean("seconds")
        table.add_row(
            row.algorithm,
            f"{1e3 * seconds:.1f}",
            *(
                [format_ratio(dense.mean("seconds") / seconds if seconds else None)]
                if dense
                else []
            ),
            *(f"{1e3 * row.mean(f'seconds_{part}'):.1f}" for part in _PARTS),
            format_bytes(row.mean("bytes_sent")),
            format_bytes(row.mean("bytes_received")),
            f"{row.scale:.3g}",
        )
    return Group(table, Text(_caption(rows, settings)), _phases(rows))


def _phases(rows: Sequence[SimulatedRow]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0)
    table.add_column("algorithm", no_wrap=True, vertical="bottom")
    table.add_column("phase", no_wrap=True, vertical="bottom")
    for heading in ("messages", "sent", "received", "ms\nsending", "ms\nreceiving"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        for name, phase in row.steps[-1].phases.items():
            table.add_row(
                row.algorithm,
                name,
                f"{phase['messages']:,.0f}",
                format_bytes(phase["bytes_send"]),
                format_bytes(phase["bytes_receive"]),
                f"{1e3 * phase['seconds_send']:.1f}",
                f"{1e3 * phase['seconds_receive']:.1f}",
            )
    return table


def _caption(rows: Sequence[SimulatedRow], settings: SimulationSettings) -> str:
    """Say what was simulated, and with which scale where none was given."""
    lines = [
        f"{settings.ranks} ranks, {settings.model_size:,} elements, density {settings.density:g}, "
        f"inputs {settings.inputs}; virtual seconds, parts are means over ranks",
        "comm.: the network, and waiting for others, where no work hides it",
        "sent, received: through the busiest port; below, of the last step's phases",
    ]
    if settings.scale is None and any(row.scale > 1 for row in rows):
        chosen = ", ".join(f"{row.algorithm} {row.scale:.3g}" for row in rows)
        lines.append(f"scale chosen by memory: {chosen}")
    bucketed = ", ".join(f"{row.algorithm} {row.buckets}" for row in rows if row.buckets > 1)
    if bucketed:
        lines.append(f"buckets: {bucketed}")
    return "\n".join(lines)


def write_plot(rows: Sequence[SimulatedRow], path: Path) -> None:
    """Draw one bar per algorithm, of the parts of its step."""
    from matplotlib.figure import Figure  # the object interface: no display, no global state

    figure = Figure(figsize=(1.6 + 0.9 * len(rows), 4.2), layout="constrained")
    axis = figure.subplots()
    names = [row.algorithm for row in rows]
    bottom = [0.0] * len(rows)
    for part, (grey, hatch) in zip(_PARTS, _FILLS, strict=True):
        heights = [row.mean(f"seconds_{part}") for row in rows]
        axis.bar(
            names, heights, bottom=bottom, color=grey, hatch=hatch, edgecolor="black", label=part
        )
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axis.set_ylabel("seconds per step (virtual)")
    axis.tick_params(axis="x", rotation=30)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.suptitle(f"{rows[0].ranks} simulated ranks", fontsize="medium")
    figure.savefig(path, dpi=150)
