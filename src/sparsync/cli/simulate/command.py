"""The command ``sparsync simulate``: training steps of many ranks on this machine, in virtual time."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from typer import Option

from sparsync.cli.network import parse_network
from sparsync.cli.options import Plot, names, takes
from sparsync.cli.output import check_outputs, progress
from sparsync.cli.plan import read_machine
from sparsync.cli.simulate.gradients import load_gradients
from sparsync.cli.simulate.report import as_json, tables, write_plot
from sparsync.cli.simulate.settings import SimulationSettings
from sparsync.cli.simulate.training import simulate_training
from sparsync.cost.machine import Machine
from sparsync.errors import ConfigurationError
from sparsync.presets import presets
from sparsync.transports.sim import Links, Ports, Topology, TwoLevel

__all__ = ["command"]


@takes(SimulationSettings)
def command(
    algorithm: Annotated[
        str, Option(help=f"With commas: {', '.join(sorted(presets()))}.")
    ] = "oktopk,budgeted",
    model_size: Annotated[
        int | None,
        Option(help="Elements of the model.", show_default="133547324, or the recorded ones'"),
    ] = None,
    network: Annotated[
        str | None,
        Option(help="bandwidth,latency.", show_default="10gbit,20us, or the machine's"),
    ] = None,
    nodes: Annotated[
        int | None, Option(help="Nodes of this many ranks, which share a network card.")
    ] = None,
    inner_network: Annotated[
        str | None,
        Option(help="Of ranks in one node: bandwidth,latency.", show_default="80gbit,5us"),
    ] = None,
    ports: Annotated[
        str, Option(help="single: one message at a time each way; unlimited: nobody waits.")
    ] = "single",
    compute: Annotated[
        str, Option(help="SEC[,spread]: forward and backward pass, and its standard deviation.")
    ] = "0",
    straggler: Annotated[
        list[str] | None,
        Option(help="RANK:FACTOR: a rank that computes slower; may be repeated."),
    ] = None,
    machine: Annotated[
        Path | None, Option(help='What work costs: a file of "sparsync doctor --json".')
    ] = None,
    *,
    json: Annotated[bool, Option("--json", help="Print JSON, for machines.")] = False,
    plot: Plot = None,
    **fields: Any,
) -> None:
    """Simulate training steps: the algorithms' own code on virtual ranks, under a virtual clock.

    Reports selection, communication and computation time next to Dense (one message) and DenseOvlp
    (25 MiB buckets, exchanged while the backward pass goes on).
    """
    measured = None if machine is None else read_machine(machine)
    seconds, spread = _compute(compute)
    settings = SimulationSettings(
        names(algorithm),
        model_size=_model_size(model_size, fields["inputs"]),
        links=_topology(_links(network, measured, ports), nodes, inner_network),
        compute=seconds,
        spread=spread,
        stragglers=tuple(_straggler(text) for text in straggler or ()),
        machine=measured or Machine(),
        **fields,
    )
    check_outputs(plot=plot)
    with progress() as row:
        rows = simulate_training(settings, row)
    if plot is not None:
        write_plot(rows, plot)
    if json:
        sys.stdout.write(as_json(rows))
    else:
        Console().print(tables(rows, settings), highlight=False)


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
    """Return the number of elements: that of recorded gradients, where there are some."""
    if not Path(inputs).is_file():
        return SimulationSettings.model_size if given is None else given
    recorded = load_gradients(Path(inputs)).shape[1]
    if given not in (None, recorded):
        raise ConfigurationError(
            f"--model-size is {given}, but '{inputs}' has {recorded} elements; leave it out"
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
        raise ConfigurationError(f"straggler is {text!r}; give RANK:FACTOR, e.g. 3:2.5") from error
