"""Budgeted: top-k of the sum of the ranks' top-k in two rounds, with a guaranteed byte budget."""

from __future__ import annotations

import math
from typing import final

import torch

from sparsync.collectives.collective import Collective, Reduced, capped
from sparsync.collectives.costs import WORD_BYTES, Cost, Job, Result
from sparsync.errors import require
from sparsync.sparse import SparseVector, Vector
from sparsync.transports.communicator import Communicator
from sparsync.wire.codec import Codec, MessageFraming
from sparsync.wire.packed import Packed, decode_sum, decode_undealt, encode_dealt

__all__ = ["Budgeted"]

_FEW_PER_RANK = 256  # with a smaller k / P, headers and random variation are too large for a budget
_PASSES = 2  # passes over k entries besides packing and unpacking, fitted to benchmarks/fidelity.md
_DEVIATIONS = 4  # margin for an owner's share of the k largest: it is binomial with mean k / P


@final
class Budgeted(Collective):
    """Finds the k largest entries of the sum, with less volume than Theorem 3.1's lower bound for COO.

    A hash deals elements to owners (``kernels.deal``), so the load is even for any support.  No regions
    have to be cut, balanced or announced, and message sizes are bounded in advance.

    1. Every rank sends each owner its entries, packed; the owner sums them in rank order.
    2. Every owner sends its largest sums to all ranks: k / P plus four standard deviations, because after
       hashing the owners' shares of the k largest differ only by chance.
    3. Every rank keeps the k largest of the sums that it received.  They are the same on all ranks, so no
       further round is needed.

    The collective makes two promises.  On any step and any input, no rank sends or receives more than
    ``budget * k (P - 1) / P`` words (for k / P >= 256).  The total has min(k, nnz) entries, or fewer if
    the budget cuts messages short.  If a message cannot hold all entries, the smallest ones stay in the
    sender's residual.  Rounding errors stay in the residual of the rank that rounds.

    Args:
        codec: wire format (default: packed, bf16).
        budget: words of 4 bytes that a rank may send and receive, in units of k (P - 1) / P.  The
            theorem's bound for COO is 2; bf16 values use about 1.6 at a density of 1 %.

    Cost: 2 (P - 1) messages in 2 rounds; about 2 * 3.1 bytes * k (P - 1) / P at a density of 1 %.
    State: none.
    Differs from the paper: there is no paper; the two exchanges are Ok-Topk's, but with hashed regions
    (compare Zen), bounded messages and no threshold.

    Example:
        >>> from sparsync.transports.sim import simulate
        >>> async def program(comm):
        ...     mine = SparseVector.from_dense(torch.tensor([0.0, 1.0, 0.0, comm.rank + 2.0]))
        ...     reduced = await Budgeted().reduce(comm, mine, k=1, step=0)
        ...     return reduced.total.to_dense().tolist()
        >>> simulate(program, world_size=3).results[0]
        [0.0, 0.0, 0.0, 9.0]

    References: Li & Hoefler, Ok-Topk, PPoPP 2022, Theorem 3.1; Wang et al., Zen, 2023 (hashing).
    """

    result: Result = "top-k"

    def __init__(self, codec: Codec[SparseVector] | None = None, *, budget: float = 2.0) -> None:
        require(
            isinstance(budget, int | float) and 0 < budget < math.inf,
            f"Budgeted: budget is {budget!r}; give words per k (P - 1) / P, as 2.0",
        )
        self.codec, self.budget = codec or Packed(), float(budget)

    def cost(self, job: Job) -> Cost:
        """Return ``2 (P - 1)`` messages: P - 1 with shares of the entries, then P - 1 with sums.

        A message holds k / P entries in the first round, and k / P + 4 sqrt(k / P) + 4 in the second,
        out of n / P elements.  This is a mean over ranks and steps; the budget bounds every single step.

        Example:
            >>> from sparsync.collectives.costs import lower_bound_words
            >>> cost = Budgeted().cost(Job(14_728_266, 147_283, 8))
            >>> cost.messages, round(cost.words / lower_bound_words(147_283, 8), 2)
            (14, 0.78)
        """
        peers, mean = job.world_size - 1, job.k / job.world_size
        width = -(-job.size // job.world_size)
        share = _owned(mean, min(width, round(job.k)))
        pair = self.codec.nbytes(round(mean), width) + self.codec.nbytes(share, width)
        split, gathered = job.k * job.share, job.k / job.world_size
        decoded = 2 * split + _PASSES * job.k
        together = 2 * (peers - 1)
        work = {"encoded": split + gathered, "decoded": decoded}
        return Cost(2 * peers, peers * pair, **work, turns=2, together=together)

    def promised_words(self, job: Job, *, exchangeable: bool) -> float:
        """Return the budget; it may be below Theorem 3.1's bound, because entries are packed."""
        return self.budget * job.k * job.share

    async def reduce(self, comm: Communicator, selected: Vector, k: int, step: int) -> Reduced:
        """Send entries to owners, sum them there, send the sums to all ranks, keep the k largest."""
        # Keep at most k entries, even if more are selected.  The capacities below then depend only on k,
        # so all ranks know them, and none has to be announced.
        mine = capped(selected, k, 1.0)
        if comm.world_size == 1:
            return Reduced(mine, mine)
        codec, framing, ranks = self.codec, MessageFraming(self.codec), comm.world_size
        size, dtype = mine.size, mine.values.dtype
        to_owner, to_all = self._limits(ranks, k, size, dtype)
        with comm.stage("pack"):
            parcels = encode_dealt(codec, mine, ranks, comm.rank, to_owner)
        capacities = [codec.nbytes(to_owner, parcels.own.size, dtype)] * ranks
        messages = await comm.alltoallv(parcels.messages, capacities, "split", framing)
        with comm.stage("unpack"):
            await comm.work(sum(message.numel() for message in messages))
            share = decode_sum(codec, messages, comm.rank, parcels.own, to_all)
        with comm.stage("pack"):
            encoded = codec.encode(share).payload
        capacities = [codec.nbytes(to_all, share.size, dtype)] * ranks
        messages = await comm.alltoallv([encoded] * ranks, capacities, "allgather", framing)
        # use this rank's own sums as other ranks decode them; otherwise totals would differ by rounding
        messages[comm.rank] = encoded
        with comm.stage("unpack"):
            await comm.work(sum(message.numel() for message in messages))
            # The owner's rounding changes the total.  The owner counts this change as delivered by
            # itself and keeps the opposite in its residual.  The conservation law thus holds without
            # a message to the contributors.
            sent = SparseVector(mine.indices, parcels.arriving, size)
            return Reduced(*decode_undealt(codec, messages, k, comm.rank, share, sent))

    def _limits(self, world_size: int, k: int, size: int, dtype: torch.dtype) -> tuple[int, int]:
        """Return the largest numbers of entries and of owned sums that a message may hold.

        Each exchange gets half of the budget.  With few entries per rank, there is no budget, only a
        limit that random variation hardly ever reaches.
        """
        # dealing assigns ceil(n / P) elements to every owner
        width, mean = -(-size // world_size), k / world_size
        share = _owned(mean, min(width, k))
        if mean < _FEW_PER_RANK:  # no budget, but messages still need a bound
            return min(width, k, math.ceil(mean + 2 * _deviations(mean))), share
        nbytes = int(self.budget * WORD_BYTES * mean)
        most = self.codec.entries_within(nbytes // 2, width, dtype)
        require(
            most > 0,
            f"Budgeted: a budget of {self.budget} words leaves no room for an entry; give more",
        )
        return min(width, k, most), min(share, most)


def _owned(mean: float, most: int) -> int:
    """Return how many of the k largest sums one rank may send: ``mean`` plus a margin, or ``most``."""
    return min(most, math.ceil(mean + _deviations(mean)))


def _deviations(mean: float) -> float:
    return _DEVIATIONS * (math.sqrt(mean) + 1)
