"""What the ranks of the fault tests do; called in processes that ``fault_server`` has forked."""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sparsync.averaging import Wagma
from sparsync.averaging.base import Averager
from sparsync.averaging.schemes import SCHEMES, options_of
from sparsync.cli.lab import Seat, _run_command
from sparsync.errors import SparsyncError
from sparsync.feedback.reducer import Reducer
from sparsync.feedback.state import reducer_state
from sparsync.presets import resolve
from sparsync.testing.cases import digest
from sparsync.transports.communicator import Communicator
from sparsync.transports.driver import run
from sparsync.transports.process_group import connect_group
from sparsync.transports.sim import simulate
from sparsync.units import plan_units

from .fault_server import listeners
from .fault_watch import Moment, Watched

SIZES = {"a": 400, "b": 1, "c": 99}
STEPS = 4
DENSITY = 0.1
OPTIONS = {name: {"balance_trigger": 1.0} for name in ("oktopk", "oktopk-paper")}
MODEL = 64
ARRIVE = "arrive"  # before a step's average
Breakdown = tuple[int, Moment]  # a rank, and when it breaks down


def make_reducer(comm: Communicator, algorithm: str, scale: int = 1) -> Reducer:
    """Two units, so that they share k; xi is measured on every second step."""
    named = [(name, torch.zeros(scale * size)) for name, size in SIZES.items()]
    chosen = resolve(algorithm, **OPTIONS.get(algorithm, {}))
    return Reducer(comm, plan_units(named, 1600 * scale), chosen, DENSITY, xi_period=2)


