"""The command ``sparsync plan``: predict the cost of each collective on a network without running it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, cast, get_args

from rich.console import Console, Group
from rich.table import Table as Grid
from rich.text import Text
from typer import Option

from sparsync.algorithm import Algorithm, check_density
from sparsync.cli.flags import numbers, option, whole
from sparsync.cli.named_algorithms import OPTIONS_HELP, algorithm_of, labels
from sparsync.cli.network_choice import parse_network, parse_seconds
from sparsync.cli.output import Columns, check_outputs, format_ratio, to_json, write_json
from sparsync.cli.published_costs import published_rows, show_published
from sparsync.cli.values import (
    Bounds,
    Bytes,
    InputFile,
    ModelSize,
    Seconds,
    check,
    read_text,
    within,
)
from sparsync.collectives.costs import WORD_BYTES
from sparsync.cost.machine import Machine
from sparsync.cost.memory import Footprint, Optimizer, footprints
from sparsync.cost.planner import DEFAULT_DENSITY, Plan, Prediction, entries_at, plan
from sparsync.cost.wording import (
    format_bandwidth,
    format_bytes,
    format_percent,
    format_seconds,
)
from sparsync.errors import ConfigurationError, require
from sparsync.presets import PRESETS, candidates
from sparsync.published.oktopk.table_1 import TABLE_1

__all__ = [
    "Compute",
    "MachineFile",
    "ManyRanks",
    "Network",
    "RoundTrip",
    "as_json",
    "command",
    "machine_of",
    "read_machine",
]

# a plan runs nothing, so its limits may exceed those of any machine; even a single rank or an empty
# model is allowed
ManyRanks = Annotated[int, Bounds(1, 10**6)]
# these options describe a machine; plans in other packages also use them
Network = Annotated[
    str | None,
    option("bandwidth,latency, e.g. 10gbit,20us, or alpha=20us,beta=3ns/word.", "the machine's"),
]
RoundTrip = Annotated[
    str | None, option("Round trip between ranks, e.g. 80ms, on top of the latency.")
]
Compute = Annotated[
    Seconds | None,
    option("Seconds of computation per step, behind which part of the exchange can hide."),
]
MachineFile = Annotated[
    InputFile | None,
    option("Measurements of sparsync doctor --json; --network overrides its links."),
]

_COLLECTIVES = tuple(name for name in sorted(PRESETS) if name != "auto")
_MESSAGES = "messages: one after the other, not in total; each costs the latency"


def command(
    model_size: Annotated[
        ModelSize,
        Option(help="Trained parameters of the model, e.g. 7e9.", parser=whole),
    ],
    ranks: Annotated[str | None, option("World size; several separated by commas.", "8")] = None,
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
        option(f"With commas: {', '.join(_COLLECTIVES)}. {OPTIONS_HELP}", "those of auto"),
    ] = None,
    all_: Annotated[
        bool, Option("--all", help="Compare every collective, including those that quantise.")
    ] = False,
    optimizer: Annotated[
        str | None, option(f"Also report the memory of a rank: {', '.join(get_args(Optimizer))}.")
    ] = None,
    model: Annotated[
        str, option("full, or paper: Ok-Topk's Table 1, with alpha and beta alone.")
    ] = "full",
    json: Annotated[
        Path | None,
        option("Write the plan as JSON to this file; -: to standard output, without the table."),
    ] = None,
) -> None:
    """Predict which collective is fastest, and above which bandwidth and density dense is faster.

    A time covers one step's selection and exchange on the busiest rank.  With --optimizer, the plan also
    predicts a rank's memory; without a network, it predicts only the memory.  No training is run.
    """
    require(not (all_ and algorithm), "--all and --algorithm; choose one of them")
    alone = json == Path("-")
    if not alone:
        check_outputs(json)
    worlds = numbers("ranks", "8" if ranks is None else ranks, int)
    within("ranks", worlds, ManyRanks)
    check("model", repr(model), model in ("full", "paper"), "full or paper")
    content: Any
    exchanges = {"--compute": compute, "--budget": budget, "--all": all_ or None}
    if optimizer is not None and (network, machine, rtt, model) == (None, None, None, "full"):
        beyond = _given({"--ranks": ranks, "--algorithm": algorithm, **exchanges})
        require(
            not beyond,
            f"{beyond}: for predictions of time, which need --network or --machine; add one, or omit it",
        )
        require(
            density is None or optimizer.startswith("sgd") or optimizer not in get_args(Optimizer),
            f"--density has no effect on the memory of {optimizer}, with which updates are exchanged "
            "whole; omit it",
        )
        density = DEFAULT_DENSITY if density is None else check_density(density)
        uses = footprints(model_size, entries_at(density, model_size), cast("Optimizer", optimizer))
        content, shown = {"memory": [asdict(use) for use in uses]}, Group(*_memory(uses, optimizer))
    elif model == "paper":
        here = machine_of(machine, network, rtt)
        beyond = _given({**exchanges, "--optimizer": optimizer})
        require(not beyond, f"the paper's model knows no {beyond}; omit it, or --model paper")
        k = entries_at(DEFAULT_DENSITY if density is None else check_density(density), model_size)
        content = published_rows(model_size, k, worlds, here, _in_table_1(algorithm))
        shown = show_published(content, here)
    else:
        here = machine_of(machine, network, rtt)
        competing = candidates(planned=not all_) if algorithm is None else _named(algorithm)
        plans = {
            p: plan(
                model_size,
                p,
                here,
                competing,
                density=density,
                budget_bytes=budget,
                compute=compute,
            )
            for p in worlds
        }
        made = [{"ranks": p, **as_json(one)} for p, one in plans.items()]
        shown = _over_ranks(plans, here, model_size)
        if optimizer is not None:
            k = max(one.k for one in plans.values())
            uses = footprints(model_size, k, cast("Optimizer", optimizer))
            made = [{**one, "memory": [asdict(use) for use in uses]} for one in made]
            shown = Group(shown, *_memory(uses, optimizer))
        content = made if len(made) > 1 else made[0]
    if alone:
        sys.stdout.write(to_json(content))
    else:
        write_json(json, content)
        Console().print(shown, highlight=False)


def _given(options: Mapping[str, object]) -> str:
    """Return the names of the options that were given."""
    return ", ".join(name for name, value in options.items() if value is not None)


def _named(text: str) -> list[Algorithm]:
    """Return the algorithms that a text lists; each one's name includes its options."""
    found = labels(text, PRESETS)
    require(
        all(label.partition(":")[0] != "auto" for label in found),
        "auto chooses among the collectives that plan compares by default; omit --algorithm, or choose "
        f"among {', '.join(_COLLECTIVES)}",
    )
    return [replace(algorithm_of(label), name=label) for label in found]


