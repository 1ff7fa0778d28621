"""Gloo and ZeroMQ between three real ranks give the simulator's bits, and report missing ranks."""

import functools
import os
import time

import pytest
import torch
import torch.distributed as dist

import sparsync
from sparsync import testing
from sparsync.cli.launch import RankError, launch
from sparsync.errors import ConfigurationError, DeadlineError, PeerError
from sparsync.published.wagma.scheme import coded_allreduce
from sparsync.reduction import OPERATIONS, densify
from sparsync.transports.actors import Actor
from sparsync.transports.driver import run
from sparsync.transports.ledger import Raw
from sparsync.transports.process_group import TorchCommunicator, connect_group
from sparsync.transports.rendezvous import store_of
from sparsync.transports.sim import simulate
from sparsync.transports.zmq import ZmqCommunicator, make_curve_keys
from sparsync.wire import Whole
from tests.contracts.table import ALGORITHMS, CALLS, OTHERS, exercise
from tests.on_ranks import gathered, on_ranks

from .small_model import attach, ddp_model, train

# ---- contracts ------------------------------------------------------------------------------------


@functools.cache
def simulated(program, name, world_size):
    return simulate(lambda comm: program(comm, name), world_size).results[0]


def check_row(comm, name, program=exercise):
    """Run a row's contract; return digests, which must equal those of the simulator."""
    digests = run(program(comm, name))
    if comm.rank == 0:
        assert digests == simulated(program, name, comm.world_size), name
    return digests


async def whole_steps(comm, name):
    return await testing.exercise_algorithm(comm, ALGORITHMS[name])


SLOW = [*OTHERS, "oktopk, as published"]


@on_ranks(3)
@pytest.mark.fast(4)
@pytest.mark.parametrize("name", [*CALLS, *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)])
@pytest.mark.parametrize("transport", ["torch", "zmq"])
def test_collectives_equal_the_simulators_bit_for_bit(transport, name):
    with sparsync.connect(transport=transport, timeout=30) as comm:
        check_row(comm, name)


@on_ranks(3)
@pytest.mark.parametrize("transport", ["torch", "zmq"])
def test_a_transport_keeps_the_contract(transport):
    with sparsync.connect(transport=transport, timeout=30) as comm:
        run(testing.exercise_communicator(comm))
        run(exercise(comm, "dense"))
        check_row(comm, "oktopk", whole_steps)
        if transport == "zmq":  # the store's host determines the interface
            assert comm.mesh.endpoints[comm.rank].startswith("tcp://127.0.0.1:")


@on_ranks(3)
@pytest.mark.parametrize("size", [2, 5, 6])
def test_a_coded_sum_takes_blocks_of_any_width(size):
    async def program(comm):
        vector = torch.arange(1.0, size + 1) * (comm.rank + 1)
        return (await coded_allreduce(comm, vector, Whole(torch.bfloat16), 0)).total.tolist()

    assert run(program(TorchCommunicator(timeout=30))) == [6.0 * i for i in range(1, size + 1)]


@on_ranks(2)
def test_a_channel_that_gloo_has_not_is_refused():
    comm = TorchCommunicator(timeout=30)
    assert comm.channel(2**30 - 1).tag == 2**30 - 1
    for tag in (-1, 2**30):  # the last one is for a message that never arrives
        with pytest.raises(ConfigurationError, match=f"channel {tag} does not exist"):
            comm.channel(tag)


@on_ranks(3)
def test_encrypted_links_change_no_bit(folder):
    rank, world_size, store = dist.get_rank(), dist.get_world_size(), store_of(None)
    if rank == 0:
        make_curve_keys(folder, world_size)
    dist.barrier()
    keys = {"curve_keys": str(folder), "timeout": 30}
    with ZmqCommunicator(rank, world_size, store=store, **keys) as comm:
        run(testing.exercise_communicator(comm))
        check_row(comm.channel(3), CALLS[0])


# ---- vectors without a model ----------------------------------------------------------------------

SIZE = 400
GENERAL = ["sparcml-auto", "recursive-doubling", "split-allgather", "dynamic", "ring", "allgather"]
REDUCTIONS = ["max", "min", "or", "prod"]


