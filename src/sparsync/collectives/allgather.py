"""Allgather: every rank collects every rank's vector and sums them locally."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from sparsync.collectives.collective import (
    Collective,
    Reduced,
    capped,
    check_cap,
    less,
    most_entries,
)
from sparsync.collectives.costs import Cost, Job, allgatherv
from sparsync.sparse import SparseVector, Vector
from sparsync.transports.communicator import Communicator
from sparsync.wire.codec import Codec, MessageFraming
from sparsync.wire.coo import Coo
from sparsync.wire.messages import sum_messages

__all__ = ["Allgather"]


@final
class Allgather(Collective):
    """Sums vectors with an allgather and a local merge in rank order (TopkA).

    The allgather uses recursive doubling if P is a power of two, otherwise dissemination.  Message
    headers carry the counts.

    Args:
        codec: wire format of the entries (default: coo).
        cap: a rank sends at most ``cap * k`` entries; None for no limit.
        keep_error: whether the sender keeps the codec's rounding error; if not, the error is lost, as in
            RedSync.

    Cost: ceil(log2 P) messages; a rank sends 2 k (P - 1) words and receives as many.   State: none.
    Differs from the paper: a rank sends at most ``cap * k`` entries (``cap=None``: no limit, but an extra
    round announces the lengths).

    Example:
        >>> from sparsync.transports.sim import simulate
        >>> async def program(comm):
        ...     mine = SparseVector.from_dense(torch.eye(4)[comm.rank])
        ...     return (await Allgather().reduce(comm, mine, k=1, step=0)).total.to_dense().tolist()
        >>> simulate(program, world_size=3).results[2]
        [1.0, 1.0, 1.0, 0.0]

    References: Ok-Topk, Table 1, "TopkA"; Renggli et al., SparCML, SC 2019.
    """

    def __init__(
        self,
        codec: Codec[SparseVector] | None = None,
        cap: float | None = 1.0,
        *,
        keep_error: bool = True,
    ) -> None:
        check_cap(cap, "Allgather")
        self.codec = codec or Coo()
        self.cap, self.keep_error = cap, keep_error

    def for_layers(self, sizes: Sequence[int]) -> Allgather:
        """Return a copy whose codec knows the sizes of the layers."""
        return Allgather(self.codec.for_layers(sizes), self.cap, keep_error=self.keep_error)

    def cost(self, job: Job) -> Cost:
        """Return ``2 k (P - 1)`` words and P - 1 headers, ``log2 P`` messages (Ok-Topk, Table 1).

        Example:
            >>> Allgather().cost(Job(10**6, k=1000, world_size=4)).words
            6006.0
        """
        sent = allgatherv(self.codec.nbytes(round(job.k), job.size), job.world_size)
        decoded = (job.world_size - 1) * job.k
        return sent + Cost(0, 0, encoded=job.k, decoded=decoded, turns=sent.messages)

    def promised_words(self, job: Job, *, exchangeable: bool) -> float | None:
        """Return the words of ``cost`` if they are a bound (cap 1, exact codec), otherwise None."""
        return self.cost(job).words if self.cap == 1 and self.codec.exact else None

    async def reduce(self, comm: Communicator, selected: Vector, k: int, step: int) -> Reduced:
        """Gather the entries of all ranks, then merge them in rank order."""
        codec, size, dtype = self.codec, selected.size, selected.values.dtype
        mine = capped(selected, k, self.cap)
        with comm.stage("pack"):
            encoded = codec.seeded(comm.rank, step).encode(mine)
        # Receivers must know a message's capacity before it arrives.  With a cap, it follows from k,
        # which is equal on all ranks; without a cap, an extra round announces the lengths.
        if self.cap is None:
            length = torch.tensor([encoded.payload.numel()], device="cpu")
            capacities = [int(t) for t in await comm.allgather(length, "sizes")]
        else:
            most = most_entries(k, self.cap, size)
            capacities = [codec.nbytes(most, size, dtype)] * comm.world_size
        framing = MessageFraming(codec)
        messages = await comm.allgatherv(encoded.payload, capacities, "allgather", framing)
        with comm.stage("unpack"):
            await comm.work(sum(m.numel() for m in messages))
            # Use this rank's share as other ranks decode it, and keep rank order.  All ranks then add
            # the same numbers in the same order, and get the same bits.
            shares = [
                encoded.decoded if rank == comm.rank else m for rank, m in enumerate(messages)
            ]
            total = sum_messages(codec, shares, mine)
        if self.keep_error or codec.is_exact(dtype):
            return Reduced(total, encoded.decoded)
        # count all of ``mine`` as delivered, so that no residual keeps the rounding error
        return Reduced(total, mine, less(mine, [encoded.decoded]))
