"""The command ``sparsync doctor``: whether a job's network and software are sound, and how fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from typer import Option

from sparsync.cli.doctor.checks import Check, check_facts, check_links
from sparsync.cli.doctor.facts import Facts, check_versions, local_facts
from sparsync.cli.doctor.page import Examination, as_json, page
from sparsync.cli.launch import gather, leads
from sparsync.cli.network import TRANSPORTS, Connection, transport_of
from sparsync.cli.options import Json, Lab, Timeout, Transport, check_at_least, ranks_option, takes
from sparsync.cli.output import check_outputs, progress, write_json
from sparsync.cost.calibrate import calibrate
from sparsync.errors import ConfigurationError, PeerError
from sparsync.transports.agree import check_equal_parameters
from sparsync.transports.communicator import Communicator
from sparsync.transports.driver import run

__all__ = ["DoctorSettings", "command", "doctor", "examine"]


@dataclass(frozen=True)
class DoctorSettings:
    """Settings of an examination, checked before anything starts; every field is an option."""

    ranks: Annotated[int, ranks_option(4)] = 4
    transport: Transport = "auto"
    lab: Lab = None
    seconds: Annotated[float, Option(help="About how long to measure.")] = 3.0
    timeout: Timeout = 60.0
    hosts: Annotated[bool, Option("--hosts", help="Name the hosts in the report.")] = False

    def __post_init__(self) -> None:
        check_at_least(self, 1, "ranks")
        if not 0 < self.seconds <= self.timeout:
            raise ConfigurationError(
                f"seconds is {self.seconds:g}; give some > 0 and at most --timeout, {self.timeout:g}"
            )
        if self.transport == "sim":
            raise ConfigurationError(
                f"--transport sim has no links to measure; choose {', '.join(TRANSPORTS)}"
            )
        self.connection()

    def connection(self) -> Connection:
        """Return how the ranks are connected."""
        return Connection(self.transport, self.timeout, lab=self.lab)


@takes(DoctorSettings)
def command(*, json: Json = None, **fields: Any) -> None:
    """Measure the links and the ranks of a job, and check its software; a few seconds.

    Starts local ranks, or joins those of torchrun, mpiexec or srun.  The page names no host and no
    address, so it can go into a bug report; --json is for sparsync plan --machine.  Ends with 1 if
    anything is bad.
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
    """Examine a group; None on the other ranks of a launcher."""
    about = settings.seconds + 3  # to start the ranks
    text = f"examining {settings.ranks} rank(s), about {about:.0f} s"
    with progress(shown=leads()) as row, row(text):
        found: Examination | None = settings.connection().start(examine, settings.ranks, settings)
    return found


def examine(settings: DoctorSettings) -> Examination:
    """Be one rank of the examined group; all return the same.

    Raises:
        PeerError: ranks run different versions of sparsync.
    """
    mine = local_facts(settings.transport, hosts=settings.hosts)
    facts = gather(mine, [Facts])
    check_versions(facts)
    with settings.connection().open("doctor") as comm:
        transport = transport_of(comm)
        checks = [*check_facts(facts), _check_start(comm)]
        calibration = run(calibrate(comm, seconds=settings.seconds))
        checks += check_links(calibration, [f.wall for f in facts])
    return Examination(transport, settings.lab, tuple(facts), calibration, tuple(checks))


def _check_start(comm: Communicator) -> Check:
    """Check that models of one seed start equal on all ranks."""
    draw = torch.Generator().manual_seed(0)
    weight = torch.nn.init.xavier_normal_(torch.empty(64, 64), generator=draw)
    try:
        run(check_equal_parameters(comm, [("of a layer with seed 0", weight)]))
    except PeerError:
        found = "one seed gives ranks different parameters"
        return Check("bad", found, "send rank 0's to all before the first step, as DDP does")
    return Check("ok", "one seed gives all ranks the same parameters")
