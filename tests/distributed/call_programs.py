"""Vectors without a model, blocking and not, on real ranks."""

import time

import torch
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync.reduction import OPERATIONS
from sparsync.sparse import densify
from tests.attaching import attach

from .small_model import flat, model, same_everywhere, train

SIZE = 400
GENERAL = ["sparcml-auto", "recursive-doubling", "split-allgather", "dynamic", "ring", "allgather"]


def vector(rank: int, number: int) -> torch.Tensor:
    """Whole numbers, whose sums are exact; one in ten is not zero."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    values = torch.randint(1, 9, (SIZE,), generator=generator)
    return values * (torch.rand(SIZE, generator=generator) < 0.1)


def expected(world_size: int, number: int, op: str = "sum") -> list[int]:
    total = vector(0, number)
    for rank in range(1, world_size):
        total = OPERATIONS[op].apply(total, vector(rank, number))
    return total.tolist()


def calls(transport: str) -> dict[str, bool]:
    """Several reductions under way at once, blocking ones in between, and progress meanwhile."""
    comm = sparsync.connect(timeout=30, transport=transport)
    rank, world_size = comm.rank, comm.world_size
    handles = [
        sparsync.iallreduce(vector(rank, i).double(), comm, name) for i, name in enumerate(GENERAL)
    ]
    blocking = sparsync.allreduce(vector(rank, 50), comm).total  # behind those under way
    handles += [
        sparsync.iallreduce(vector(rank, 60), comm, op=op) for op in ("max", "min", "or", "prod")
    ]
    result = {
        name: handles[i].wait().total.to_dense().tolist() == expected(world_size, i)
        for i, name in enumerate(GENERAL)
    }
    result["blocking"] = blocking.to_dense().tolist() == expected(world_size, 50)
    for handle, op in zip(handles[len(GENERAL) :], ("max", "min", "or", "prod"), strict=True):
        total = densify(handle.wait().total, OPERATIONS[op])
        result[op] = total.values.tolist() == expected(world_size, 60, op)
    handle, deadline = sparsync.iallreduce(torch.ones(50_000), comm), time.monotonic() + 20
    while not handle.done() and time.monotonic() < deadline:
        torch.ones(100, 100) @ torch.ones(
            100, 100
        )  # the caller computes; nobody waits for the handle
    result["went on in the background"] = handle.done()
    result["and is right"] = bool((handle.wait().total.to_dense() == world_size).all())
    comm.close()
    return result


def both() -> dict[str, dict[str, bool]]:
    return {transport: calls(transport) for transport in ("torch", "zmq")}


def sparcml_under_ddp() -> dict[str, bool]:
    """Layer by layer, quantised, the output layer dense: replicas stay equal, and it learns."""
    ddp = DistributedDataParallel(model())
    sync = attach(
        ddp,
        "sparcml",
        density=0.25,
        block=16,
        compress=lambda name, parameter: not name.startswith("3."),
        timeout=30,
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
    first = train(ddp, range(1), optimizer)
    last = train(ddp, range(1, 60), optimizer)
    stats = sync.stats()
    result = {
        "equal replicas": same_everywhere(flat(ddp.module)),
        "learns": last < 0.8 * first,
        "layer by layer": len(stats["units"]) == 6,
        "output dense": [u["k"] == u["size"] for u in stats["units"]][-2:] == [True, True],
        "loss reported": sum(stats["lost_norm"]) > 0,
    }
    sync.close()
    return result
