"""The command ``sparsync simulate``: training steps of many ranks on this machine, in virtual time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console, Group
from rich.text import Text
from typer import Option

from sparsync.averaging.schemes import SCHEMES
from sparsync.cli.flags import Plot, numbers, option, takes
from sparsync.cli.named_algorithms import OPTIONS_HELP, labels
from sparsync.cli.network_choice import parse_network
from sparsync.cli.output import Columns, check_outputs, drawing, format_ratio, progress, to_json
from sparsync.cli.plan import read_machine
from sparsync.cli.simulate.gradient_sources import load_gradients
from sparsync.cli.simulate.settings import Contender, Scheme, SimulationSettings
from sparsync.cli.simulate.training import (
    SimulatedRow,
    SimulatedStep,
    scaled_for_speed,
    simulate_training,
)
from sparsync.cli.values import Elements, InputFile, Ranks, check, within
from sparsync.cost.machine import Machine
from sparsync.cost.wording import format_bytes, format_seconds
from sparsync.errors import ConfigurationError
from sparsync.presets import PRESETS
from sparsync.transports.sim import Links, Ports, Topology, TwoLevel

__all__ = ["command"]

_PARTS = ("computation", "selection", "packing", "communication")
_FILLS = (("white", ""), ("0.75", "//"), ("0.55", ".."), ("0.25", ""))  # grey, hatch
_MEANS = tuple(f.name for f in fields(SimulatedStep) if f.name not in ("phases", "ports"))


@takes(SimulationSettings)
def command(
    algorithm: Annotated[
        str,
        option(
            f"With commas: {', '.join(sorted(PRESETS))}; or schemes that average models: "
            f"{', '.join(SCHEMES)}. {OPTIONS_HELP}"
        ),
    ] = "oktopk,budgeted",
    ranks: Annotated[str, option("World size; several separated by commas.")] = "32",
    model_size: Annotated[
        Elements | None, option("Elements of the model.", "133547324, or the recorded ones'")
    ] = None,
    network: Annotated[
        str | None, option("bandwidth,latency.", "10gbit,20us, or the machine's")
    ] = None,
    nodes: Annotated[
        Ranks | None, option("Nodes of this many ranks, which share a network card.")
    ] = None,
    inner_network: Annotated[
        str | None, option("Network between ranks of one node: bandwidth,latency.", "80gbit,5us")
    ] = None,
    ports: Annotated[
        str, option("single: one message at a time each way; unlimited: nobody waits.")
    ] = "single",
    compute: Annotated[
        str,
        option("SEC[,spread]: time of the forward and backward pass, and its standard deviation."),
    ] = "0",
    straggler: Annotated[
        list[str] | None, option("RANK:FACTOR: a rank that computes slower; may be repeated.")
    ] = None,
    machine: Annotated[
        InputFile | None, option('The cost of work: a file of "sparsync doctor --json".')
    ] = None,
    *,
    json: Annotated[bool, Option("--json", help="Print JSON, for machines.")] = False,
    plot: Plot = None,
    **fields: Any,
) -> None:
    """Simulate training steps with the algorithms' own code, on virtual ranks with a virtual clock.

    Compares selection, communication and computation time with the times of Dense (one message) and
    DenseOvlp (25 MiB buckets, exchanged during the backward pass).
    """
    measured = None if machine is None else read_machine(machine)
    seconds, spread = _compute(compute)
    worlds = numbers("ranks", ranks, int)
    within("ranks", worlds, Ranks)
    first = SimulationSettings(
        labels(algorithm, PRESETS, SCHEMES),
        ranks=worlds[0],
        model_size=_model_size(model_size, fields["inputs"]),
        links=_topology(network, measured, ports, nodes, inner_network),
        compute=seconds,
        spread=spread,
        stragglers=tuple(_straggler(text) for text in straggler or ()),
        machine=measured or Machine(),
        **fields,
    )
    settings = [replace(first, ranks=p) for p in dict.fromkeys(worlds)]
    check_outputs(plot=plot)
    with progress() as row:
        rows = [one for its in settings for one in simulate_training(its, row)]
    if plot is not None:
        _write_plot(rows, plot)
    if json:
        entries = [{**asdict(row), **{name: row.mean(name) for name in _MEANS}} for row in rows]
        sys.stdout.write(to_json(entries))
    else:
        shown = _tables(rows, first) if len(settings) == 1 else _over_ranks(rows, settings)
        Console().print(shown, highlight=False)


# ---- options ---------------------------------------------------------------------------------------


def _topology(
    network: str | None, measured: Machine | None, ports: str, nodes: int | None, inner: str | None
) -> Topology:
    """Return the topology: the given links, or else measured or default links; with nodes, if given."""
    if network is None and measured is not None:
        links = Links(measured.alpha, measured.beta)
    else:
        links = parse_network(network or "10gbit,20us")
    checked: Ports = "unlimited" if ports == "unlimited" else "single"
    check("ports", repr(ports), ports == checked, "single or unlimited")
    links = replace(links, ports=checked)
    if nodes is not None:
        return TwoLevel(nodes, parse_network(inner or "80gbit,5us"), links)
    if inner is not None:
        raise ConfigurationError("--inner-network is for nodes; give --nodes RANKS as well")
    return links


def _model_size(given: int | None, inputs: str) -> int:
    """Return the number of elements, taken from recorded gradients if there are any."""
    if not Path(inputs).is_file():
        return SimulationSettings.model_size if given is None else given
    recorded = load_gradients(Path(inputs)).shape[1]
    if given not in (None, recorded):
        raise ConfigurationError(
            f"--model-size is {given}, but '{inputs}' has {recorded} elements; leave it out"
        )
    return recorded


def _compute(text: str) -> tuple[float, float]:
    """Parse the option's computation time and its spread, both in seconds."""
    try:
        seconds, spread = map(float, (text if "," in text else f"{text},0").split(","))
    except ValueError as error:
        raise ConfigurationError(f"compute is {text!r}; give SEC or SEC,spread") from error
    return seconds, spread