def vector(rank, number):
    """Return whole numbers, one in ten of them not zero, whose sums are exact."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    values = torch.randint(1, 9, (SIZE,), generator=generator)
    return values * (torch.rand(SIZE, generator=generator) < 0.1)


def expected(world_size, number, op="sum"):
    total = vector(0, number)
    for rank in range(1, world_size):
        total = OPERATIONS[op].apply(total, vector(rank, number))
    return total.tolist()


def check_calls(transport):
    """Check reductions in flight, with blocking ones between them and progress in the background."""
    with sparsync.connect(timeout=30, transport=transport) as comm:
        rank, world_size = comm.rank, comm.world_size
        sums = [
            sparsync.iallreduce(vector(rank, i).double(), comm, name)
            for i, name in enumerate(GENERAL)
        ]
        blocking = sparsync.allreduce(vector(rank, 50), comm).total  # after those under way
        others = [sparsync.iallreduce(vector(rank, 60), comm, op=op) for op in REDUCTIONS]
        for number, handle in enumerate(sums):
            assert handle.result().total.to_dense().tolist() == expected(world_size, number)
        assert blocking.to_dense().tolist() == expected(world_size, 50)
        for op, handle in zip(REDUCTIONS, others, strict=True):
            total = densify(handle.result().total, OPERATIONS[op])
            assert total.values.tolist() == expected(world_size, 60, op)
        handle, deadline = sparsync.iallreduce(torch.ones(50_000), comm), time.monotonic() + 20
        while not handle.done() and time.monotonic() < deadline:
            torch.ones(100, 100) @ torch.ones(100, 100)  # nobody waits for the handle
        assert handle.done()
        assert (handle.result().total.to_dense() == world_size).all()


@on_ranks(3)
@pytest.mark.parametrize("transport", ["torch", "zmq"])
def test_calls_without_a_model_overlap(transport):
    check_calls(transport)


# ---- ranks that are missing -----------------------------------------------------------------------


class Silent(Actor):
    def receive(self, source, payload):
        raise AssertionError

    def tick(self):
        raise AssertionError

    def lose(self, peer, reason):
        pass


@on_ranks(3)
@pytest.mark.parametrize("transport", ["zmq", "torch"])
def test_a_rank_that_is_missing_while_others_connect_is_named_and_may_come_later(transport):
    rank, store = dist.get_rank(), store_of(None)
    if rank == 1:
        store.wait([f"{transport} {other}" for other in (0, 2)])
    else:
        words = f"rank {rank}, phase 'rendezvous': no word from rank 1 within 1 s"
        with pytest.raises(DeadlineError, match=words):
            if transport == "zmq":
                sparsync.connect(timeout=1.0)
            else:
                TorchCommunicator(timeout=1.0).host(Silent())
        store.set(f"{transport} {rank}", "failed")
    with sparsync.connect(timeout=30) as comm:
        run(comm.barrier())
        assert type(comm) is ZmqCommunicator


@on_ranks(2)
@pytest.mark.parametrize("transport", ["torch", "zmq"])
def test_a_silent_rank_runs_into_the_deadline(transport):
    comm = connect_group(dist.new_group(), transport=transport, timeout=0.5)
    run(comm.barrier())
    if comm.rank == 0:
        with pytest.raises(DeadlineError, match=r"^rank 0, step 0.*rank 1.* within 0\.5 s"):
            sparsync.allreduce(torch.ones(10), comm, k=3)
    gathered(None)  # rank 1 is present but silent
    comm.close()


def die():
    # the others must read this rank's messages first, because unread ones may be lost with it
    time.sleep(1)
    os._exit(7)


def one_rank_dies_in_training():
    ddp = ddp_model()
    attach(ddp, timeout=20)
    train(ddp, range(2))
    if dist.get_rank() == 1:
        die()
    train(ddp, range(2, 4))


def one_rank_dies(spoke):
    """Wait over ZeroMQ for a dead rank, with or without an earlier connection to it."""
    comm = ZmqCommunicator(dist.get_rank(), 3, store=store_of(None), timeout=20)
    comm.ledger.begin_step(4)
    run(comm.barrier()) if spoke else dist.barrier()
    if comm.rank == 1:
        die()
    started = time.monotonic()
    try:
        comm.irecv(1, 1, "split", Raw("value")).wait()
    except PeerError:
        assert time.monotonic() - started < 15, "waited for the deadline of 20 s"
        comm.close()
        raise


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("program", "arguments", "words"),
    [
        (one_rank_dies_in_training, [], ", step 2"),
        (one_rank_dies, [True], ", step 4: message from rank 1 in phase 'split' will not come"),
        (one_rank_dies, [False], ", step 4: message from rank 1 in phase 'split' will not come"),
    ],
)
def test_a_dead_rank_gets_every_other_rank_a_named_error(program, arguments, words):
    with pytest.raises(RankError) as caught:
        launch(program, 3, *arguments, timeout=30.0)
    lines = str(caught.value).splitlines()
    assert lines[1] == "rank 1: died with exit code 7"
    for rank in (0, 2):
        assert lines[rank].startswith(f"rank {rank}: PeerError: rank {rank}{words}"), lines[rank]
        assert "phase '" in lines[rank]
