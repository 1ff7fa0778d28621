"""Test the MPI transport between real processes of ``mpiexec``."""

import importlib.util
import json
import os
import re
import runpy
import sys
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

import sparsync
from sparsync import ConfigurationError, testing
from sparsync.cli.bench.command import BenchSettings
from sparsync.cli.launch import RankError, launch, mpiexec_command
from sparsync.errors import DeadlineError, PeerError
from sparsync.published.wagma import Wagma
from sparsync.transports.driver import Engine, run
from sparsync.transports.ledger import Raw
from sparsync.transports.mpi import MpiCommunicator
from sparsync.transports.process_group import connect_group
from sparsync.transports.sim import simulate
from tests.contracts.table import CALLS, OTHERS, exercise
from tests.on_ranks import gathered, on_ranks, refused

from .commands import end, run_well, start
from .test_transports import check_calls, check_row, whole_steps

RANKS = 4
RAW = Raw("value")


def missing() -> str:
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed: pip install 'sparsync[mpi]'"
    try:
        mpiexec_command(1)
    except ConfigurationError as error:
        return str(error)
    return ""


pytestmark = [pytest.mark.gloo, pytest.mark.skipif(bool(missing()), reason=missing())]


def test_the_lab_refuses_mpi():
    with pytest.raises(ConfigurationError, match="shared memory and bypass the lab's links"):
        BenchSettings(transport="mpi", lab="1gbit")


