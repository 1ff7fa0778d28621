"""The command ``sparsync plan``: what each collective would cost on a network, before it is tried."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from sparsync.bench.network import parse_network
from sparsync.bench.report import check_writable, format_ratio
from sparsync.errors import ConfigurationError
from sparsync.planning.cost import WORD_BYTES
from sparsync.planning.forms import COLLECTIVES
from sparsync.planning.machine import Machine
from sparsync.planning.planner import CANDIDATES, Plan, plan
from sparsync.planning.wording import (
    format_bandwidth,
    format_bytes,
    format_percent,
    format_seconds,
)

__all__ = ["as_json", "command"]

_STANDARD_OUTPUT = Path("-")
_MS = 1e3

_Ranks = Annotated[int, typer.Option(help="World size.")]
_ModelSize = Annotated[int, typer.Option(help="Trained elements: parameters of the model.")]
_Density = Annotated[
    float | None,
    typer.Option(help="k / n to exchange.", show_default="0.01, or what the budget allows"),
]
_Network = Annotated[
    str | None,
    typer.Option(help="bandwidth,latency, as 10gbit,20us.", show_default="the machine's"),
]
_Compute = Annotated[
    float | None,
    typer.Option(help="Seconds of a forward and backward pass, behind which dense buckets hide."),
]
_Machine = Annotated[
    Path | None,
    typer.Option(help="What sparsync doctor --json measured; --network overrides its links."),
]
_Budget = Annotated[
    float | None, typer.Option(help="Most bytes that a rank sends or receives per step.")
]
_All = Annotated[bool, typer.Option("--all", help="Every collective, also those that quantise.")]
_Json = Annotated[
    Path | None, typer.Option(help="Write the plan here; -: to standard output, alone.")
]


def command(
    ranks: _Ranks,
    model_size: _ModelSize,
    density: _Density = None,
    network: _Network = None,
    compute: _Compute = None,
    machine: _Machine = None,
    budget: _Budget = None,
    all_: _All = False,
    json: _Json = None,
) -> None:
    """Predict which collective is fastest, and from which bandwidth and density on dense is.

    Times are those of the busiest rank for one step: selection and exchange.  Nothing is run.
    """
    here = _machine(machine, network)
    if json is not None and json != _STANDARD_OUTPUT:
        check_writable(json)
    made = plan(
        model_size,
        ranks,
        here,
        density=density,
        budget_bytes=budget,
        compute=compute,
        candidates=tuple(COLLECTIVES) if all_ else CANDIDATES,
    )
    if json is not None:
        written = json_module.dumps(as_json(made), indent=1, allow_nan=False) + "\n"
        if json == _STANDARD_OUTPUT:
            sys.stdout.write(written)
            return
        json.write_text(written, encoding="utf-8")
    Console().print(_shown(made, here, model_size, ranks))


def as_json(made: Plan) -> dict[str, Any]:
    """Return a plan as plain numbers and words.

    A break-even of 0: dense wins everywhere; null: nowhere.

    Example:
        >>> made = as_json(plan(1_000_000, 4, Machine()))
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


def _machine(file: Path | None, network: str | None) -> Machine:
    """Read what was measured; put the network in that was named."""
    if file is None and network is None:
        raise ConfigurationError(
            "no network is known; name one, as --network 10gbit,20us, or give --machine FILE, "
            'which "sparsync doctor --json FILE" writes'
        )
    machine = Machine()
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "no text"
            raise ConfigurationError(
                f"cannot read '{file}' ({reason}); give what sparsync doctor --json wrote"
            ) from error
        machine = Machine.from_json(text)
    if network is None:
        return machine
    links = parse_network(network)
    return replace(machine, alpha=links.alpha, beta=links.beta)


def _shown(made: Plan, machine: Machine, size: int, ranks: int) -> Group:
    """Show the ranked table, the break-even points and the sentence."""
    title = Text(_title(made, machine, size, ranks))
    if ranks == 1 or size == 0:
        return Group(title, Text(made.why))
    hidden = any(entry.seconds_hidden for entry in made.table)
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    shown.add_column("\ncollective", no_wrap=True)
    headings = ["step\nms", "select\nms", "exchange\nms", *["hidden\nms"] * hidden]
    for heading in [*headings, "\nspeed-up", "\nvolume", "\nmessages", "over\nbound"]:
        shown.add_column(heading, justify="right", no_wrap=True)
    for entry in made.table:
        times = [entry.seconds, entry.seconds_selection, entry.seconds_exchange]
        words, bound = entry.bytes_sent / WORD_BYTES, entry.lower_bound_words
        shown.add_row(
            entry.collective,
            *(format_ratio(_MS * t) for t in [*times, *[entry.seconds_hidden] * hidden]),
            format_ratio(made.dense.seconds / entry.seconds if entry.seconds else None),
            format_bytes(entry.bytes_sent),
            f"{entry.messages:.0f}",
            format_ratio(words / bound if bound else None),
        )
    return Group(title, shown, Text(_legend(made)))


def _title(made: Plan, machine: Machine, size: int, ranks: int) -> str:
    rate = format_bandwidth(1 / machine.beta) if machine.beta else "any bandwidth"
    part = f" ({format_percent(made.k / size)})" if size else ""
    who = "1 rank" if ranks == 1 else f"{ranks} ranks"
    return (
        f"{who}, n = {size:,}, k = {made.k:,}{part}, {rate}, "
        f"{format_seconds(machine.alpha)} per message"
    )


def _legend(made: Plan) -> str:
    bandwidth, density = made.break_even_bandwidth, made.break_even_density
    return "\n".join(
        [
            "step: select + exchange, less what is hidden; speed-up: over dense",
            "volume: the most that a rank sends or receives; over bound: in words of 4 bytes",
            "over Ok-Topk's Theorem 3.1 or SparCML's Lemmas 5.1, 5.2; fewer bits go below",
            f"break-even bandwidth: {_limit(bandwidth, 'bandwidth', format_bandwidth)}",
            f"break-even density: {_limit(density, 'density', format_percent)}",
            made.why,
        ]
    )


def _limit(value: float | None, what: str, write: Callable[[float], str]) -> str:
    """Say below which value sparse wins."""
    if value:
        return f"{write(value)} (sparse wins below)"
    return f"none: {'sparse' if value is None else 'dense'} wins at every {what}"
