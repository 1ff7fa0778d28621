"""The page of ``sparsync doctor``: what a person reads, and pastes into a bug report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from sparsync.bench.doctor_checks import Check
from sparsync.bench.doctor_facts import Facts
from sparsync.planning import costs
from sparsync.planning.calibrate import Calibration

__all__ = ["Examination", "as_json", "bandwidth", "page", "sentence"]

_BITS_PER_BYTE = 8


@dataclass(frozen=True)
class Examination:
    """What the ranks found.

    Attributes:
        transport: what carried the messages.
        lab: rate of the shaped links, as it was given.
        facts: of every rank.
        calibration: of the group.
        checks: what is right and wrong.
    """

    transport: str
    lab: str | None
    facts: tuple[Facts, ...]
    calibration: Calibration
    checks: tuple[Check, ...]

    @property
    def healthy(self) -> bool:
        """Nothing is bad."""
        return all(check.level != "bad" for check in self.checks)


def page(found: Examination) -> Group:
    """Show it: versions, links, work, checks, and what it means."""
    return Group(
        Text(_heading(found)),
        Text(),
        _measured(found.calibration),
        Text(),
        _checked(found.checks),
        Text(),
        Text(sentence(found)),
    )


def sentence(found: Examination, *, elements: int = 14_728_266) -> str:
    """Say what it means.

    Args:
        found: the examination.
        elements: of an example; VGG-16's on CIFAR-10 (Ok-Topk, Table 2).
    """
    machine, ranks = found.calibration.machine, len(found.facts)
    if ranks == 1:
        return "One rank exchanges nothing; start the doctor with the ranks of your job."
    cost = costs.dense(elements, ranks)
    seconds = cost.seconds(machine.alpha, machine.beta) + machine.gamma * cost.nbytes / 2
    return (
        f"{ranks} ranks at {bandwidth(machine.beta)}, {_time(machine.alpha)}: a dense allreduce of "
        f"{elements / 1e6:.1f} M parameters would take about {_time(seconds)}. "
        "What sparse ones would take: sparsync plan --machine FILE, with the FILE of --json."
    )


def bandwidth(beta: float) -> str:
    """Write seconds per byte as what a link carries.

    Example:
        >>> bandwidth(8.37e-9), bandwidth(0.5e-9), bandwidth(8e-8), bandwidth(0.0)
        ('956 Mbit/s', '16 Gbit/s', '100 Mbit/s', 'unlimited')
    """
    if beta <= 0:
        return "unlimited"
    rate = _BITS_PER_BYTE / beta
    for unit, name in ((1e9, "Gbit/s"), (1e6, "Mbit/s")):
        if rate >= 0.9995 * unit:
            return f"{rate / unit:.3g} {name}"
    return f"{rate / 1e3:.3g} kbit/s"


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


def _measured(found: Calibration) -> Table:
    """Show the numbers with their intervals."""
    shown = Table(box=None, pad_edge=False)
    for title in ("measured", "", "95 % between"):
        shown.add_column(title, justify="left" if title == "measured" else "right")
    machine, ends = found.machine, found.intervals
    if "alpha" in ends:
        low, high = ends["alpha"]
        shown.add_row("a message's latency", _time(machine.alpha), f"{_time(low)}, {_time(high)}")
        low, high = ends["beta"]
        carries = f"{bandwidth(high)}, {bandwidth(low)}"
        shown.add_row("a link's bandwidth, both ways", bandwidth(machine.beta), carries)
        low, high = ends["turn"]
        shown.add_row(
            "waiting for others' work", _time(machine.turn), f"{_time(low)}, {_time(high)}"
        )
    for name, what, unit in (
        ("gamma", "dense sum", "byte"),
        ("select", "accumulate, select, retain", "element"),
        ("encode", "pack", "entry"),
        ("decode", "unpack and merge", "entry"),
    ):
        low, high = ends[name]
        pace = f"{1e9 * getattr(machine, name):.3g} ns per {unit}"
        shown.add_row(what, pace, f"{1e9 * low:.3g}, {1e9 * high:.3g}")
    return shown


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


def _time(seconds: float) -> str:
    """Write a time with a unit that suits it."""
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= 0.9995 * unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e9:.3g} ns"