@on_ranks(RANKS, mpi=True)
@pytest.mark.fast(2)
@pytest.mark.parametrize(
    "name", [*CALLS, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_mpi_equals_the_simulator_bit_for_bit_and_in_its_books(name):
    async def program(comm):
        digests = await exercise(comm, name)
        total = comm.ledger.total()
        sizes = [total.sent, total.received, total.messages_sent, total.messages_received]
        return digests, sizes

    with sparsync.connect(transport="mpi", timeout=60) as comm:
        assert type(comm) is MpiCommunicator
        digests, booked = run(program(comm))
    if comm.rank == 0:
        expected, sizes = simulate(program, RANKS).results[0]
        assert digests == expected
        # a native allreduce is booked by its formula, while the simulator's is padded to whole
        # blocks
        few = 0 if name == "allgather" else 0.02
        assert booked == pytest.approx(sizes, rel=few)


@on_ranks(RANKS, mpi=True)
def test_mpi_keeps_the_contract():
    with MpiCommunicator(timeout=60) as comm:
        for channel in (0, 5):
            run(testing.exercise_communicator(comm.channel(channel)))
        run(exercise(comm, "dense"))
        check_row(comm, "budgeted", whole_steps)


@on_ranks(RANKS, mpi=True)
def test_updates_over_mpi_are_those_over_gloo_bit_for_bit():
    ends = []
    for transport in ("mpi", "torch"):
        torch.manual_seed(0)
        model = torch.nn.Linear(300, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with sparsync.attach(model, optimizer, transport=sparsync.Transport(transport)) as sync:
            for step in range(6):
                optimizer.zero_grad()
                torch.manual_seed(step * RANKS + torch.distributed.get_rank())
                model(torch.randn(8, 300)).square().mean().backward()
                optimizer.step()
            residual = sync.state_dict()["content"]["reducer"]["residual"].values()
            # MPI's own allreduce averages the elements behind the weights, which are thus equal up
            # to rounding
            shared = sync.outer.memory["shared"][: sync.outer.layout.end].clone()
            ends.append((model.weight.detach(), shared, *residual))
    assert all(map(torch.equal, *ends))
    assert not torch.equal(model.weight.detach().flatten(), ends[0][1][: model.weight.numel()])


@on_ranks(RANKS, mpi=True)
def test_agents_average_models_during_the_training():
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
    assert len({str(weight) for weight in gathered(model.weight.tolist())}) == 1


@on_ranks(RANKS, mpi=True)
def test_calls_without_a_model_overlap():
    check_calls("mpi")


@on_ranks(RANKS, mpi=True)
def test_a_communicator_of_mpi4py_is_taken_and_remembered_until_it_is_freed():
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    mine = np.array([500, world.rank], dtype=np.int32), np.array([2.0, 1.0]), 1_000
    for _ in range(2):
        indices, values, _ = sparsync.allreduce(mine, world).total.to_numpy()
        assert indices.tolist() == [*range(RANKS), 500]
        assert values.tolist() == [1.0] * RANKS + [2.0 * RANKS]
    half = world.Split(world.rank % 2, world.rank)
    members = range(world.rank % 2, RANKS, 2)
    future = sparsync.iallreduce(mine, half)
    parts = [part.to_numpy()[0].tolist() for part in sparsync.allgather(mine, half)]
    assert parts == [[rank, 500] for rank in members]
    assert future.result().total.to_numpy()[0].tolist() == [*members, 500]
    kept = MpiCommunicator.of(half)
    assert kept is MpiCommunicator.of(half) is not MpiCommunicator.of(world)
    half.Free()
    assert kept.closed and not MpiCommunicator.of(world).closed
    outside = world.Split(0 if world.rank else MPI.UNDEFINED)
    for null in (half, *([outside] if world.rank == 0 else [])):
        with refused("comm is MPI.COMM_NULL: it was freed, or this rank is not in it"):
            sparsync.allreduce(mine, null)
    MpiCommunicator.of(world).close()


@on_ranks(RANKS, mpi=True)
def test_channels_in_flight_do_not_wait_for_each_other_in_circles():
    """Concurrent channels start late on some ranks, with native allreduces between messages."""

    async def program(channel, number):
        seen = []
        for turn in range(3):
            mine = torch.tensor([10 * number + turn + comm.rank])
            seen.append(int(await channel.allreduce(mine, "flight")))
            seen.append(sum(map(int, await channel.allgather(mine, "flight"))))
            payloads = [torch.full((50_000,), number, dtype=torch.uint8)] * RANKS
            for message in await channel.alltoallv(payloads, [50_000] * RANKS, "flight", RAW):
                assert bool((message == number).all())
        return seen

    engine, jobs = Engine("flight"), {}
    with MpiCommunicator(timeout=60) as comm:
        for number in (0, 1, 2, 4, 3):
            time.sleep(0.01 * comm.rank)  # so every rank sees a different mixture of arrivals
            jobs[number] = engine.submit(program(comm.channel(number), number))
        for number, job in jobs.items():
            sums = [RANKS * (10 * number + turn) + sum(range(RANKS)) for turn in range(3)]
            assert job.result(timeout=60) == [one for one in sums for _ in range(2)]
    engine.close()


@on_ranks(RANKS, mpi=True)
def test_every_dtype_is_reduced_and_no_nan_is_lost():
    with MpiCommunicator(timeout=60) as comm:
        for dtype in (torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int16):
            summed = run(comm.allreduce(torch.tensor([comm.rank, 2]).to(dtype), "numbers"))
            assert summed.tolist() == [sum(range(RANKS)), 2 * RANKS], dtype
        strange = torch.tensor([float("nan") if comm.rank == 1 else 1.0])
        for op in ("max", "min", "sum"):
            assert run(comm.allreduce(strange, "numbers", op)).isnan().all(), op
        turned = torch.arange(6).view(2, 3).T  # a matrix that is not contiguous keeps its shape
        assert torch.equal(run(comm.allreduce(turned, "numbers")), RANKS * turned)


@on_ranks(RANKS, mpi=True)
def test_a_group_of_some_ranks_connects():
    members = [RANKS - 1, 1]
    group = dist.new_group(members)
    if dist.get_rank() in members:
        with connect_group(group, transport="mpi", timeout=30) as comm:
            seen = run(comm.allgather(torch.tensor([dist.get_rank()]), "part"))
        assert [int(t) for t in seen] == sorted(members)  # torch sorts


@on_ranks(RANKS, mpi=True)
def test_errors_name_rank_step_and_phase():
    comm = MpiCommunicator(timeout=0.5)
    comm.ledger.begin_step(4)
    start = "rank 0, step 4: message from rank 1"
    if comm.rank == 0:
        with refused(f"{start} in phase 'split'", "0.5 s", error=DeadlineError):
            comm.irecv(1, 10, "split", RAW).wait()
    for length, words in ((11, ["10 bytes", "is longer"]), (9, ["9 bytes where 10"])):
        dist.barrier()
        channel = comm.channel(length)
        if comm.rank == 1:
            channel.isend(torch.zeros(length, dtype=torch.uint8), 0, "split", RAW).wait()
        elif comm.rank == 0:
            with refused(start, *words, error=PeerError):
                channel.irecv(1, 10, "split", RAW).wait()
    if comm.rank == 0:
        words = ["rank 0, step 4: allreduce in phase 'sizes'", "0.5 s"]
        with refused(*words, error=DeadlineError):
            run(comm.allreduce(torch.tensor([1]), "sizes"))
        # it is pending still, and MPI would match it with another rank's next one
        with refused("rank 0: an earlier exchange broke off (rank 0, step 4: allreduce in phase"):
            run(comm.channel(7).allreduce(torch.tensor([1]), "sizes"))
    with refused("channel 1099511627776", "tags from 0 to"):
        comm.channel(2**40)
    dist.barrier()
    comm.close()
    comm.close()
    with refused(f"rank {comm.rank}", "is closed; connect again"):
        run(comm.barrier())
    with refused("comm is of type int", "Intracomm"):
        MpiCommunicator(3)


def one_rank_fails(dies):
    comm = MpiCommunicator(timeout=30.0 if dies else 2.0)
    if comm.rank == 1:
        if dies:
            os._exit(7)
        raise ConfigurationError("this one does not want to")
    run(comm.barrier())


@pytest.mark.slow
@pytest.mark.parametrize("dies", [False, True])
def test_a_rank_that_fails_ends_the_job(dies):
    with pytest.raises(RankError) as caught:
        launch(one_rank_fails, 2, dies, timeout=30.0, grace=10.0, mpi=True)
    lines = str(caught.value).splitlines()
    if dies:
        assert re.match(r"rank 1: died or was ended by mpiexec, whose exit code is \d+", lines[1])
    else:
        words = "DeadlineError: rank 0, step 0: message from rank 1 in phase 'barrier'"
        assert lines[0].startswith(f"rank 0: {words}")
        assert lines[1] == "rank 1: ConfigurationError: this one does not want to"


@pytest.mark.slow
def test_the_command_starts_mpiexec_itself(tmp_path):
    options = ["--transport", "mpi", "--ranks", "2", "--collectives", "dense,oktopk"]
    more = ["--size", "5000", "--steps", "2", "--warmup", "1", "--json", f"{tmp_path}/b.json"]
    run_well("-m", "sparsync", "bench", *options, *more)
    rows = json.loads((tmp_path / "b.json").read_text())
    assert [(r["collective"], r["ranks"], r["transport"], r["wrong"]) for r in rows] == [
        ("dense", 2, "mpi", 0),
        ("oktopk", 2, "mpi", 0),
    ]


@pytest.mark.slow
def test_arrays_and_ddp_under_mpiexec():
    example = ["examples/train_ddp.py", "--transport", "mpi", "--steps", "15"]
    program = ["-m", "tests.distributed.test_mpi", *example]
    out, _ = end(start(*program, before=mpiexec_command(2)))
    found = re.search(r"^2 ranks, 15 steps: loss ([\d.]+) -> ([\d.]+),.*equal: (\w+)$", out, re.M)
    assert found, out
    assert float(found[2]) < 0.9 * float(found[1]) and found[3] == "True"


def without_torch_distributed():
    """Sum arrays under mpiexec alone."""
    with sparsync.connect(transport="mpi", timeout=60) as comm:
        mine = torch.zeros(10)
        mine[comm.rank] = comm.rank + 1.0
        total = sparsync.allreduce(mine, comm, "allgather", k=1).total.to_dense()
    assert total.tolist() == [r + 1.0 if r < comm.world_size else 0.0 for r in range(10)]


if __name__ == "__main__":  # as a user's script: first arrays, then the example that is named
    without_torch_distributed()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
