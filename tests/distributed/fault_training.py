"""Training that fails: a disk is full, a model raises, a rank dies while it saves.

The programs are called in processes that ``fault_server`` has forked; as a script, this is a rank of a
job as users write it, whose error nobody catches.
"""

import os
import resource
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # takes seconds, and DDP imports it when it is first used: here once for all forks
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync.checkpoint import files
from sparsync.errors import SparsyncError
from tests.attaching import attach

from .fault_programs import Seating, described, ended, equal
from .small_model import flat, model, train

AT = 2  # step at which something happens


class Raises(torch.nn.Module):
    """Raises an error on its way forward or backward, once it is told to."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner, self.when = inner, ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.when == "forward":
            raise ValueError("the model failed going forward")
        y = self.inner(x)
        if self.when == "backward":
            y.register_hook(self._fail)
        return y

    def _fail(self, gradient: torch.Tensor) -> None:
        raise ValueError("the model failed going backward")


def model_raises(when: str, **seating: Any) -> dict[str, Any]:
    """Train; the model of one rank raises an error."""
    seat = Seating(**seating)
    comm = seat.connect()
    net = Raises(model())
    ddp = DistributedDataParallel(net)
    sync = attach(ddp, "budgeted", density=0.1, transport=seat.transport, timeout=seat.timeout)
    said: dict[str, Any] = {"error": None}
    try:
        for step in range(2 * AT):
            if step == AT and seat.rank == seat.victim:
                net.when = when
            before = sync.state_dict()
            train(ddp, range(step, step + 1))
    except (ValueError, SparsyncError) as error:
        said |= described(error)
        said["kept"] = equal(before, sync.state_dict())
    sync.close()
    return said | ended(comm)


# ---- checkpoints ----------------------------------------------------------------------------------


def full_disk(folder: str, means: str, **seating: Any) -> dict[str, Any]:
    """Save; fill the disk of one rank; fail to save; train on; make room, and save again."""
    seat = Seating(**seating)
    comm = seat.connect()
    ddp = DistributedDataParallel(model())
    sync = attach(ddp, density=0.1, transport=seat.transport, timeout=seat.timeout)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    shared = {"model": ddp.module, "optimizer": optimizer}
    train(ddp, range(AT), optimizer)
    sparsync.save(sync, folder, **shared)
    saved = flat(ddp)
    train(ddp, range(AT, 2 * AT), optimizer)
    fill(Path(folder), means, seat.rank == seat.victim)
    dist.barrier()
    started = time.monotonic()
    try:
        sparsync.save(sync, folder, **shared)
        said: dict[str, Any] = {"error": None}
    except SparsyncError as error:
        said = described(error)
    said["seconds"] = time.monotonic() - started
    dist.barrier()  # every rank has taken its files back
    said["files"] = sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*.pt*"))
    train(ddp, range(2 * AT, 3 * AT), optimizer)
    reached = flat(ddp)
    sparsync.load(sync, folder, **shared)
    said["loaded"] = torch.equal(flat(ddp), saved)
    train(ddp, range(AT, 3 * AT), optimizer)
    said["as before"] = torch.equal(flat(ddp), reached)
    make_room(Path(folder), means, seat.rank == seat.victim)
    dist.barrier()
    said["saved again"] = sparsync.save(sync, folder, **shared).name
    sync.close()
    return said | ended(comm)


def fill(folder: Path, means: str, here: bool) -> None:
    """Leave no room: on the file system itself, or for this user's files."""
    if here and means == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    elif here:
        with (folder / "filler").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                return


def make_room(folder: Path, means: str, here: bool) -> None:
    if here and means == "limit":
        unlimited = resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))
    elif here:
        (folder / "filler").unlink()


def killed_while_saving(folder: str, **seating: Any) -> dict[str, Any]:
    """Save; train; save, while one rank is killed when its file is written and not yet in place."""
    seat = Seating(**seating)
    comm = seat.connect()
    ddp = DistributedDataParallel(model())
    sync = attach(ddp, density=0.1, transport=seat.transport, timeout=seat.timeout)
    train(ddp, range(AT))
    sparsync.save(sync, folder, model=ddp.module)
    train(ddp, range(AT, 2 * AT))
    if seat.rank == seat.victim:
        files.os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    said: dict[str, Any] = {"error": None}
    try:
        sparsync.save(sync, folder, model=ddp.module)
    except SparsyncError as error:
        said |= described(error)
    sync.close()
    return said | ended(comm)


def resume(folder: str, **seating: Any) -> dict[str, Any]:
    """Load what the last job has left, and compare it with a run that nobody has killed."""
    seat = Seating(**seating)
    comm = seat.connect()
    ends = []
    for loads in (False, True):
        ddp = DistributedDataParallel(model(seed=loads))
        sync = attach(ddp, density=0.1, transport=seat.transport, timeout=seat.timeout)
        if loads:
            sparsync.load(sync, folder, model=ddp.module)
        else:
            train(ddp, range(AT))
        steps = sync.stats()["steps"]
        train(ddp, range(AT, 2 * AT))
        ends.append(flat(ddp))
        sync.close()
    return {"steps": steps, "as if": torch.equal(*ends)} | ended(comm)


# ---- a script -------------------------------------------------------------------------------------


def script(when: str, at: int) -> None:
    """Train like a user: ``when`` the model of rank 1 raises, or "never"; for ever, if it does not."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    net = Raises(model())
    ddp = DistributedDataParallel(net)
    attach(ddp, density=0.1, timeout=20)
    for step in range(10_000_000):
        if step == at:
            sys.stdout.write(f"rank {dist.get_rank()} at step {step}\n")
            sys.stdout.flush()
            net.when = when if dist.get_rank() == 1 else ""
        train(ddp, range(step, step + 1))


if __name__ == "__main__":
    script(sys.argv[1], AT)
