"""Programs for the ranks of the fault tests; as a script, this file is a rank of a user's job."""

import os
import resource
import signal
import sys
import time
from contextlib import suppress
from datetime import timedelta

import torch
import torch._dynamo  # DDP imports this on first use, in seconds; importing it here serves all forks
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync.averaging.schemes import SCHEMES, options_of
from sparsync.checkpoint import files
from sparsync.errors import SparsyncError
from sparsync.feedback.reducer import Reducer
from sparsync.feedback.reducer_state import reducer_state
from sparsync.presets import resolve
from sparsync.published.wagma import Wagma
from sparsync.testing.cases import digest
from sparsync.transports.communicator import Communicator
from sparsync.transports.driver import run
from sparsync.transports.sim import simulate
from sparsync.units import plan_units
from tests.attaching import attach

from .fault_jobs import Watched
from .small_model import flat, model, train

SIZES = {"a": 400, "b": 1, "c": 99}
STEPS = 4
DENSITY = 0.1
OPTIONS = {name: {"balance_trigger": 1.0} for name in ("oktopk", "oktopk-paper")}
MODEL = 64
ARRIVE = "arrive"  # before a step's average


def described(error):
    return {"error": type(error).__name__, "text": str(error)}


def equal(a, b):
    """Compare two saved states, bit for bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


# ---- reducing and averaging -----------------------------------------------------------------------


def make_reducer(comm, algorithm, scale=1):
    """Make a reducer of two units, which share k; xi is measured on every second step."""
    named = [(name, torch.zeros(scale * size)) for name, size in SIZES.items()]
    chosen = resolve(algorithm, **OPTIONS.get(algorithm, {}))
    return Reducer(comm, plan_units(named, 1600 * scale), chosen, DENSITY, xi_period=2)


def gradients(reducer, step):
    """Return this rank's gradient, whose large entries move, so that regions get out of balance."""
    generator = torch.Generator().manual_seed(1000 * step + reducer.comm.rank)
    drawn = [torch.randn(unit.size, generator=generator) for unit in reducer.units]
    width = drawn[0].numel() // STEPS
    drawn[0][step * width : step * width + width // 2] *= 10
    return drawn


def make_averager(name):
    """A scheme that averages often."""
    often = {"period": 2, "sync_period": 2, "group_size": 2}
    return SCHEMES[name](**{k: v for k, v in often.items() if k in options_of(name)})


def breakdowns(program, ranks, turn):
    """Return a victim and two moments for every phase of a program, found in a simulated run.

    The moments are the first operation of a phase and one in its middle, in the last step with this
    phase, when thresholds and residuals exist. Victims take turns.
    """

    async def counted(comm):
        watched = Watched(comm)
        await program(watched)
        return dict(watched.seen)

    seen = simulate(counted, ranks).results
    last = {phase: step for step, phase in sorted({place for of in seen for place in of})}
    found = []
    for phase, step in last.items():
        for middle in (False, True):
            able = [r for r in range(ranks) if seen[r].get((step, phase), 0) > middle]
            if able:
                victim = able[(turn + len(found)) % len(able)]
                number = seen[victim][step, phase] // 2 if middle else 0
                found.append((victim, (step, phase, number)))
    return found


def breakdowns_of_preset(name, ranks):
    async def program(comm):
        reducer = make_reducer(comm, name)
        for step in range(STEPS):
            await reducer.reduce(gradients(reducer, step))

    return breakdowns(program, ranks, len(name))


def breakdowns_of_scheme(name, ranks):
    async def program(comm):
        averager, vector = make_averager(name), torch.zeros(MODEL)
        await averager.begin(comm, vector, 0)
        for step in range(STEPS):
            comm.ledger.begin_step(step)
            comm.note(ARRIVE)
            vector = await averager.average(comm, vector + comm.rank, step)
        comm.close()

    return breakdowns(program, ranks, len(name))


def reduce_steps(member, algorithm, scale=1):
    """Reduce, step by step, while one rank fails."""
    comm = member.connect()
    reducer = make_reducer(comm, algorithm, scale)
    said = {"error": None, "seconds": []}
    try:
        # ranks that needed no more messages from the victim notice its failure in the last step
        for step in range(STEPS + 1):
            before, started = reducer_state(reducer), time.perf_counter()
            averages = run(reducer.reduce(gradients(reducer, step)))
            said["seconds"].append(time.perf_counter() - started)
        said["digest"] = [digest(average) for average in averages]
    except SparsyncError as error:
        said |= described(error)
        reducer.refuse()
        said["kept"] = equal(before, reducer_state(reducer))
    comm.close()
    return said


def average_steps(member, scheme):
    """Average, step by step, while one rank fails."""
    comm = member.connect()
    averager, vector = make_averager(scheme), torch.zeros(MODEL)
    said = {"error": None, "step": 0}
    try:
        run(averager.begin(comm, vector, 0))
        for step in range(STEPS + 2):
            said["step"] = step
            comm.ledger.begin_step(step)
            comm.note(ARRIVE)
            vector = run(averager.average(comm, vector + comm.rank, step))
            time.sleep(0.05)  # an actor's messages arrive while its rank computes
    except SparsyncError as error:
        said |= described(error)
    comm.close()
    return said


def average_by_wagma(member, steps, deadline):
    """Average without waiting for late ranks, while one rank fails before its step."""
    comm, fault = member.connect(), member.fault
    net = torch.nn.Linear(8, 4)
    torch.nn.init.zeros_(net.weight)
    averager = Wagma(net, comm=comm, sync_period=5, deadline=deadline)
    own = 0
    while averager.steps < steps:
        if member.is_victim and averager.steps == fault.moment:
            member.break_down()
        time.sleep(0.1)
        with torch.no_grad():
            net.weight += member.rank
        averager.step()
        own += 1
    averager.finish()
    alive = set(range(member.ranks)) - ({fault.victim} if fault.how == "SIGKILL" else set())
    store = dist.distributed_c10d._get_default_store()
    # a rank that ends may take with it messages that others have not read
    member.meet(store, "finished", alive)
    comm.close()
    left_out = [entry[0] for entry in averager.left_out]
    return {"own": own, "left out": left_out, "weights": net.weight.sum().item()}


# ---- training -------------------------------------------------------------------------------------

AT = 2  # step at which something happens


class Raises(torch.nn.Module):
    """A module that raises an error in its forward or backward pass once it is told to."""

    def __init__(self):
        super().__init__()
        self.inner, self.when = model(), ""

    def forward(self, x):
        if self.when == "forward":
            raise ValueError("the model failed going forward")
        y = self.inner(x)
        if self.when == "backward":
            y.register_hook(self._fail)
        return y

    def _fail(self, gradient):
        raise ValueError("the model failed going backward")


def attached(fault, net):
    """Return a model under DDP, and its handle."""
    ddp = DistributedDataParallel(net)
    return ddp, attach(ddp, density=0.1, transport=fault.transport, timeout=fault.timeout)


def model_raises(member, when):
    """Train; the model of one rank raises an error."""
    member.join()
    ddp, sync = attached(member.fault, Raises())
    said = {"error": None}
    try:
        for step in range(2 * AT):
            if step == AT and member.is_victim:
                ddp.module.when = when
            before = sync.state_dict()
            train(ddp, range(step, step + 1))
    except (ValueError, SparsyncError) as error:
        said = {**described(error), "kept": equal(before, sync.state_dict())}
    sync.close()
    return said


def killed_while_exchanging(member):
    """Train with AdamW; one rank is killed after sending its updates to one of the others."""
    member.join()
    optimizer = torch.optim.AdamW((net := model()).parameters(), lr=0.1)
    transport = sparsync.Transport(member.fault.transport, member.fault.timeout)
    # the first steps exchange every time
    sync = sparsync.attach(net, optimizer, transport=transport)
    train(net, range(2 * AT + 1), optimizer)
    comm = type(sync.reducer.comm)
    comm.alltoallv, send = Communicator.alltoallv, comm.start_send

    def last(*given):
        send(*given)
        time.sleep(0.2)  # for ZeroMQ's thread
        member.break_down()

    comm.start_send = last if member.is_victim else send
    before = sync.state_dict()["content"]
    try:
        train(net, range(2 * AT + 1, 2 * AT + 2), optimizer)
        return {"error": None}
    except SparsyncError as error:
        after = sync.state_dict()["content"]
        own = {"steps", "sent", "parameters", "moments", "noise"}  # the last step's are new
        kept = before.keys() - own
        sync.close()
        return {**described(error), "kept": all(equal(before[key], after[key]) for key in kept)}


def full_disk(member, folder, means):
    """Save, fail to save once one rank's disk is full, continue, and save again once it is freed."""
    member.join()
    ddp, sync = attached(member.fault, model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    shared = {"model": ddp.module, "optimizer": optimizer}
    train(ddp, range(AT), optimizer)
    sparsync.save(sync, folder, **shared)
    saved = flat(ddp)
    train(ddp, range(AT, 2 * AT), optimizer)
    if member.is_victim:
        fill(folder, means)
    dist.barrier()
    started = time.monotonic()
    try:
        sparsync.save(sync, folder, **shared)
        said = {"error": None}
    except SparsyncError as error:
        said = described(error)
    said["seconds"] = time.monotonic() - started
    dist.barrier()  # every rank has removed its files
    said["files"] = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.pt*"))
    train(ddp, range(2 * AT, 3 * AT), optimizer)
    reached = flat(ddp)
    sparsync.load(sync, folder, **shared)
    said["loaded"] = torch.equal(flat(ddp), saved)
    train(ddp, range(AT, 3 * AT), optimizer)
    said["as before"] = torch.equal(flat(ddp), reached)
    if member.is_victim:
        make_room(folder, means)
    dist.barrier()
    said["saved again"] = sparsync.save(sync, folder, **shared).name
    sync.close()
    return said


def fill(folder, means):
    """Leave no space on the file system, or let this process write no more to its files."""
    if means == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        return
    with (folder / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


def make_room(folder, means):
    if means == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    else:
        (folder / "filler").unlink()


def killed_while_saving(member, folder):
    """Save, train, save again; one rank is killed after writing its file and before moving it."""
    member.join()
    ddp, sync = attached(member.fault, model())
    train(ddp, range(AT))
    sparsync.save(sync, folder, model=ddp.module)
    train(ddp, range(AT, 2 * AT))
    if member.is_victim:
        files.os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    said = {"error": None}
    try:
        sparsync.save(sync, folder, model=ddp.module)
    except SparsyncError as error:
        said = described(error)
    sync.close()
    return said


def resume(member, folder):
    """Load the files that the last job has left, and compare the result with an undisturbed run."""
    member.join()
    ends = []
    for loads in (False, True):
        ddp, sync = attached(member.fault, model(seed=loads))
        if loads:
            sparsync.load(sync, folder, model=ddp.module)
        else:
            train(ddp, range(AT))
        steps = sync.stats()["exchanges"]
        train(ddp, range(AT, 2 * AT))
        ends.append(flat(ddp))
        sync.close()
    return {"steps": steps, "as if": torch.equal(*ends)}


def script(when):
    """Train like a user; rank 1's model raises at the moment ``when``, which may be "never"."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    ddp = DistributedDataParallel(Raises())
    attach(ddp, density=0.1, timeout=20)
    for step in range(10_000_000):
        if step == AT:
            sys.stdout.write(f"rank {dist.get_rank()} at step {step}\n")
            sys.stdout.flush()
            ddp.module.when = when if dist.get_rank() == 1 else ""
        train(ddp, range(step, step + 1))


if __name__ == "__main__":
    script(sys.argv[1])
