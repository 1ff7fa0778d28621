"""Simulated steps as a table, as JSON, and as bars that are readable in grey."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from rich.console import Group
from rich.text import Text

from sparsync.cli.output import Columns, drawing, format_ratio, to_json
from sparsync.cli.simulate.settings import SimulationSettings
from sparsync.cli.simulate.training import SimulatedRow, SimulatedStep
from sparsync.cost.wording import format_bytes, format_seconds

__all__ = ["as_json", "tables", "write_plot"]

_PARTS = ("computation", "selection", "packing", "communication")
_FILLS = (("white", ""), ("0.75", "//"), ("0.55", ".."), ("0.25", ""))  # grey, hatch
_MEANS = tuple(f.name for f in fields(SimulatedStep) if f.name not in ("phases", "ports"))


def as_json(rows: Sequence[SimulatedRow]) -> str:
    """Return a list of objects: every row, its mean step, and its steps one by one."""
    entries = [{**asdict(row), **{name: row.mean(name) for name in _MEANS}} for row in rows]
    return to_json(entries)


def tables(rows: Sequence[SimulatedRow], settings: SimulationSettings) -> Group:
    """Show the steps and their parts; then the phases of the last step."""
    dense = next((row for row in rows if row.algorithm == "Dense"), None)
    cells = []
    for row in rows:
        seconds, base = row.mean("seconds"), dense.mean("seconds") if dense else 0.0
        cells.append(
            [
                row.algorithm,
                format_seconds(seconds),
                *([format_ratio(base / seconds if seconds else None)] if dense else []),
                *(format_seconds(max(row.mean(f"seconds_{part}"), 0.0)) for part in _PARTS),
                format_bytes(row.mean("bytes_sent")),
                format_bytes(row.mean("bytes_received")),
                f"{row.scale:.3g}",
            ]
        )
    heads = ["algorithm", "time per step", *["speed-up"] * bool(dense)]
    heads += ["compute", "select", "pack", "network"]
    table = Columns([*heads, "sent", "received", "scale"], cells)
    return Group(table, Text("\n" + _caption(rows, settings) + "\n"), _phases(rows))


def _phases(rows: Sequence[SimulatedRow]) -> Columns:
    heads = ["algorithm", "phase", "messages", "sent", "received", "time sending", "time receiving"]
    cells = [
        [
            row.algorithm,
            name,
            f"{phase['messages']:,.0f}",
            format_bytes(phase["bytes_send"]),
            format_bytes(phase["bytes_receive"]),
            format_seconds(phase["seconds_send"]),
            format_seconds(phase["seconds_receive"]),
        ]
        for row in rows
        for name, phase in row.steps[-1].phases.items()
    ]
    return Columns(heads, cells)


def _caption(rows: Sequence[SimulatedRow], settings: SimulationSettings) -> str:
    """Describe the simulation, and its scale where none was given."""
    lines = [
        f"{settings.ranks} ranks, {settings.model_size:,} elements, density {settings.density:g}, "
        f"inputs {settings.inputs}; virtual seconds, parts are means over ranks",
        "network: communication, and waiting for others, where no work hides it",
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
    bottom = [0.0] * len(rows)
    title = f"{rows[0].ranks} simulated ranks"
    with drawing(path, (1.6 + 0.9 * len(rows), 4.2), title) as axis:
        for part, (grey, hatch) in zip(_PARTS, _FILLS, strict=True):
            heights = [row.mean(f"seconds_{part}") for row in rows]
            style = {"color": grey, "hatch": hatch, "edgecolor": "black", "label": part}
            axis.bar([row.algorithm for row in rows], heights, bottom=bottom, **style)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        axis.set_ylabel("seconds per step (virtual)")
        axis.tick_params(axis="x", rotation=30)
        axis.legend(frameon=False)