def _straggler(text: str) -> tuple[int, float]:
    """Parse RANK:FACTOR; the rank computes slower by this factor."""
    try:
        rank, factor = text.split(":")
        return int(rank), float(factor)
    except ValueError as error:
        raise ConfigurationError(f"straggler is {text!r}; give RANK:FACTOR, e.g. 3:2.5") from error


# ---- tables and picture ----------------------------------------------------------------------------


def _tables(rows: Sequence[SimulatedRow], settings: SimulationSettings) -> Group:
    """Show the steps and their parts, then the phases of the last step."""
    base = next((row.mean("seconds") for row in rows if row.algorithm == "Dense"), None)
    steps = []
    for row in rows:
        seconds = row.mean("seconds")
        parts = [format_seconds(max(row.mean(f"seconds_{part}"), 0.0)) for part in _PARTS]
        steps.append(
            {
                "algorithm": row.algorithm,
                "time per step": format_seconds(seconds),
                "speed-up": format_ratio(base / seconds if base and seconds else None),
                **dict(zip(("compute", "select", "pack", "network"), parts, strict=True)),
                "sent": format_bytes(row.mean("bytes_sent")),
                "received": format_bytes(row.mean("bytes_received")),
                "scale": f"{row.scale:.3g}",
            }
        )
    phases = [
        {
            "algorithm": row.algorithm,
            "phase": name,
            "messages": f"{phase['messages']:,.0f}",
            "sent": format_bytes(phase["bytes_send"]),
            "received": format_bytes(phase["bytes_receive"]),
            "time sending": format_seconds(phase["seconds_send"]),
            "time receiving": format_seconds(phase["seconds_receive"]),
        }
        for row in rows
        for name, phase in row.steps[-1].phases.items()
    ]
    caption = Text("\n" + _caption(rows, settings) + "\n")
    return Group(Columns.of(steps), caption, Columns.of(phases) if phases else Text())