def _in_table_1(text: str | None) -> list[str]:
    """Return the rows of Ok-Topk's Table 1 that a list names; without a list, return all rows."""
    if text is None:
        return list(TABLE_1)
    # the table uses the papers' names
    found = list(labels(text, PRESETS, tell=False))
    missing = ", ".join(name for name in found if name not in TABLE_1)
    known = ", ".join(TABLE_1)
    require(not missing, f"the paper's Table 1 has no {missing}; choose among {known}")
    return found


def as_json(made: Plan) -> dict[str, Any]:
    """Return a plan as plain numbers and words, for JSON.

    A break-even point of 0 means that dense wins everywhere; null means that dense wins nowhere.

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
    """Return the measured machine; a given network or round trip replaces the measured one.

    Raises:
        ConfigurationError: neither file nor network was given, or one of them is invalid.
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
    # a message's latency is the work at both ends plus half a round trip; replace only the latter
    way, alone = parse_seconds(rtt, "--rtt") / 2, machine.alpha - machine.distance
    return replace(machine, alpha=alone + way, distance=way)


def _over_ranks(plans: Mapping[int, Plan], machine: Machine, size: int) -> Group:
    """Show a single plan in full, or several plans with one column per world size."""
    if len(plans) == 1:
        [(ranks, made)] = plans.items()
        return _shown(made, machine, size, ranks)
    tables = []
    views: Mapping[str, Callable[[Plan, Prediction], str]] = {
        "time per step": lambda _, entry: format_seconds(entry.seconds),
        "speed-up over dense": lambda made, entry: format_ratio(_speedup(made, entry)),
        "volume of the busiest rank": lambda _, entry: format_bytes(entry.bytes_sent),
        "messages": lambda _, entry: f"{entry.messages:.0f}",
    }
    for title, cell in views.items():
        cells = {
            (entry.collective, p): cell(made, entry)
            for p, made in plans.items()
            for entry in made.table
        }
        tables.append(Columns.by_ranks("collective", cells, f"\n{title}"))
    entries = dict.fromkeys(f"{made.k:,}" for made in plans.values())
    title = f"n = {size:,}, k = {', '.join(entries)}, {_links(machine)}"
    # a grid, so that a narrow terminal wraps the sentences and not "P = 128"
    why = Grid.grid(padding=(0, 2))
    why.add_column(no_wrap=True)
    for p, made in plans.items():
        why.add_row(f"P = {p:,}", made.why)
    notes = "\n".join([_MESSAGES, *_assumed(machine)])
    return Group(Text(title), *tables, Text(f"\n{notes}\n"), why)


