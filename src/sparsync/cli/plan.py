"""The command ``sparsync plan``: predict the cost of each collective on a network, before it is run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console, Group
from rich.text import Text
from typer import Option

from sparsync.algorithm import Algorithm
from sparsync.cli.flags import option
from sparsync.cli.named_algorithms import OPTIONS_HELP, algorithm_of, labels
from sparsync.cli.network_choice import parse_network, parse_seconds
from sparsync.cli.output import Columns, check_outputs, format_ratio, to_json, write_json
from sparsync.cli.values import Bounds, Bytes, InputFile, Seconds, read_text
from sparsync.collectives.costs import WORD_BYTES
from sparsync.cost.machine import Machine
from sparsync.cost.planner import Plan, plan
from sparsync.cost.wording import (
    format_bandwidth,
    format_bytes,
    format_percent,
    format_seconds,
)
from sparsync.errors import ConfigurationError, require
from sparsync.presets import PRESETS, candidates

__all__ = [
    "Compute",
    "MachineFile",
    "ManyRanks",
    "ModelSize",
    "Network",
    "RoundTrip",
    "as_json",
    "command",
    "machine_of",
    "read_machine",
]

# nothing is run, so the bounds exceed any machine; a single rank and an empty model get an answer
ManyRanks = Annotated[int, Bounds(1, 10**6)]
ModelSize = Annotated[int, Bounds(0, 10**15)]
# options that name a machine, here and in plans of other packages
Network = Annotated[str | None, option("bandwidth,latency, e.g. 10gbit,20us.", "the machine's")]
RoundTrip = Annotated[
    str | None, option("Round trip between ranks, e.g. 80ms, on top of the latency.")
]
Compute = Annotated[
    Seconds | None, option("Seconds of a step without exchange, which hide part of it.")
]
MachineFile = Annotated[
    InputFile | None,
    option("Measurements of sparsync doctor --json; --network overrides its links."),
]


def command(
    ranks: Annotated[ManyRanks, option("World size.")],
    model_size: Annotated[ModelSize, option("Trained elements: parameters of the model.")],
    density: Annotated[
        float | None, option("k / n to exchange.", "0.01, or what the budget allows")
    ] = None,
    network: Network = None,
    rtt: RoundTrip = None,
    compute: Compute = None,
    machine: MachineFile = None,
    budget: Annotated[
        Bytes | None, option("Most bytes that a rank sends or receives per step.")
    ] = None,
    algorithm: Annotated[
        str | None,
        option(f"With commas: {', '.join(sorted(PRESETS))}. {OPTIONS_HELP}", "those of auto"),
    ] = None,
    all_: Annotated[
        bool, Option("--all", help="Every collective, also those that quantise.")
    ] = False,
    json: Annotated[
        Path | None, option("Write the plan here; -: to standard output, alone.")
    ] = None,
) -> None:
    """Predict which collective is fastest, and from which bandwidth and density on dense is.

    Times are those of the busiest rank for one step: selection and exchange.  Nothing is run.
    """
    here = machine_of(machine, network, rtt)
    require(not (all_ and algorithm), "--all and --algorithm; choose one of them")
    alone = json == Path("-")
    if not alone:
        check_outputs(json)
    made = plan(
        model_size,
        ranks,
        here,
        candidates(planned=not all_) if algorithm is None else _named(algorithm),
        density=density,
        budget_bytes=budget,
        compute=compute,
    )
    if alone:
        sys.stdout.write(to_json(as_json(made)))
    else:
        write_json(json, as_json(made))
        Console().print(_shown(made, here, model_size, ranks), highlight=False)


def _named(text: str) -> list[Algorithm]:
    """Return the algorithms of a list, under names that show their options."""
    found = dict.fromkeys(labels(text, PRESETS))  # two names may mean one row
    return [replace(algorithm_of(label), name=label) for label in found]


def as_json(made: Plan) -> dict[str, Any]:
    """Return a plan as plain numbers and words.

    A break-even of 0: dense wins everywhere; null: nowhere.

    Example:
        >>> made = as_json(plan(1_000_000, 4, Machine(), candidates()))
        >>> made["choice"], sorted(made["table"][0])[:3]
        ('budgeted', ['bytes_sent', 'collective', 'equation'])
    """
    return {
        "choice": made.choice,
        "why": made.why,
        "break_even_bandwidth": made.break_even_bandwidth,
        "break_even_density": made.break_even_density,
        "k": made.k,
        "table": [{**asdict(entry), "seconds": entry.seconds} for entry in made.table],
    }


def read_machine(file: Path) -> Machine:
    """Read the measurements of ``sparsync doctor --json``.

    Raises:
        ConfigurationError: the file cannot be read, or is not from ``sparsync doctor``.
    """
    return Machine.from_json(read_text(file, "--machine", "the file of sparsync doctor --json"))


def machine_of(file: Path | None, network: str | None, rtt: str | None) -> Machine:
    """Return the measured machine, with the network and the round trip that were named.

    Raises:
        ConfigurationError: neither file nor network was named, or one of them makes no sense.
    """
    if file is None and network is None:
        raise ConfigurationError(
            "no network is known; name one, e.g. --network 10gbit,20us, or give --machine FILE, "
            'which "sparsync doctor --json FILE" writes'
        )
    machine = Machine() if file is None else read_machine(file)
    if network is not None:
        links = parse_network(network)
        machine = replace(machine, alpha=links.alpha, beta=links.beta, distance=0.0)
    if rtt is None:
        return machine
    # a message's latency is work on both sides and half a round trip; only the latter is replaced
    way, alone = parse_seconds(rtt, "--rtt") / 2, machine.alpha - machine.distance
    return replace(machine, alpha=alone + way, distance=way)


def _shown(made: Plan, machine: Machine, size: int, ranks: int) -> Group:
    """Show the ranked table, the break-even points and the sentence."""
    rate = format_bandwidth(1 / machine.beta) if machine.beta else "any bandwidth"
    part = f" ({format_percent(made.k / size)})" if size else ""
    title = Text(
        f"{ranks} rank{'s' if ranks > 1 else ''}, n = {size:,}, k = {made.k:,}{part}, {rate}, "
        f"{format_seconds(machine.alpha)} per message"
    )
    if ranks == 1 or size == 0:
        return Group(title, Text(made.why))
    hidden = any(entry.seconds_hidden for entry in made.table)
    rows = []
    for entry in made.table:
        words, bound = entry.bytes_sent / WORD_BYTES, entry.lower_bound_words
        speedup = made.dense.seconds / entry.seconds if entry.seconds else None
        rows.append(
            {
                "collective": entry.collective,
                "time per step": format_seconds(entry.seconds),
                "select": format_seconds(entry.seconds_selection),
                "exchange": format_seconds(entry.seconds_exchange),
                "hidden": format_seconds(entry.seconds_hidden) if hidden else "-",
                "speed-up": format_ratio(speedup),
                "volume": format_bytes(entry.bytes_sent),
                "messages": f"{entry.messages:.0f}",
                "over bound": format_ratio(words / bound if bound else None),
            }
        )
    bandwidth = _limit(made.break_even_bandwidth, "bandwidth", format_bandwidth)
    lines = [
        "time per step: select + exchange - hidden; speed-up: over dense",
        "volume: the most that a rank sends or receives; over bound: in words of 4 bytes",
        "over Ok-Topk's Theorem 3.1 or SparCML's Lemmas 5.1, 5.2; fewer bits go below",
        f"break-even bandwidth: {bandwidth}",
        f"break-even density: {_limit(made.break_even_density, 'density', format_percent)}",
        made.why,
    ]
    return Group(title, Text(), Columns.of(rows), Text("\n" + "\n".join(lines)))


def _limit(value: float | None, what: str, write: Callable[[float], str]) -> str:
    """Name the value below which sparse wins."""
    if value:
        return f"{write(value)} (sparse wins below)"
    return f"none: {'sparse' if value is None else 'dense'} wins at every {what}"
