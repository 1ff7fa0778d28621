"""Dense allreduce, the baseline of all comparisons."""

from __future__ import annotations

from typing import final

from sparsync.collectives.collective import Collective, Reduced
from sparsync.collectives.costs import WORD_BYTES, Cost, Job, Result, allreduce
from sparsync.sparse import DenseVector, Vector
from sparsync.transports.communicator import Communicator

__all__ = ["Dense"]


@final
class Dense(Collective):
    """Sums whole vectors: reduce-scatter, then allgather (Rabenseifner's algorithm).

    A transport with a native allreduce (gloo, NCCL) uses it instead.  In one run, all replicas are
    equal; runs on different transports agree up to rounding.

    Cost: 2 ceil(log2 P) messages; 2 n (P - 1) / P words sent and received.
    State: none.   Differs from the paper: any P, on a circulant graph instead of a hypercube.

    Example:
        >>> import torch; from sparsync.transports.sim import simulate
        >>> async def program(comm):
        ...     mine = DenseVector(torch.full((3,), comm.rank + 1.0))
        ...     return (await Dense().reduce(comm, mine, k=3, step=0)).total.to_dense().tolist()
        >>> simulate(program, world_size=4).results[0]
        [10.0, 10.0, 10.0]

    References: Chan et al., "Collective communication: theory, practice, and experience", 2007;
    Ok-Topk, Table 1, "Dense".
    """

    result: Result = "whole"
    order = "tree"
    _overwrites = False

    @classmethod
    def overwriting(cls) -> Dense:
        """Return an instance whose total overwrites ``selected``.

        Only a reducer's plan may use it: there, ``selected`` is the accumulated gradient, and all of it
        is delivered.
        """
        # not a constructor argument, because all constructor arguments become options of presets
        one = cls()
        one._overwrites = True
        return one

    def cost(self, job: Job) -> Cost:
        """Return ``2 n (P - 1) / P`` words, ``2 log2 P`` messages (Ok-Topk, Table 1, "Dense").

        Example:
            >>> Dense().cost(Job(size=1000, k=10, world_size=4)).words
            1500.0
        """
        added = WORD_BYTES * job.size * job.share
        return allreduce(job.size, job.world_size) + Cost(0, 0, dense_bytes=added, turns=2)

    def promised_words(self, job: Job, *, exchangeable: bool) -> float:
        """Return the words of ``cost``."""
        return self.cost(job).words

    async def reduce(self, comm: Communicator, selected: Vector, k: int, step: int) -> Reduced:
        """Sum the whole vectors; everything is delivered."""
        total = await comm.allreduce(selected.to_dense(), "dense", in_place=self._overwrites)
        return Reduced(DenseVector(total), selected)
