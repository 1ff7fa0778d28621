"""The command ``sparsync simulate``: training steps of many ranks on this machine, in virtual time."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from sparsync.bench.inputs import INPUTS
from sparsync.bench.network import parse_network
from sparsync.bench.picture import check_plot_path
from sparsync.bench.progress import progress
from sparsync.bench.simulation import SimulatedRow, SimulationSettings, simulate_training
from sparsync.bench.simulation.gradients import load_gradients
from sparsync.bench.simulation.report import as_json, tables, write_plot
from sparsync.bench.simulation.settings import SPREAD
from sparsync.errors import ConfigurationError
from sparsync.planning.machine import Machine
from sparsync.presets import PRESETS
from sparsync.transports.sim import Links, Ports, Topology, TwoLevel

__all__ = ["command"]

_Algorithm = Annotated[str, typer.Option(help=f"With commas: {', '.join(sorted(PRESETS))}.")]
_Ranks = Annotated[int, typer.Option(help="World size.")]
_ModelSize = Annotated[
    int | None,
    typer.Option(help="Elements of the model.", show_default="133547324, or the recorded ones'"),
]
_Density = Annotated[float, typer.Option(help="k / n in (0, 1].")]
_Network = Annotated[
    str | None,
    typer.Option(help="bandwidth,latency.", show_default="10gbit,20us, or the machine's"),
]
_Compute = Annotated[
    str,
    typer.Option(help="SEC[,spread]: forward and backward pass, and its standard deviation."),
]
_Scale = Annotated[
    float | None,
    typer.Option(
        help="C: n / C and k / C stand for n and k.", show_default="as small as 2 GB allow"
    ),
]
_Steps = Annotated[int, typer.Option(help="Steps that are reported.")]
_Warmup = Annotated[int, typer.Option(help="Steps before: those that are exact and cut regions.")]
_Nodes = Annotated[
    int | None, typer.Option(help="Nodes of so many ranks, which share a network card.")
]
_InnerNetwork = Annotated[
    str | None,
    typer.Option(help="Of ranks in one node: bandwidth,latency.", show_default="80gbit,5us"),
]
_Ports = Annotated[
    str, typer.Option(help="single: one message at a time each way; unlimited: nobody waits.")
]
_Straggler = Annotated[
    list[str] | None,
    typer.Option(help="RANK:FACTOR: a rank that computes slower; may be repeated."),
]
_Overlap = Annotated[
    bool, typer.Option("--overlap", help="Exchange buckets while the backward pass goes on.")
]
_Buckets = Annotated[
    int | None,
    typer.Option(help="Of equal size.", show_default="1; with --overlap of 25 MiB"),
]
_Machine = Annotated[
    Path | None, typer.Option(help='What work costs: a file of "sparsync doctor --json".')
]
_Inputs = Annotated[
    str,
    typer.Option(
        help=f"{SPREAD}: sparse, in cells; {', '.join(INPUTS)}: all elements, which takes memory; or "
        "a file of gradients [rows, n], .npy or torch.save's."
    ),
]
_Shared = Annotated[
    float, typer.Option(help=f"Part of the entries at the same places on all ranks ({SPREAD}).")
]
_Seed = Annotated[int, typer.Option(help="Of gradients and computation times.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]
_Plot = Annotated[Path | None, typer.Option(help="Draw the parts of the steps (.png).")]


def command(
    algorithm: _Algorithm = "oktopk,budgeted",
    ranks: _Ranks = 32,
    model_size: _ModelSize = None,
    density: _Density = 0.01,
    network: _Network = None,
    compute: _Compute = "0",
    scale: _Scale = None,
    steps: _Steps = 2,
    warmup: _Warmup = 1,
    nodes: _Nodes = None,
    inner_network: _InnerNetwork = None,
    ports: _Ports = "single",
    straggler: _Straggler = None,
    overlap: _Overlap = False,
    buckets: _Buckets = None,
    machine: _Machine = None,
    inputs: _Inputs = SPREAD,
    shared: _Shared = 0.25,
    seed: _Seed = 0,
    json: _Json = False,
    plot: _Plot = None,
) -> None:
    """Simulate training steps: the algorithms' own code on virtual ranks, under a virtual clock.

    Reports selection, communication and computation time beside Dense (one message) and DenseOvlp
    (25 MiB buckets, exchanged while the backward pass goes on).
    """
    _show(**locals())  # most options are fields of the settings by the same name


def _show(
    *,
    algorithm: str,
    model_size: int | None,
    network: str | None,
    compute: str,
    nodes: int | None,
    inner_network: str | None,
    ports: str,
    straggler: list[str] | None,
    machine: Path | None,
    inputs: str,
    json: bool,
    plot: Path | None,
    **fields: Any,
) -> None:
    """Simulate and report; files are tried before any work begins."""
    costs = Machine() if machine is None else _machine(machine)
    links = _links(network, costs if machine else None, ports)
    seconds, spread = _compute(compute)
    settings = SimulationSettings(
        tuple(name.strip() for name in algorithm.split(",")),
        model_size=_model_size(model_size, inputs),
        links=_topology(links, nodes, inner_network),
        compute=seconds,
        spread=spread,
        stragglers=tuple(_straggler(text) for text in straggler or ()),
        machine=costs,
        inputs=inputs,
        **fields,
    )
    if plot is not None:
        check_plot_path(plot)
    rows = _simulate(settings)
    if plot is not None:
        write_plot(rows, plot)
    if json:
        sys.stdout.write(as_json(rows))
    else:
        Console().print(tables(rows, settings))


def _simulate(settings: SimulationSettings) -> list[SimulatedRow]:
    """Simulate with a bar per algorithm."""
    with progress(shown=True) as row:
        return simulate_training(settings, lambda contender: row(contender.name))


def _machine(path: Path) -> Machine:
    """Read what work costs."""
    try:
        return Machine.from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"cannot read --machine '{path}' ({error}); give the file of sparsync doctor --json"
        ) from error


def _links(network: str | None, measured: Machine | None, ports: str) -> Links:
    """Return the links that are given, those of the measured machine, or the default."""
    if network is None and measured is not None:
        links = Links(measured.alpha, measured.beta)
    else:
        links = parse_network(network or "10gbit,20us")
    checked: Ports = "unlimited" if ports == "unlimited" else "single"
    if ports != checked:
        raise ConfigurationError(f"ports is {ports!r}; choose single or unlimited")
    return replace(links, ports=checked)


def _topology(links: Links, nodes: int | None, inner: str | None) -> Topology:
    """Put ranks into nodes, if asked for."""
    if nodes is None:
        if inner is not None:
            raise ConfigurationError("--inner-network is of nodes; give --nodes RANKS, too")
        return links
    return TwoLevel(nodes, parse_network(inner or "80gbit,5us"), links)


def _model_size(given: int | None, inputs: str) -> int:
    """Return the number of elements: of recorded gradients theirs."""
    if not Path(inputs).is_file():
        return SimulationSettings.model_size if given is None else given
    recorded = load_gradients(Path(inputs)).shape[1]
    if given not in (None, recorded):
        raise ConfigurationError(
            f"--model-size is {given}, but '{inputs}' has {recorded} elements; leave it away"
        )
    return recorded


def _compute(text: str) -> tuple[float, float]:
    """Read seconds and their spread."""
    try:
        seconds, spread = (float(part) for part in (*text.split(","), "0")[:2])
        if text.count(",") > 1:
            raise ValueError
    except ValueError as error:
        raise ConfigurationError(f"compute is {text!r}; give SEC or SEC,spread") from error
    return seconds, spread


def _straggler(text: str) -> tuple[int, float]:
    """Read RANK:FACTOR."""
    try:
        rank, factor = text.split(":")
        return int(rank), float(factor)
    except ValueError as error:
        raise ConfigurationError(f"straggler is {text!r}; give RANK:FACTOR, as 3:2.5") from error
