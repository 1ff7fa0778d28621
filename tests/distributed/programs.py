"""What the ranks of the multi-process tests run; importable, because processes are spawned."""

import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync import testing
from sparsync.transports.driver import run
from sparsync.transports.process_group import TorchCommunicator
from tests.attaching import attach
from tests.contracts.table import ALGORITHMS, exercise

from .small_model import model, train


def contracts(names: list[str]) -> dict[str, list[str]]:
    """Run the contracts on gloo; return the digests of the totals."""
    comm = TorchCommunicator(timeout=30)
    run(testing.exercise_communicator(comm))
    run(testing.exercise_communicator(TorchCommunicator(timeout=30, announce_lengths=True)))
    run(exercise(comm, "dense"))
    digests = {n: run(exercise(comm, n)) for n in names}
    digests["algorithm oktopk"] = run(testing.exercise_algorithm(comm, ALGORITHMS["oktopk"]))
    announced = TorchCommunicator(timeout=30, announce_lengths=True)
    digests["announced"] = run(exercise(announced, "split-allgather"))
    return digests


def one_rank_dies(rank_that_dies: int) -> None:
    ddp = DistributedDataParallel(model())
    attach(ddp, "oktopk", density=0.1, timeout=10)
    train(ddp, range(2))
    if dist.get_rank() == rank_that_dies:
        # the others read what it sent first: its death may take back what they have not read
        time.sleep(2)
        os._exit(7)
    train(ddp, range(2, 4))


def one_rank_sleeps(rank_that_sleeps: int) -> None:
    comm = TorchCommunicator(dist.new_group(timeout=None), timeout=1.5)
    if comm.rank == rank_that_sleeps:
        time.sleep(6)
    sparsync.allreduce(torch.ones(10), comm, k=3)
