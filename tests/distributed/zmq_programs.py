"""What the ranks of the ZeroMQ tests run; importable, because processes are spawned."""

import os
import time

import torch
import torch.distributed as dist

import sparsync
from sparsync import DeadlineError, PeerError, testing
from sparsync.transports.actors import Actor
from sparsync.transports.driver import run
from sparsync.transports.ledger import Raw
from sparsync.transports.process_group import TorchCommunicator
from sparsync.transports.store import store_of
from sparsync.transports.zmq import ZmqCommunicator
from tests.contracts.table import ALGORITHMS, exercise

RAW = Raw("value")


class Silent(Actor):
    def receive(self, source, payload):
        raise AssertionError

    def tick(self):
        raise AssertionError

    def lose(self, peer, reason):
        pass


def contracts(names: list[str], curve_keys: str) -> dict[str, list[str]]:
    """Run the contracts over plain and encrypted links; return the digests of the totals."""
    gloo = TorchCommunicator(timeout=30)
    with ZmqCommunicator.over(gloo, timeout=30) as comm:  # the store's host tells the interface
        assert comm.mesh.endpoints[comm.rank].startswith("tcp://127.0.0.1:")
        run(testing.exercise_communicator(comm))
        digests = {n: run(exercise(comm, n)) for n in names}
        digests["algorithm oktopk"] = run(testing.exercise_algorithm(comm, ALGORITHMS["oktopk"]))
        digests["gloo"] = run(exercise(gloo, names[0]))
    store = dist.distributed_c10d._get_default_store()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with ZmqCommunicator(rank, world_size, store=store, curve_keys=curve_keys, timeout=30) as comm:
        run(testing.exercise_communicator(comm))
        digests["encrypted"] = run(exercise(comm.channel(3), names[0]))
    return digests


def one_rank_dies(rank_that_dies: int) -> None:
    """Let one rank die without a word while the others wait for it; they say how long it took."""
    comm = ZmqCommunicator.over(TorchCommunicator(timeout=30), interface="127.0.0.1", timeout=20)
    comm.ledger.begin_step(4)
    run(comm.barrier())
    if comm.rank == rank_that_dies:
        time.sleep(1)  # its last message is read; death without that is what the barrier would meet
        os._exit(7)
    started = time.monotonic()
    try:
        comm.irecv(rank_that_dies, 1, "split", RAW).wait()
    except PeerError as error:
        seconds = time.monotonic() - started
        comm.close()
        raise PeerError(f"{error} (after {seconds:.1f} s)") from error


def one_rank_never_spoke(rank_that_dies: int) -> None:
    """As above, but nobody ever had a link to that rank."""
    comm = ZmqCommunicator.over(TorchCommunicator(timeout=30), interface="127.0.0.1", timeout=20)
    dist.barrier()
    if comm.rank == rank_that_dies:
        time.sleep(1)  # as above
        os._exit(7)
    started = time.monotonic()
    try:
        comm.irecv(rank_that_dies, 1, "split", RAW).wait()
    except PeerError as error:
        raise PeerError(f"{error} (after {time.monotonic() - started:.1f} s)") from error


def one_rank_sleeps(rank_that_sleeps: int) -> None:
    comm = ZmqCommunicator.over(TorchCommunicator(timeout=30), interface="127.0.0.1", timeout=1.5)
    if comm.rank == rank_that_sleeps:
        time.sleep(6)
    run(comm.allreduce(torch.ones(10), "sum"))


def one_rank_is_late(rank_that_is_late: int) -> dict[str, str]:
    """Connect without one rank, then again with it; return the errors, and the default transport."""
    rank, store = dist.get_rank(), store_of(None)
    errors = {}
    for transport in ("zmq", "torch"):
        if rank == rank_that_is_late:
            store.wait([f"{transport} {r}" for r in range(dist.get_world_size()) if r != rank])
            continue
        started = time.monotonic()
        try:
            if transport == "zmq":
                sparsync.connect(timeout=1.0)
            else:
                TorchCommunicator(timeout=1.0).host(Silent())
        except DeadlineError as error:
            errors[transport] = str(error)
        assert time.monotonic() - started < 4
        store.set(f"{transport} {rank}", "failed")
    with sparsync.connect(timeout=30) as comm:
        run(comm.barrier())
        return {**errors, "default": type(comm).__name__}
