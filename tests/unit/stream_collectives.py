"""SparCML's collectives, and a way to run them with one vector per simulated rank."""

from functools import partial

import torch

from sparsync.published.sparcml.collectives import Dynamic, RecursiveDoubling, Ring, split_allgather
from sparsync.sparse import SparseVector
from sparsync.transports.sim import simulate

FACTORIES = {"recursive doubling": RecursiveDoubling, "split-allgather": split_allgather}
FACTORIES |= {"dynamic": Dynamic, "dynamic, always dense": partial(Dynamic, always_dense=True)}
FACTORIES |= {"ring": Ring, "ring, dense": partial(Ring, dense=True)}


def reduce_all(make, vectors, k=0, step=0):
    """Reduce one vector per rank; return the simulation, whose results are of type ``Reduced``."""

    async def program(comm):
        return await make().reduce(comm, vectors[comm.rank], k, step)

    return simulate(program, len(vectors))


def make_vectors(world_size, size=200, per_rank=20, dtype=torch.float32):
    """Return small whole numbers at random places, whose sums are exact in any order."""
    result = []
    for rank in range(world_size):
        generator = torch.Generator().manual_seed(rank)
        indices = torch.randperm(size, generator=generator)[:per_rank].sort().values
        values = torch.randint(1, 5, (per_rank,), generator=generator).to(dtype)
        result.append(SparseVector(indices, values, size))
    return result
