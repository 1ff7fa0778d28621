"""What the ranks of the ZeroMQ tests run; importable, because processes are spawned."""

import os
import time

import torch
import torch.distributed as dist

from sparsync import PeerError, testing
from sparsync.transports.base import run
from sparsync.transports.framing import Raw
from sparsync.transports.torch import TorchCommunicator
from sparsync.transports.zmq import ZmqCommunicator
from tests.contracts.table import ALGORITHMS, exercise

RAW = Raw("value")


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