def _links(machine: Machine) -> str:
    rate = format_bandwidth(1 / machine.beta) if machine.beta else "any bandwidth"
    return f"{rate}, {format_seconds(machine.alpha)} per message"


def _assumed(machine: Machine) -> list[str]:
    """State the assumed speed of the ranks' own work, unless it was measured."""
    links = {"alpha": machine.alpha, "beta": machine.beta, "distance": machine.distance}
    if machine != replace(Machine(), **links):
        return []
    return [
        f"select: {format_seconds(1e9 * machine.select)} per billion elements, one core's; "
        "--machine: your ranks'"
    ]


def _speedup(made: Plan, entry: Prediction) -> float | None:
    return made.dense.seconds / entry.seconds if entry.seconds else None


def _shown(made: Plan, machine: Machine, size: int, ranks: int) -> Group:
    """Show the ranked table, the break-even points and the sentence."""
    part = f" ({format_percent(made.k / size)})" if size else ""
    title = Text(
        f"{ranks} rank{'s' if ranks > 1 else ''}, n = {size:,}, k = {made.k:,}{part}, {_links(machine)}"
    )
    if ranks == 1 or size == 0:
        return Group(title, Text(made.why))
    hidden = any(entry.seconds_hidden for entry in made.table)
    rows = []
    for entry in made.table:
        words, bound = entry.bytes_sent / WORD_BYTES, entry.lower_bound_words
        rows.append(
            {
                "collective": entry.collective,
                "time per step": format_seconds(entry.seconds),
                "select": format_seconds(entry.seconds_selection),
                "exchange": format_seconds(entry.seconds_exchange),
                "hidden": format_seconds(entry.seconds_hidden) if hidden else "-",
                "speed-up": format_ratio(_speedup(made, entry)),
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
        _MESSAGES,
        *_assumed(machine),
        f"break-even bandwidth: {bandwidth}",
        f"break-even density: {_limit(made.break_even_density, 'density', format_percent)}",
        made.why,
    ]
    return Group(title, Text(), Columns.of(rows), Text("\n" + "\n".join(lines)))


def _memory(uses: Sequence[Footprint], optimizer: str) -> list[Any]:
    """Show a rank's memory: for training itself, then the additional memory of each way to attach."""
    rows = [
        {
            "memory of a rank": f"+ {use.name}" if at else use.name,
            "device": format_bytes(use.device),
            "host": format_bytes(use.pinned) if use.pinned else "-",
        }
        for at, use in enumerate(uses)
    ]
    lines = [
        f"{optimizer} in float32, without activations; a model on the CPU keeps all of it in host "
        "memory"
    ]
    if any(use.host for use in uses):
        lines.append(
            "offload: of Compression(offload=); the default keeps the residual in host memory, which "
            "torch pins and rounds up to a power of two"
        )
    return [Text(), Columns.of(rows), Text("\n" + "\n".join(lines))]


def _limit(value: float | None, what: str, write: Callable[[float], str]) -> str:
    """Describe the bandwidth or density below which sparse wins."""
    if value:
        return f"{write(value)} (sparse wins below)"
    return f"none: {'sparse' if value is None else 'dense'} wins at every {what}"