def gradients(reducer: Reducer, step: int) -> list[torch.Tensor]:
    """Return what this rank adds: large in a place that moves, so that regions are out of balance."""
    comm = reducer.comm
    generator = torch.Generator().manual_seed(1000 * step + comm.rank)
    drawn = [torch.randn(unit.size, generator=generator) for unit in reducer.units]
    width = drawn[0].numel() // STEPS
    drawn[0][step * width : step * width + width // 2] *= 10
    return drawn


def breakdowns(program: Callable[[Watched], Any], ranks: int, turn: int) -> list[Breakdown]:
    """Return a victim and a moment for every phase of a program, as a simulated run has them.

    A phase's first operation, and one in its middle.  Of the steps in which a phase occurs it is the
    last: thresholds and residuals are there by then.  Victims take turns.
    """

    async def counted(comm: Communicator) -> dict[tuple[int, str], int]:
        watched = Watched(comm)
        await program(watched)
        return dict(watched.seen)

    seen = simulate(counted, ranks).results
    last = {phase: step for step, phase in sorted({place for of in seen for place in of})}
    found: list[Breakdown] = []
    for phase, step in last.items():
        for middle in (False, True):
            able = [r for r in range(ranks) if seen[r].get((step, phase), 0) > middle]
            if able:
                victim = able[(turn + len(found)) % len(able)]
                number = seen[victim][step, phase] // 2 if middle else 0
                found.append((victim, (step, phase, number)))
    return found


def breakdowns_of_preset(name: str, ranks: int) -> list[Breakdown]:
    async def program(comm: Watched) -> None:
        reducer = make_reducer(comm, name)
        for step in range(STEPS):
            await reducer.reduce(gradients(reducer, step))

    return breakdowns(program, ranks, len(name))


def breakdowns_of_scheme(name: str, ranks: int) -> list[Breakdown]:
    async def program(comm: Watched) -> None:
        averager, vector = make_averager(name), torch.zeros(MODEL)
        await averager.begin(comm, vector, 0)
        for step in range(STEPS):
            comm.ledger.begin_step(step)
            comm.note(ARRIVE)
            vector = await averager.average(comm, vector + comm.rank, step)
        comm.close()

    return breakdowns(program, ranks, len(name))


def make_averager(name: str) -> Averager:
    """A scheme that averages often."""
    often = {"period": 2, "sync_period": 2, "group_size": 2}
    return SCHEMES[name](**{k: v for k, v in often.items() if k in options_of(name)})


@dataclass(frozen=True)
class Seating:
    """Where a rank is, and what it is to suffer.

    Attributes:
        tell: sends something to the server at once; first of all the ports that are listened on.
        rank: this one of ``ranks``.
        port: of the store.
        transport: "zmq" or "torch".
        timeout: seconds that a wait may take.
        victim: the rank that breaks down, at ``moment``: of a communicator, or a step.
        how: the name of a signal that it sends itself, or the commands of iproute2 that it runs.
        seats: of a lab, by rank: namespace and address.
    """

    tell: Callable[[Any], Any]
    rank: int
    ranks: int
    port: int
    transport: str
    timeout: float
    victim: int = -1
    moment: Any = None
    how: Any = "SIGKILL"
    seats: Any = None

    def connect(self) -> Watched:
        """Join the group; the victim's communicator knows its moment."""
        store = dist.TCPStore("127.0.0.1", self.port, is_master=False, wait_for_workers=False)
        if self.seats:  # the store stays outside of the lab
            Seat(*self.seats[self.rank]).enter()
        dist.init_process_group(
            "gloo",
            store=store,
            rank=self.rank,
            world_size=self.ranks,
            timeout=timedelta(seconds=self.timeout),
        )
        comm = connect_group(transport=self.transport, timeout=self.timeout)
        self.tell(listening())
        store.set(f"seated {self.rank}", "")  # nobody breaks down while others connect
        store.wait([f"seated {rank}" for rank in range(self.ranks)])
        watched = isinstance(self.moment, list) and self.rank == self.victim
        return Watched(comm, tuple(self.moment) if watched else None, self.break_down)

    def break_down(self) -> None:
        """Suffer it."""
        if isinstance(self.how, str):
            os.kill(os.getpid(), getattr(signal, self.how))
        else:
            for command in self.how:
                _run_command(command, 10.0)


def listening() -> list[tuple[int, str]]:
    """Return the ports that this process listens on, and the inodes of the sockets."""
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # what looked is closed again
            links.append(str(entry.readlink()))
    inodes = {link[8:-1] for link in links if link.startswith("socket:")}
    return [(port, inode) for port, inode in listeners() if inode in inodes]


def reduce_steps(algorithm: str, scale: int = 1, **seating: Any) -> dict[str, Any]:
    """Reduce, step by step, while one rank breaks down."""
    comm = Seating(**seating).connect()
    reducer = make_reducer(comm, algorithm, scale)
    said: dict[str, Any] = {"error": None, "seconds": []}
    try:
        for step in range(
            STEPS + 1
        ):  # who needed nothing any more of the victim notices in the last
            before, said["step"] = reducer_state(reducer), step
            started = time.perf_counter()
            averages = run(reducer.reduce(gradients(reducer, step)))
            said["seconds"].append(time.perf_counter() - started)
        said["digest"] = [digest(average) for average in averages]
    except SparsyncError as error:
        said |= described(error)
        reducer.refuse()
        said["kept"] = equal(before, reducer_state(reducer))
    return said | ended(comm)


def average_steps(scheme: str, **seating: Any) -> dict[str, Any]:
    """Average, step by step, while one rank breaks down."""
    comm = Seating(**seating).connect()
    averager, vector = make_averager(scheme), torch.zeros(MODEL)
    said: dict[str, Any] = {"error": None, "step": 0}
    try:
        run(averager.begin(comm, vector, 0))
        for step in range(STEPS + 2):
            said["step"] = step
            comm.ledger.begin_step(step)
            comm.note(ARRIVE)
            vector = run(averager.average(comm, vector + comm.rank, step))
            time.sleep(0.05)  # an actor's messages come while its rank computes
    except SparsyncError as error:
        said |= described(error)
    return said | ended(comm)


def average_by_wagma(steps: int, deadline: float, **seating: Any) -> dict[str, Any]:
    """Average without waiting for late ranks, while one breaks down before it steps."""
    seat = Seating(**seating)
    comm = seat.connect()
    model = torch.nn.Linear(8, 4)
    torch.nn.init.zeros_(model.weight)
    averager = Wagma(model, comm=comm, sync_period=5, deadline=deadline)
    own = 0
    while averager.steps < steps:
        if seat.rank == seat.victim and averager.steps == seat.moment:
            seat.break_down()
        time.sleep(0.1)
        with torch.no_grad():
            model.weight += seat.rank
        averager.step()
        own += 1
    averager.finish()
    store = dist.distributed_c10d._get_default_store()
    store.set(f"finished {seat.rank}", "")  # who ends may take back what others have not read
    alive = set(range(seat.ranks)) - ({seat.victim} if seat.how == "SIGKILL" else set())
    store.wait([f"finished {rank}" for rank in alive])
    left_out = [entry[0] for entry in averager.left_out]
    return {"own": own, "left out": left_out, "weights": model.weight.sum().item()}


def ended(comm: Communicator) -> dict[str, Any]:
    """Close; return the threads that are left."""
    comm.close()
    return {"threads": [t.name for t in threading.enumerate() if t is not threading.main_thread()]}


def described(error: BaseException) -> dict[str, str]:
    return {"error": type(error).__name__, "text": str(error)}


def equal(a: Any, b: Any) -> bool:
    """Compare two saved states, bit for bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)
