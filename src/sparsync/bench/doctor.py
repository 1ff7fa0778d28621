"""The command ``sparsync doctor``: whether a job's network and software are sound, and how fast."""

from __future__ import annotations

import json as json_module
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from sparsync.bench.connection import TRANSPORTS, Connection, transport_of
from sparsync.bench.doctor_checks import Check, check_facts, check_links
from sparsync.bench.doctor_facts import gather_facts, local_facts
from sparsync.bench.doctor_page import Examination, as_json, page
from sparsync.bench.launch import launch, launched_ranks, leads
from sparsync.bench.report import check_writable
from sparsync.bench.shaped import check_rate, privileged, shaped
from sparsync.collectives.equality import check_equal_parameters
from sparsync.errors import ConfigurationError, PeerError
from sparsync.planning.calibrate import calibrate
from sparsync.transports.base import Communicator, check_timeout, run
from sparsync.transports.torch import TorchCommunicator

__all__ = ["DoctorSettings", "command", "doctor", "examine"]

_Ranks = Annotated[
    int | None, typer.Option(help="Local processes.", show_default="4, or the launcher's")
]
_Transport = Annotated[
    str, typer.Option(help="torch (gloo), zmq, mpi (by mpiexec); auto: the library's default.")
]
_Lab = Annotated[
    str | None,
    typer.Option(help="Put every rank behind a real link of this rate, as 1gbit (Linux)."),
]
_Seconds = Annotated[float, typer.Option(help="About how long to measure.")]
_Timeout = Annotated[float, typer.Option(help="Seconds that a rank waits for another.")]
_Hosts = Annotated[bool, typer.Option("--hosts", help="Name the hosts in the report.")]
_Json = Annotated[
    Path | None, typer.Option(help="Write all of it here, for sparsync plan --machine.")
]


@dataclass(frozen=True)
class DoctorSettings:
    """What is examined, checked before anything starts.

    Attributes:
        ranks: world size P.
        transport: "torch", "zmq", "mpi", or "auto".
        lab: rate of a real, shaped network on this machine, as "1gbit".
        seconds: of measuring, about.
        timeout: seconds that a rank waits for another.
        hosts: name them.
    """

    ranks: int = 4
    transport: str = "auto"
    lab: str | None = None
    seconds: float = 3.0
    timeout: float = 60.0
    hosts: bool = False

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ConfigurationError(f"ranks is {self.ranks}; give at least 1")
        if not 0 < self.seconds <= self.timeout:
            raise ConfigurationError(
                f"seconds is {self.seconds:g}; give some > 0 and at most --timeout, {self.timeout:g}"
            )
        if self.transport == "sim":
            raise ConfigurationError(
                f"--transport sim has no links to measure; choose {', '.join(TRANSPORTS)}"
            )
        if self.lab is not None:
            check_rate(self.lab)
            if self.transport == "mpi":
                raise ConfigurationError(
                    "--lab and --transport mpi do not go together: MPI's ranks of one machine "
                    "share memory and pass the links by; choose --transport zmq or torch"
                )
        check_timeout(self.timeout)
        self.connection()

    def connection(self) -> Connection:
        """How the ranks are connected."""
        return Connection(self.transport, self.timeout)


def command(
    ranks: _Ranks = None,
    transport: _Transport = "auto",
    lab: _Lab = None,
    seconds: _Seconds = 3.0,
    timeout: _Timeout = 60.0,
    hosts: _Hosts = False,
    json: _Json = None,
) -> None:
    """Measure the links and the ranks of a job, and check its software; a few seconds.

    Starts local ranks, or joins those of torchrun, mpiexec or srun.  The page names no host and no
    address, so it can go into a bug report.  Ends with 1 if anything is bad.
    """
    ranks = launched_ranks(DoctorSettings.ranks) if ranks is None else ranks
    settings = DoctorSettings(ranks, transport, lab, seconds, timeout, hosts)
    if json is not None and leads():
        check_writable(json)
    privileged(lab)
    found = doctor(settings)
    if found is None:
        return
    Console().print(page(found), highlight=False)
    if json is not None:
        written = json_module.dumps(as_json(found), indent=1, allow_nan=False)
        json.write_text(written + "\n", encoding="utf-8")
    if not found.healthy:
        raise typer.Exit(1)


def doctor(settings: DoctorSettings) -> Examination | None:
    """Examine a group; None on the other ranks of a launcher."""
    console = Console(stderr=True)
    quiet = not leads() or not console.is_terminal
    columns = TextColumn("{task.description}"), TimeElapsedColumn()
    with (
        shaped(settings.lab, settings.ranks) as network,
        Progress(*columns, console=console, transient=True, disable=quiet) as bar,
    ):
        about = settings.seconds + 3  # to start (ours)
        bar.add_task(f"examining {settings.ranks} rank(s), about {about:.0f} s", total=None)
        found: Examination | None = launch(
            examine,
            settings.ranks,
            settings,
            timeout=settings.timeout,
            mpi=settings.transport == "mpi",
            **network.options,
        )
    return found


def examine(settings: DoctorSettings) -> Examination:
    """Be one rank of the examined group; all return the same.

    Raises:
        PeerError: ranks run different versions of sparsync.
    """
    mine = local_facts(settings.transport, hosts=settings.hosts)
    facts = run(gather_facts(TorchCommunicator(timeout=settings.timeout), mine))
    with settings.connection().open("doctor") as comm:
        transport = transport_of(comm)
        checks = [*check_facts(facts), _check_start(comm)]
        calibration = run(calibrate(comm, seconds=settings.seconds))
        checks += check_links(calibration, [f.wall for f in facts])
    return Examination(transport, settings.lab, tuple(facts), calibration, tuple(checks))


def _check_start(comm: Communicator) -> Check:
    """See whether models of one seed start equal on all ranks."""
    draw = torch.Generator().manual_seed(0)
    weight = torch.nn.init.xavier_normal_(torch.empty(64, 64), generator=draw)
    try:
        run(check_equal_parameters(comm, [("of a layer with seed 0", weight)]))
    except PeerError:
        what = "one seed gives ranks different parameters"
        return Check("bad", what, "send rank 0's to all before the first step, as DDP does")
    return Check("ok", "one seed gives all ranks the same parameters")
