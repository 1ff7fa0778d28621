"""The interface of the collectives, which sum selected entries over ranks."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from sparsync import kernels
from sparsync.collectives.costs import Cost, Job, Result
from sparsync.errors import require
from sparsync.reduction import SUM, Reduction
from sparsync.sparse import DenseVector, SparseVector, Vector
from sparsync.state import Stateful
from sparsync.transports.communicator import Communicator

__all__ = [
    "Collective",
    "Reduced",
    "capped",
    "check_cap",
    "cut",
    "less",
    "most_entries",
    "rounded_off",
]


@dataclass(frozen=True, eq=False)
class Reduced:
    """The result of a collective: ``sum over ranks(delivered) == total + sum over ranks(lost)``.

    Attributes:
        total: the sum, bit-identical on every rank.
        delivered: this rank's share of the total; it may also have entries where the total has none.
            Selected entries that are not in the share were dropped in flight, and stay in the residual.
        lost: the part of ``delivered`` that a codec rounded away and that no rank keeps, as some papers
            specify.  None, the usual case, means that nothing is lost.
    """

    total: Vector
    delivered: Vector
    lost: Vector | None = None


class Collective(Stateful):
    """Sums one vector per rank, or reduces them with another operation.

    Its memory (boundaries, thresholds) is ``self.state``.  One instance serves one unit, so ``size`` is
    the same on every call.

    Attributes:
        operation: the reduction.  Elements that a sparse vector does not store have the operation's
            neutral element as their value.
        result: the kind of total; it determines the lower bound that costs are compared with.
        by_runs: whether the collective reads a dense vector only through ``DenseVector.run``, never
            as a whole.
        order: order of the float additions.  "rank": the total is bit-identical to a left fold of the
            delivered vectors in rank order; "tree": a different order, which is the same on every run.
    """

    operation: Reduction = SUM
    result: Result = "sum"
    order: Literal["rank", "tree"] = "rank"
    by_runs: bool = False

    @property
    def whole(self) -> bool:
        """Whether the next call takes the whole vector, so that no entries need to be selected."""
        return self.result == "whole"

    def explain(self) -> str | None:
        """Return a text that gives the method in use and why; None if there is only one method."""
        return None

    def expect(self, entries: int, total: int | None) -> None:
        """Store sizes that are known before a call; the default ignores them.

        Args:
            entries: the largest number of entries on any rank; equal on all ranks, like ``total``.
            total: number of entries in the total of the previous call of this kind; None for the first.
        """

    def for_layers(self, sizes: Sequence[int]) -> Collective:
        """Return the collective for a unit with layers of these sizes: ``self``, unless layers matter."""
        return self

    def cost(self, job: Job) -> Cost | None:
        """Return the cost of a step for the busiest rank, averaged over steps; None if it is unknown.

        The docstring of an implementation gives the equation and its source.  The cost excludes
        selection, which the planner adds.
        """
        return None

    def promised_words(self, job: Job, *, exchangeable: bool) -> float | None:
        """Return a bound on the words that a rank sends or receives in any step; None if there is none.

        Args:
            job: the exchange, of two ranks or more.
            exchangeable: whether swapping the inputs of two ranks leaves all expectations unchanged.
        """
        return None

    @abstractmethod
    async def reduce(self, comm: Communicator, selected: Vector, k: int, step: int) -> Reduced:
        """Sum ``selected`` over the ranks of ``comm``; every rank calls it with the same k and step.

        Args:
            comm: the group; any ``world_size >= 1``.
            selected: this rank's contribution, ``size`` equal on all ranks; not modified.
            k: the intended number of entries, per rank and in the total.
            step: 0-based; a period of p steps starts when ``step % p == 0``.
        """


def most_entries(k: int, cap: float | None, size: int) -> int:
    """Return how many of ``size`` entries may be sent: ``cap * k``, and at least 1 unless k is 0."""
    if cap is None:
        return size
    # with a small k and a cap below 1, the product rounds to 0, and no entry would ever be delivered
    return min(size, max(math.floor(cap * k), 1)) if k else 0


def capped(vector: Vector, k: int, cap: float | None) -> SparseVector:
    """Keep the largest ``cap * k`` entries; the others are not delivered."""
    sparse = SparseVector.from_dense(vector.values) if isinstance(vector, DenseVector) else vector
    return sparse.top(most_entries(k, cap, sparse.size))


def check_cap(cap: float | None, where: str) -> None:
    """Refuse a cap that is not a positive factor or None."""
    fits = cap is None or 0 < cap < math.inf
    require(fits, f"{where}: cap is {cap}; give a factor > 0 of k, or None")


# ---- the rank that drops or rounds an entry keeps the difference ------------------------------------
#
# The conservation law is accumulated = delivered + residual.  A rank that drops or rounds away part of a
# sum subtracts this part from its own ``delivered``, no matter which rank selected it.  The part ends up
# in exactly one residual, and no message has to go back to the ranks that contributed it.


def cut(vector: SparseVector, k: int) -> tuple[SparseVector, SparseVector]:
    """Split a vector into its k largest entries and the rest."""
    if vector.nnz <= k:
        return vector, vector.keep(slice(0, 0))
    # positions ascend, so both parts are valid vectors; zeros are never among the largest
    positions = kernels.top(vector.values, k)
    left = torch.ones(vector.nnz, dtype=torch.bool, device=positions.device)
    left[positions] = False
    return vector.keep(positions), vector.keep(left)


def rounded_off(before: SparseVector, after: SparseVector) -> SparseVector:
    """Return the nonzero entries of ``before - after``; the two vectors have the same support."""
    error = before.values - after.values
    where = (error != 0).nonzero().flatten()
    return SparseVector(before.indices[where], error[where], before.size)


def less(vector: SparseVector, parts: Iterable[SparseVector]) -> SparseVector:
    """Return ``vector`` minus all ``parts``, even at elements that ``vector`` does not store."""
    # A rank may drop sums to which it contributed nothing.  ``delivered`` then gets a negative entry, so
    # that ``accumulated - delivered`` adds the dropped sum to the rank's residual.
    negative = [SparseVector(p.indices, -p.values, p.size) for p in parts if p.nnz]
    return SparseVector.merge([vector, *negative])
