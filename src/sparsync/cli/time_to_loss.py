"""The page and the numbers of a plan by time to a loss, for ``sparsync plan`` and ``sparsync doctor``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, cast

from rich.console import Group
from rich.text import Text

from sparsync.cli.output import Columns
from sparsync.cost.machine import Machine
from sparsync.cost.steps import FARTHEST, LIKELY, Optimizer
from sparsync.cost.training import LossPlan, plan_loss
from sparsync.cost.wording import format_bandwidth, format_bytes, format_seconds
from sparsync.presets import candidates

__all__ = ["USUAL_STEPS", "Training", "loss_as_json", "loss_page"]

USUAL_STEPS = 1000  # steps of dense training, where none are given


@dataclass(frozen=True)
class Training:
    """The training whose time is predicted."""

    model_size: int
    optimizer: str
    compute: float | None = None  # seconds of a step without any exchange
    steps: float | None = None  # steps of dense training to the loss
    density: float | None = None  # density of sparse gradients

    def planned(self, ranks: int, machine: Machine) -> LossPlan:
        """Compare all methods on these links.

        Raises:
            ConfigurationError: a number is out of range, or the optimizer is unknown.
        """
        return plan_loss(
            self.model_size,
            ranks,
            machine,
            candidates(),
            optimizer=cast("Optimizer", self.optimizer),
            steps=USUAL_STEPS if self.steps is None else self.steps,
            compute=self.compute or 0.0,
            density=self.density,
        )


def loss_as_json(made: LossPlan) -> dict[str, Any]:
    """Return plain numbers and words; for every method also whether measured runs reach the loss."""
    rows = [{**asdict(one), "named": one.named, "reached": one.steps.reached} for one in made.table]
    return {
        "choice": made.choice,
        "way": made.way,
        "why": made.why,
        "steps_of_dense": made.steps,
        "table": rows,
    }


def loss_page(made: LossPlan, training: Training, ranks: int, machine: Machine) -> Group:
    """Show the ranked table, its meaning and the sentence."""
    rate = format_bandwidth(1 / machine.beta) if machine.beta else "any bandwidth"
    title = Text(
        f"{ranks} rank{'s' if ranks > 1 else ''}, n = {training.model_size:,}, {training.optimizer}, "
        f"{rate}, {format_seconds(machine.alpha)} per message, "
        f"{format_seconds(training.compute or 0.0)} of computation per step"
    )
    if ranks == 1 or training.model_size == 0:
        return Group(title, Text(made.why))
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
        f"between: a factor {LIKELY:.2g} either way, as 8 of 10 measurements of models left out",
        f"not reached: more than {FARTHEST:.2g} times, which no run of dense's length can show",
        "(small models, short runs, mostly 4 ranks: docs/planning.md, Time to a loss)",
    ]
    if training.compute is None:
        lines.append("no computation was given (--compute): nothing hides an exchange")
    if training.density not in (None, 0.01):
        lines.append("the steps of sparse gradients are those at a density of 1 %")
    by_choice = next(one for one in made.table if one.method == made.choice)
    lines += [made.why, f"that is: {by_choice.use}"]
    return Group(title, Text(), Columns.of(rows), Text("\n" + "\n".join(lines)))
