"""Choose among SparCML's collectives by message size and by the expected size of the result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch

from sparsync.collectives.base import Collective, Reduced, check_cap
from sparsync.collectives.costs import Cost, Job
from sparsync.collectives.sparcml.recursive_doubling import RecursiveDoubling
from sparsync.collectives.sparcml.split import Dynamic, split_allgather
from sparsync.errors import ConfigurationError
from sparsync.reduction import Reduction, reduction
from sparsync.sparse import Vector
from sparsync.transports.communicator import Communicator
from sparsync.wire.streams import StreamCodec

__all__ = ["SparcmlAuto", "SparcmlAutoState"]


@dataclass(frozen=True)
class SparcmlAutoState:
    """Entries seen in earlier calls, from which the next result is estimated.

    Attributes:
        entries: of the last total; None before the first call.
        most: entries of any rank in the first call; None before it.
    """

    entries: int | None = None
    most: float | None = None


@final
class SparcmlAuto(Collective):
    """Recursive doubling for small results, split and allgather for large, dynamic for dense ones.

    Where SparCML asks the user for "some rough idea" of the result's size K, it is learned here: from
    the number of entries of the last total, which all ranks know from its headers.  On the first call
    it is the expectation of appendix B for uniformly random supports, which has the most fill-in, with
    the largest k of any rank.

    Args:
        codec: of all three; its dense switch decides what "dense" means.
        op: the operation.
        cap: at most ``cap * k`` entries per rank are taken; None: all.
        alpha: seconds per message, which weighs rounds against bytes (gigabit Ethernet: 50 us).
        beta: seconds per byte (1 Gbit/s: 8 ns).

    Cost: that of the cheapest of the three by the estimate; with ``cap=None`` the first call has an
    allreduce of one integer more.   State: entries of the last total, and the most of a rank.
    Differs from the paper: there the user chooses.

    Example:
        >>> from sparsync.sparse import SparseVector
        >>> from sparsync.transports.sim import simulate
        >>> async def program(comm):
        ...     mine = SparseVector.from_dense(torch.eye(4)[comm.rank])
        ...     return (await SparcmlAuto().reduce(comm, mine, k=1, step=0)).total.to_dense().tolist()
        >>> simulate(program, world_size=3).results[2]
        [1.0, 1.0, 1.0, 0.0]

    References: SparCML, sections 5.3 and 8.1, appendix B.
    """

    order = "tree"

    def __init__(
        self,
        codec: StreamCodec | None = None,
        *,
        op: str | Reduction = "sum",
        cap: float | None = 1.0,
        alpha: float = 50e-6,
        beta: float = 8e-9,
    ) -> None:
        if not (alpha >= 0 and beta >= 0):
            raise ConfigurationError(
                f"SparcmlAuto: alpha is {alpha}, beta is {beta}; give seconds >= 0"
            )
        check_cap(cap, "SparcmlAuto")
        self.codec, self.operation, self.cap = codec or StreamCodec(), reduction(op), cap
        self.alpha, self.beta = alpha, beta
        self.state = SparcmlAutoState()
        self.candidates: dict[str, Collective] = {
            "recursive-doubling": RecursiveDoubling(self.codec, op=op, cap=cap),
            "split-allgather": split_allgather(self.codec, op=op, cap=cap),
            "dynamic": Dynamic(self.codec, op=op, cap=cap),
        }

    async def reduce(self, comm: Communicator, selected: Vector, k: int, step: int) -> Reduced:
        """Choose, then do it."""
        size, dtype = selected.size, selected.values.dtype
        most = await self._most(comm, selected, k)
        entries = self.state.entries
        job = Job(size, most, comm.world_size, result=entries)
        name = self.choose(job, dtype)
        reduced = await self.candidates[name].reduce(comm, selected, k, step)
        self.state = SparcmlAutoState(reduced.total.nnz, most)
        return reduced

    def choose(self, job: Job, dtype: torch.dtype = torch.float32) -> str:
        """Return the name of the one that is expected to be fastest.

        Example:
            >>> auto, n = SparcmlAuto(), 10**6
            >>> [auto.choose(Job(n, k, 8, result=K)) for k, K in ((50, 60), (20_000, 30_000))]
            ['recursive-doubling', 'split-allgather']
            >>> auto.choose(Job(n, 100_000, 8, result=600_000))
            'dynamic'
        """
        limit = self.codec.limit(job.size, dtype)
        if limit is not None and job.summed > limit:
            return "dynamic"
        names = ("recursive-doubling", "split-allgather")
        return min(names, key=lambda name: self._seconds(self.candidates[name], job))

    def cost(self, job: Job) -> Cost | None:
        """Return the cost of the one that is chosen (section 5.3)."""
        return self.candidates[self.choose(job)].cost(job)

    async def _most(self, comm: Communicator, selected: Vector, k: int) -> float:
        """Return the most entries of a rank; the same on all ranks."""
        if self.cap is not None:
            return min(self.cap * k, selected.size)
        if self.state.most is not None:
            return float(self.state.most)
        everyone = await comm.allreduce(torch.tensor([selected.nnz]), "entries", "max")
        return float(everyone)

    def _seconds(self, collective: Collective, job: Job) -> float:
        cost = collective.cost(job)
        assert cost is not None
        return cost.seconds(self.alpha, self.beta)