def _over_ranks(rows: Sequence[SimulatedRow], settings: Sequence[SimulationSettings]) -> Group:
    """Show a table with a column per world size."""
    base = {row.ranks: row.mean("seconds") for row in rows if row.algorithm == "Dense"}
    views: Mapping[str, Callable[[SimulatedRow], str]] = {
        "time per step": lambda row: format_seconds(row.mean("seconds")),
        "speed-up": lambda row: format_ratio(
            base[row.ranks] / row.mean("seconds")
            if base.get(row.ranks) and row.mean("seconds")
            else None
        ),
        "network": lambda row: format_seconds(max(row.mean("seconds_communication"), 0.0)),
        "sent": lambda row: format_bytes(row.mean("bytes_sent")),
        "messages": lambda row: f"{row.mean('messages'):,.0f}",
    }
    tables = [
        Columns.by_ranks(
            "algorithm", {(row.algorithm, row.ranks): cell(row) for row in rows}, f"{title}"
        )
        for title, cell in views.items()
    ]
    parts = [part for table in tables for part in (table, Text())]
    return Group(*parts, Text(_caption(rows, settings[0])))


def _caption(rows: Sequence[SimulatedRow], settings: SimulationSettings) -> str:
    """Describe the simulation, and its scale if none was given."""
    ranks = ", ".join(dict.fromkeys(str(row.ranks) for row in rows))
    lines = [
        f"{ranks} ranks, {settings.model_size:,} elements, density {settings.density:g}, "
        f"inputs {settings.inputs}; virtual seconds, parts are means over ranks",
        "network: communication, and waiting for others, where no work hides it",
        "sent, received: through the busiest port; below, of the last step's phases",
    ]
    averaged = [one.name for one in settings.contenders() if isinstance(one, Scheme)]
    if averaged:
        lines.append(f"{', '.join(averaged)}: means over whole periods of steps")
    if settings.scale is None and any(row.scale > 1 for row in rows):
        quick = [
            one.name
            for one in settings.contenders()
            if isinstance(one, Contender) and scaled_for_speed(one, settings)
        ]
        most = "" if ranks == str(settings.ranks) else ", at most"
        for reason, names in (
            ("by memory", [row.algorithm for row in rows if row.algorithm not in quick]),
            ("to save time (--scale 1: exact)", quick),
        ):
            scales = {name: max(r.scale for r in rows if r.algorithm == name) for name in names}
            if any(scale > 1 for scale in scales.values()):
                chosen = ", ".join(f"{name} {scale:.3g}" for name, scale in scales.items())
                lines.append(f"scale chosen {reason}{most}: {chosen}")
    bucketed = dict.fromkeys(f"{row.algorithm} {row.buckets}" for row in rows if row.buckets > 1)
    if bucketed:
        lines.append(f"buckets: {', '.join(bucketed)}")
    return "\n".join(lines)


def _write_plot(rows: Sequence[SimulatedRow], path: Path) -> None:
    """Draw a step's parts, one bar per algorithm, readable in grey; draw lines if there are several P."""
    if len({row.ranks for row in rows}) > 1:
        _write_lines(rows, path)
        return
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


def _write_lines(rows: Sequence[SimulatedRow], path: Path) -> None:
    """Plot the time per step against the world size, one line per algorithm."""
    with drawing(path, (6.4, 4.2), "simulated ranks") as axis:
        for number, name in enumerate(dict.fromkeys(row.algorithm for row in rows)):
            its = sorted((row.ranks, row.mean("seconds")) for row in rows if row.algorithm == name)
            axis.plot(*zip(*its, strict=True), marker="osv^Dx+*"[number % 8], label=name)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("ranks P")
        axis.set_ylabel("seconds per step (virtual)")
        axis.legend(frameon=False)
