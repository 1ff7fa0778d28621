"""The command ``sparsync doctor``: check a job's network and software, and measure their speed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any, cast, get_args

import torch
import typer
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text
from typer import Option

from sparsync.cli.doctor.checks import Check, check_facts, check_links
from sparsync.cli.doctor.far import check_far
from sparsync.cli.doctor.machine_facts import Facts, check_versions, local_facts
from sparsync.cli.doctor.memory import check_memory
from sparsync.cli.flags import (
    Json,
    Lab,
    Timeout,
    Transport,
    option,
    ranks_option,
    takes,
    whole,
)
from sparsync.cli.launch import gather, leads
from sparsync.cli.network_choice import Connection, transport_of
from sparsync.cli.output import Columns, check_outputs, progress, write_json
from sparsync.cli.values import ModelSize, Ranks, check, check_fields
from sparsync.collectives.costs import allreduce
from sparsync.cost.calibrate import Calibration, calibrate
from sparsync.cost.memory import Optimizer
from sparsync.cost.wording import format_bandwidth, format_seconds
from sparsync.errors import PeerError
from sparsync.transports.agree import check_equal_parameters
from sparsync.transports.communicator import Communicator
from sparsync.transports.driver import run

__all__ = [
    "DoctorSettings",
    "Examination",
    "as_json",
    "command",
    "doctor",
    "examine",
    "page",
    "sentence",
]


@dataclass(frozen=True)
class DoctorSettings:
    """Settings of an examination, checked before anything starts; every field is an option."""

    ranks: Annotated[Ranks, ranks_option(4)] = 4
    transport: Transport = "auto"
    lab: Lab = None
    seconds: Annotated[
        float, Option(help="Approximate duration of the measurement; distant links need more.")
    ] = 3.0
    timeout: Timeout = 60.0
    hosts: Annotated[bool, Option("--hosts", help="Name the hosts in the report.")] = False
    model_size: Annotated[
        ModelSize | None,
        Option(help="Also check whether this many parameters fit, e.g. 7e9.", parser=whole),
    ] = None
    optimizer: Annotated[
        str | None, option(f"For --model-size: {', '.join(get_args(Optimizer))}.", "adamw")
    ] = None

    def __post_init__(self) -> None:
        check_fields(self)
        expected = f"some > 0 and at most --timeout, {self.timeout:g}"
        check("seconds", f"{self.seconds:g}", 0 < self.seconds <= self.timeout, expected)
        known = get_args(Optimizer)
        there = self.optimizer is None or self.optimizer in known
        check("optimizer", repr(self.optimizer), there, " or ".join(known))
        lacks = self.optimizer is not None and self.model_size is None
        check("optimizer", repr(self.optimizer), not lacks, "--model-size as well, or omit it")
        self.connection()

    def connection(self) -> Connection:
        """Return how the ranks are connected."""
        return Connection(self.transport, self.timeout, lab=self.lab)


@dataclass(frozen=True)
class Examination:
    """The findings on all ranks."""

    transport: str  # the transport that carried the messages
    lab: str | None  # the text that describes the shaped links
    facts: tuple[Facts, ...]  # by rank
    calibration: Calibration
    checks: tuple[Check, ...]

    @property
    def healthy(self) -> bool:
        """Whether no check is bad."""
        return all(check.level != "bad" for check in self.checks)


@takes(DoctorSettings)
def command(*, json: Json = None, **fields: Any) -> None:
    """Measure the links and the ranks of a job, and check its software; this takes a few seconds.

    Starts local ranks, or joins ranks that torchrun, mpiexec or srun started.  The page names no host
    and no address, so you can paste it into a bug report; sparsync plan --machine reads the file that
    --json writes.
    The exit code is 1 if anything is bad.
    """
    settings = DoctorSettings(**fields)
    if leads():
        check_outputs(json)
    settings.connection().prepare()
    found = doctor(settings)
    if found is None:
        return
    Console().print(page(found), highlight=False)
    write_json(json, as_json(found))
    if not found.healthy:
        raise typer.Exit(1)


def doctor(settings: DoctorSettings) -> Examination | None:
    """Examine a group; under a launcher, only rank 0 returns the findings, other ranks return None."""
    about = settings.seconds + 3  # ranks take about 3 s to start
    text = f"examining {settings.ranks} rank(s), about {about:.0f} s"
    with progress(shown=leads()) as row, row(text):
        found: Examination | None = settings.connection().start(examine, settings.ranks, settings)
    return found


def examine(settings: DoctorSettings) -> Examination:
    """Examine the group; all of its ranks call this, and all get the same result.

    Raises:
        PeerError: ranks run different versions of sparsync.
    """
    mine = local_facts(settings.transport, hosts=settings.hosts)
    facts = gather(mine, [Facts])
    check_versions(facts)
    with settings.connection().open("doctor") as comm:
        started = _check_start(comm)
        calibration = run(calibrate(comm, seconds=settings.seconds))
        links = check_links(calibration, [f.wall for f in facts])
        checks = [*check_facts(facts), started, *links, *check_far(calibration, facts)]
        if settings.model_size is not None:
            optimizer = cast("Optimizer", settings.optimizer or "adamw")
            checks.append(check_memory(facts, settings.model_size, optimizer))
        return Examination(
            transport_of(comm), settings.lab, tuple(facts), calibration, tuple(checks)
        )


def _check_start(comm: Communicator) -> Check:
    """Check that models initialised with the same seed are equal on all ranks."""
    draw = torch.Generator().manual_seed(0)
    weight = torch.nn.init.xavier_normal_(torch.empty(64, 64), generator=draw)
    try:
        run(check_equal_parameters(comm, [("of a layer with seed 0", weight)]))
    except PeerError:
        found = "the same seed gives ranks different parameters"
        return Check("bad", found, "send rank 0's to all before the first step, as DDP does")
    return Check("ok", "the same seed gives all ranks the same parameters")


# ---- the page -----------------------------------------------------------------------------------


def page(found: Examination) -> Group:
    """Show versions, links, work, checks (bad ones first), and a summary."""
    checked = Table(box=None, pad_edge=False, show_header=False)
    checked.add_column(style="bold")
    checked.add_column()
    for line in sorted(found.checks, key=lambda line: ("bad", "note", "ok").index(line.level)):
        checked.add_row(line.level, line.what + (f": {line.advice}" if line.advice else ""))
    heading, meaning = Text(_heading(found) + "\n"), Text("\n" + sentence(found))
    return Group(heading, _measured(found.calibration), Text(), checked, meaning)


def sentence(found: Examination, *, elements: int = 14_728_266) -> str:
    """Predict the time of a dense allreduce, by default of VGG-16's parameters (Ok-Topk, Table 2)."""
    machine, ranks = found.calibration.machine, len(found.facts)
    if ranks == 1:
        return "One rank exchanges nothing; start the doctor with the ranks of your job."
    cost = allreduce(elements, ranks)
    seconds = cost.seconds(machine.alpha, machine.beta) + machine.gamma * cost.nbytes / 2
    return (
        f"{ranks} ranks at {_bandwidth(machine.beta)}, {format_seconds(machine.alpha)}: a dense "
        f"allreduce of {elements / 1e6:.1f} M parameters would take about {format_seconds(seconds)}. "
        "For sparse exchanges: sparsync plan --machine FILE, with the FILE of --json."
    )


def as_json(found: Examination) -> dict[str, Any]:
    """Return the findings as plain values for JSON; ``Machine.from_json`` reads the key "machine"."""
    first, *_ = found.facts
    return {
        **asdict(found.calibration),
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
    """Return a table of the measured numbers with their 95 % intervals."""
    machine, ends, rows = found.machine, found.intervals, []
    for name, what, write in (
        ("alpha", "a message's latency", format_seconds),
        ("distance", "of that, under way", format_seconds),
        ("beta", "a link's bandwidth, both ways", _bandwidth),
        ("turn", "waiting for others' work", format_seconds),
    ):
        if name in ends and (name != "distance" or machine.distance):
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
