"""The page of ``sparsync doctor``: for a person to read, and to paste into a bug report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from sparsync.cli.doctor.checks import Check
from sparsync.cli.doctor.facts import Facts
from sparsync.cli.output import Columns
from sparsync.collectives.costs import allreduce
from sparsync.cost.calibrate import Calibration
from sparsync.cost.wording import format_bandwidth, format_seconds

__all__ = ["Examination", "as_json", "page", "sentence"]


@dataclass(frozen=True)
class Examination:
    """The findings of the ranks."""

    transport: str  # carried the messages
    lab: str | None  # rate of the shaped links, as it was given
    facts: tuple[Facts, ...]  # of every rank
    calibration: Calibration
    checks: tuple[Check, ...]

    @property
    def healthy(self) -> bool:
        """Nothing is bad."""
        return all(check.level != "bad" for check in self.checks)


def page(found: Examination) -> Group:
    """Show versions, links, work, checks, and their meaning."""
    checked = _checked(found.checks)
    heading, meaning = Text(_heading(found) + "\n"), Text("\n" + sentence(found))
    return Group(heading, _measured(found.calibration), Text(), checked, meaning)


def sentence(found: Examination, *, elements: int = 14_728_266) -> str:
    """Say what the findings mean for a training, e.g. of VGG-16 on CIFAR-10 (Ok-Topk, Table 2)."""
    machine, ranks = found.calibration.machine, len(found.facts)
    if ranks == 1:
        return "One rank exchanges nothing; start the doctor with the ranks of your job."
    cost = allreduce(elements, ranks)
    seconds = cost.seconds(machine.alpha, machine.beta) + machine.gamma * cost.nbytes / 2
    return (
        f"{ranks} ranks at {_bandwidth(machine.beta)}, {format_seconds(machine.alpha)}: a dense "
        f"allreduce of {elements / 1e6:.1f} M parameters would take about {format_seconds(seconds)}. "
        "For sparse ones: sparsync plan --machine FILE, with the FILE of --json."
    )


def as_json(found: Examination) -> dict[str, Any]:
    """Return plain numbers; ``Machine.from_json`` reads its "machine"."""
    first, *_ = found.facts
    return {
        **found.calibration.as_dict(),
        "checks": [asdict(check) for check in found.checks],
        "versions": {"sparsync": first.sparsync, "torch": first.torch, "python": first.python},
        "transport": found.transport,
        "lab": found.lab,
        "ranks": [asdict(facts) for facts in found.facts],
    }


def _heading(found: Examination) -> str:
    first = found.facts[0]
    machines = len({facts.machine for facts in found.facts})
    links = f" over links of {found.lab}" if found.lab else ""
    hosts = sorted({facts.host for facts in found.facts if facts.host})
    there = ", ".join(f"{name} {more}".strip() for name, more in first.backends.items())
    lines = [
        f"sparsync {first.sparsync}, torch {first.torch}, Python {first.python}, {first.platform}",
        f"{len(found.facts)} rank(s) on {machines} machine(s), {found.transport}{links}"
        + (f" ({first.mpi})" if first.mpi else ""),
        f"here: {there}",
    ]
    return "\n".join([*lines, *([f"hosts: {', '.join(hosts)}"] if hosts else [])])


def _measured(found: Calibration) -> Columns:
    """Show the numbers with their intervals."""
    machine, ends, rows = found.machine, found.intervals, []
    for name, what, write in (
        ("alpha", "a message's latency", format_seconds),
        ("beta", "a link's bandwidth, both ways", _bandwidth),
        ("turn", "waiting for others' work", format_seconds),
    ):
        if name in ends:
            between = ", ".join(map(write, sorted(ends[name], reverse=name == "beta")))
            rows.append([what, write(getattr(machine, name)), between])
    for name, what, unit in (
        ("gamma", "dense sum", "byte"),
        ("select", "accumulate, select, retain", "element"),
        ("encode", "pack", "entry"),
        ("decode", "unpack and merge", "entry"),
    ):
        low, high = ends[name]
        pace = f"{1e9 * getattr(machine, name):.3g} ns per {unit}"
        rows.append([what, pace, f"{1e9 * low:.3g}, {1e9 * high:.3g}"])
    return Columns(["measured", "", "95 % between"], rows)


def _bandwidth(beta: float) -> str:
    return format_bandwidth(1 / beta) if beta > 0 else "unlimited"


def _checked(checks: Iterable[Check]) -> Table:
    """Show the checks, the bad ones first."""
    shown = Table(box=None, pad_edge=False, show_header=False)
    shown.add_column(style="bold")
    shown.add_column()
    for level in ("bad", "note", "ok"):
        for check in checks:
            if check.level == level:
                shown.add_row(level, check.what + (f": {check.advice}" if check.advice else ""))
    return shown
