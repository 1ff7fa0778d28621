"""The command ``sparsync time-to-loss``: find the training method that reaches a loss first."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console, Group
from rich.text import Text

from sparsync.cli.flags import option
from sparsync.cli.output import Columns, check_outputs, to_json, write_json
from sparsync.cli.plan import (
    Compute,
    MachineFile,
    ManyRanks,
    Network,
    RoundTrip,
    machine_of,
)
from sparsync.cli.values import ModelSize, Positive
from sparsync.cost.machine import Machine
from sparsync.cost.wording import format_bandwidth, format_bytes, format_seconds
from sparsync.presets import candidates
from sparsync_papers.time_to_loss.methods import LossPlan, plan_loss
from sparsync_papers.time_to_loss.steps_to_loss import FARTHEST, LIKELY, Optimizer

_USUAL_DENSITY = 0.01  # the density at which curves of sparse gradients were measured


def command(
    ranks: Annotated[ManyRanks, option("World size.")],
    model_size: Annotated[ModelSize, option("Trained parameters of the model.")],
    optimizer: Annotated[str, typer.Option(help="Optimizer of the training: sgd, adamw or muon.")],
    network: Network = None,
    rtt: RoundTrip = None,
    machine: MachineFile = None,
    compute: Compute = None,
    steps_to_loss: Annotated[
        Positive, typer.Option(help="Steps that dense needs to reach the loss.")
    ] = 1000,
    density: Annotated[
        float | None, option("Density k / n of sparse gradients.", f"{_USUAL_DENSITY}")
    ] = None,
    json: Annotated[
        Path | None,
        option("Write the plan as JSON to this file; -: to standard output, without the table."),
    ] = None,
) -> None:
    """Predict which training method first reaches the loss that dense reaches after a number of steps.

    The methods are dense, averages, local steps, sparse and low-rank gradients. The prediction
    multiplies the seconds per step by a number of steps that was fitted to short runs of small
    models. This is a study, not a promise; no training is run.
    """
    here = machine_of(machine, network, rtt)
    alone = json == Path("-")
    if not alone:
        check_outputs(json)
    made = plan_loss(
        model_size,
        ranks,
        here,
        candidates(),
        optimizer=cast("Optimizer", optimizer),
        steps=steps_to_loss,
        compute=compute or 0.0,
        density=density,
    )
    if alone:
        sys.stdout.write(to_json(as_json(made)))
        return
    write_json(json, as_json(made))
    title = Text(
        f"{ranks} rank{'s' if ranks > 1 else ''}, n = {model_size:,}, {optimizer}, {_links(here)}, "
        f"{format_seconds(compute or 0.0)} of computation per step"
    )
    shown: list[Any] = [Text(made.why)]
    if ranks > 1 and model_size > 0:
        notes = []
        if compute is None:
            notes.append("no computation was given (--compute): nothing hides an exchange")
        if density not in (None, _USUAL_DENSITY):
            notes.append("the steps of sparse gradients were measured at a density of 1 %")
        shown = _ranked(made, notes)
    Console().print(Group(title, *shown), highlight=False)


def as_json(made: LossPlan) -> dict[str, Any]:
    """Return the plan as plain values for JSON; "reached" is true for methods that reach the loss."""
    rows = [{**asdict(one), "named": one.named, "reached": one.steps.reached} for one in made.table]
    return {
        "choice": made.choice,
        "way": made.way,
        "why": made.why,
        "steps_of_dense": made.steps,
        "table": rows,
    }


def _links(machine: Machine) -> str:
    rate = format_bandwidth(1 / machine.beta) if machine.beta else "any bandwidth"
    return f"{rate}, {format_seconds(machine.alpha)} per message"


def _ranked(made: LossPlan, notes: list[str]) -> list[Any]:
    """Format the ranked table, its legend and the concluding sentence."""
    rows = []
    for one in made.table:
        ends = [format_seconds(value) for value in (one.seconds.low, one.seconds.high)]
        known = one.steps.reached
        sure = one.steps.low == one.steps.high
        rows.append(
            {
                "method": one.method,
                "steps": f"{one.steps.mean:.2f} x" if known else "not reached",
                "a step": format_seconds(one.seconds_step),
                "in all": format_seconds(one.seconds.mean) if known else "-",
                "between": f"{ends[0]}, {ends[1]}" if known and not sure else "-",
                "sent": format_bytes(one.bytes_step),
            }
        )
    lines = [
        f"steps: over the {made.steps:,g} of dense; in all: to the loss; sent: per step",
        f"between: a factor {LIKELY:.2g} either way, which covered 8 of 10 measurements of models left "
        "out",
        f"not reached: more than {FARTHEST:.2g} times the steps, beyond what a run of dense's length can "
        "show",
        "(small models, short runs, mostly 4 ranks: docs/time-to-loss.md)",
        *notes,
        made.why,
        f"that is: {made.table[0].use}",
    ]
    return [Text(), Columns.of(rows), Text("\n" + "\n".join(lines))]
