"""What the ranks of the MPI tests run; importable, because ``mpiexec`` starts them."""

import os
import runpy
import sys
import time

import torch
import torch.distributed as dist

import sparsync
from sparsync import CommunicationError, ConfigurationError, testing
from sparsync.averaging import Wagma
from sparsync.transports.connect import connect_group
from sparsync.transports.driver import Engine, run
from sparsync.transports.ledger import Raw
from sparsync.transports.mpi import MpiCommunicator
from tests.contracts.table import ALGORITHMS, exercise

from .call_programs import calls

RAW = Raw("value")
FIRST_POINT_TO_POINT = 32  # channels below have a native allreduce


def averaged() -> list[float]:
    """Train with wait-avoiding averages while rank 0 is late at times; return all ranks' models."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    with MpiCommunicator(timeout=60) as comm:
        averager = Wagma(model, comm=comm, sync_period=4)
        for step in range(10):
            time.sleep(0.05 if comm.rank == 0 and step in (1, 5) else 0.0)
            with torch.no_grad():
                model.weight += comm.rank
            averager.step()
        averager.finish()
        weight = model.weight.detach().sum().reshape(1)
        return [float(one) for one in run(comm.allgather(weight, "verify"))]


def everything(names: list[str], algorithms: list[str]) -> dict:
    """Run the contracts and the rest on one set of ranks: starting them is what takes long."""
    with MpiCommunicator(timeout=60) as comm:
        for channel in (0, 5, FIRST_POINT_TO_POINT):
            run(testing.exercise_communicator(comm.channel(channel)))
        run(exercise(comm, "dense"))
        digests = {n: run(testing.exercise_algorithm(comm, ALGORITHMS[n])) for n in algorithms}
        result = {"in flight": many_in_flight(comm), "numbers": numbers(comm), **rows(names)}
    result["digests"].update(digests)
    result["averaged"] = averaged()
    result["calls"] = calls("mpi")
    result["part"] = everywhere(part_of_the_ranks())
    result["errors"] = errors()
    dist.barrier()
    return result


def rows(names: list[str]) -> dict[str, dict]:
    """Run each collective's cases on a communicator of its own; return digests and traffic."""
    digests, booked = {}, {}
    for name in names:
        with sparsync.connect(transport="mpi", timeout=60) as comm:
            assert type(comm) is MpiCommunicator
            digests[name] = run(exercise(comm, name))
            total = comm.ledger.total()
        sizes = [total.sent, total.received, total.messages_sent, total.messages_received]
        booked[name] = sizes
    return {"digests": digests, "booked": booked}


def many_in_flight(comm: MpiCommunicator) -> bool:
    """Channels at once, started late by some ranks: native allreduces between messages."""

    async def program(channel: MpiCommunicator, number: int) -> list[int]:
        seen = []
        for turn in range(3):
            mine = torch.tensor([10 * number + turn + comm.rank])
            seen.append(int(await channel.allreduce(mine, "flight")))
            gathered = await channel.allgather(mine, "flight")
            seen.append(sum(int(t) for t in gathered))
            payloads = [torch.full((50_000,), number, dtype=torch.uint8)] * comm.world_size
            sizes = [50_000] * comm.world_size
            for message in await channel.alltoallv(payloads, sizes, "flight", RAW):
                assert bool((message == number).all())
        return seen

    engine, channels = Engine("flight"), [0, 1, 2, FIRST_POINT_TO_POINT, 3]
    jobs = []
    for channel in channels:
        time.sleep(0.01 * comm.rank)  # so every rank sees another mixture of what is there
        jobs.append(engine.submit(program(comm.channel(channel), channel)))
    ends = [job.result(timeout=60) for job in jobs]
    engine.close()
    ranks = sum(range(comm.world_size))
    wanted = [
        [comm.world_size * (10 * c + turn) + ranks for turn in range(3) for _ in range(2)]
        for c in channels
    ]
    return ends == wanted


def numbers(comm: MpiCommunicator) -> dict[str, bool]:
    """Allreduce of every dtype, native or not; NaN is not lost."""
    sums = {}
    for dtype in (torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int16):
        summed = run(comm.allreduce(torch.tensor([comm.rank, 2]).to(dtype), "numbers"))
        sums[str(dtype)] = summed.tolist() == [sum(range(comm.world_size)), 2 * comm.world_size]
    strange = torch.tensor([float("nan") if comm.rank == 1 else 1.0])
    for op in ("max", "min", "sum"):
        sums[f"nan {op}"] = bool(run(comm.allreduce(strange, "numbers", op)).isnan().all())
    # a matrix that is not contiguous keeps its shape
    turned = torch.arange(6).view(2, 3).T
    summed = run(comm.allreduce(turned, "numbers"))
    sums["shape"] = torch.equal(summed, comm.world_size * turned)
    return sums


def part_of_the_ranks() -> bool:
    """Connect a process group of some ranks."""
    members = [dist.get_world_size() - 1, 1]
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return True
    with connect_group(group, transport="mpi", timeout=30) as comm:
        seen = run(comm.allgather(torch.tensor([dist.get_rank()]), "part"))
    return [int(t) for t in seen] == sorted(members)  # torch sorts


def errors() -> dict[str, str]:
    """What goes wrong on rank 0; the others help."""
    said = {}
    comm = MpiCommunicator(timeout=0.5)
    comm.ledger.begin_step(4)
    if comm.rank == 0:
        said["silent"] = message_of(lambda: comm.irecv(1, 10, "split", RAW).wait())
    for name, length in (("longer", 11), ("shorter", 9)):
        dist.barrier()
        channel = comm.channel(len(name))
        if comm.rank == 1:
            channel.isend(torch.zeros(length, dtype=torch.uint8), 0, "split", RAW).wait()
        elif comm.rank == 0:
            said[name] = message_of(lambda c=channel: c.irecv(1, 10, "split", RAW).wait())
    if comm.rank == 0:
        said["alone"] = message_of(lambda: run(comm.allreduce(torch.tensor([1]), "sizes")))
    said["tag"] = message_of(lambda: comm.channel(2**40))
    dist.barrier()
    comm.close()
    comm.close()
    said["closed"] = message_of(lambda: run(comm.barrier()))
    said["comm"] = message_of(lambda: MpiCommunicator(3))
    return said


def everywhere(true: bool) -> bool:
    """Tell whether it is true on all ranks."""
    least = torch.tensor([int(true)])
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return bool(least)


def message_of(call) -> str:
    try:
        call()
    except (CommunicationError, ConfigurationError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def one_rank_refuses(rank_that_refuses: int) -> None:
    """Let one rank fail; the others wait for it in MPI."""
    comm = MpiCommunicator(timeout=2.0)
    if comm.rank == rank_that_refuses:
        raise ConfigurationError("this one does not want to")
    run(comm.barrier())


def one_rank_dies(rank_that_dies: int) -> None:
    """Let one rank vanish without a word."""
    comm = MpiCommunicator(timeout=30.0)
    if comm.rank == rank_that_dies:
        os._exit(7)
    run(comm.barrier())


def without_torch_distributed() -> None:
    """Sum arrays under mpiexec alone."""
    comm = sparsync.connect(transport="mpi", timeout=60)
    mine = torch.zeros(10)
    mine[comm.rank] = comm.rank + 1.0
    total = sparsync.allreduce(mine, comm, "allgather", k=1).total.to_dense()
    assert total.tolist() == [r + 1.0 if r < comm.world_size else 0.0 for r in range(10)]
    comm.close()


if __name__ == "__main__":  # as a user's script: first arrays, then the example that is named
    without_torch_distributed()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
