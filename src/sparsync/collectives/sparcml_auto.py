"""The choice among SparCML's collectives: by message size and by the size that the result will have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch

from sparsync.collectives.base import Collective, Reduced, check_cap
from sparsync.collectives.density import expected_union
from sparsync.collectives.dynamic import Dynamic
from sparsync.collectives.recursive_doubling import RecursiveDoubling
from sparsync.collectives.split_allgather import SplitAllgather
from sparsync.errors import ConfigurationError
from sparsync.operations import Reduction, reduction
from sparsync.sparse import Vector
from sparsync.transports.base import Communicator
from sparsync.wire.streams import StreamCodec

__all__ = ["SparcmlAuto", "SparcmlAutoState"]


@dataclass(frozen=True)
class SparcmlAutoState:
    """What the last call taught.

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
        self.candidates = {
            "recursive-doubling": RecursiveDoubling(self.codec, op=op, cap=cap),
            "split-allgather": SplitAllgather(self.codec, op=op, cap=cap),
            "dynamic": Dynamic(self.codec, op=op, cap=cap),
        }

    async def reduce(self, comm: Communicator, selected: Vector, k: int, step: int) -> Reduced:
        """Choose, then do it."""
        size, dtype = selected.size, selected.values.dtype
        most = await self._most(comm, selected, k)
        entries = self.state.entries
        result = expected_union(most, size, comm.world_size) if entries is None else entries
        name = self.choose(most, result, size, dtype, comm.world_size)
        reduced = await self.candidates[name].reduce(comm, selected, k, step)
        self.state = SparcmlAutoState(reduced.total.nnz, most)
        return reduced

    def choose(
        self, k: float, result: float, size: int, dtype: torch.dtype, world_size: int
    ) -> str:
        """Return the name of the one that is expected to be fastest.

        The sum of j vectors is taken to have ``k j^a`` entries, with the a that leads from k to the
        result: 0 where supports are equal, 1 where they are disjoint.

        Args:
            k: entries of a rank.
            result: entries of the sum.
            size: number of elements N.
            dtype: of the values.
            world_size: number of ranks P.

        Example:
            >>> auto, n = SparcmlAuto(), 10**6
            >>> [auto.choose(k, K, n, torch.float32, 8) for k, K in ((50, 60), (20_000, 30_000))]
            ['recursive-doubling', 'split-allgather']
            >>> auto.choose(100_000, 600_000, n, torch.float32, 8)
            'dynamic'
        """
        limit = self.codec.limit(size, dtype)
        if limit is not None and result > limit:
            return "dynamic"
        doublings, others = (world_size - 1).bit_length(), world_size - 1
        growth = max(result, k, 1) / max(k, 1)
        grown = sum(k * growth ** (i / doublings) for i in range(doublings))
        split = (k + result) * others / world_size
        doubling_seconds = doublings * self.alpha + self._seconds(grown, size, dtype)
        split_seconds = (others + doublings) * self.alpha + self._seconds(split, size, dtype)
        return "recursive-doubling" if doubling_seconds <= split_seconds else "split-allgather"

    async def _most(self, comm: Communicator, selected: Vector, k: int) -> float:
        """Return the most entries of a rank; the same on all ranks."""
        if self.cap is not None:
            return min(self.cap * k, selected.size)
        if self.state.most is not None:
            return float(self.state.most)
        everyone = await comm.allreduce(torch.tensor([selected.nnz]), "entries", "max")
        return float(everyone)

    def _seconds(self, entries: float, size: int, dtype: torch.dtype) -> float:
        return self.beta * self.codec.sparse.nbytes(min(round(entries), size), size, dtype)
