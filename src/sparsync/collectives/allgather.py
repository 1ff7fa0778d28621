"""Allgather: every rank collects every rank's vector and sums them locally."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from sparsync.collectives.base import Collective, Reduced, capped, check_cap, less, most_entries
from sparsync.collectives.costs import Cost, Job, Result, allgatherv
from sparsync.sparse import DenseVector, SparseVector, Vector
from sparsync.transports.communicator import Communicator
from sparsync.wire.base import Codec, MessageFraming
from sparsync.wire.messages import sum_messages
from sparsync.wire.streams import Coo

__all__ = ["Allgather"]


@final
class Allgather(Collective):
    """Sum vectors by an allgather and a local merge in rank order (TopkA).

    Recursive doubling for P a power of two, dissemination otherwise.  Counts travel in the message
    headers; nothing is announced beforehand.  With a dense codec whole vectors travel, in few bits per
    element: for vectors of which all elements are about equally large (Adam's updates), one bit of each
    says more than a few exact entries.

    Args:
        codec: wire format of the entries (default: coo), or of all elements, e.g. ``LloydMax(1)``.
        cap: at most ``cap * k`` entries per rank are taken; None: any number.
        keep_error: what the codec rounds away is kept by the sender; False: it is lost, as published
            by RedSync.

    Cost: ceil(log2 P) messages; 2 k (P - 1) words received, as many sent; of signs (P - 1) n / 32, and
    (P - 1) n / 256 of scales (from P = 57 on, ``Dense`` moves less).   State: none.
    Differs from the paper: at most ``cap * k`` entries per rank are taken (``cap=None``: any number,
    at the price of one round that announces the lengths).  1-bit Adam gathers regions, sums them and
    rounds the sums again; here is one rounding, and one error to keep.

    Example:
        >>> from sparsync.transports.sim import simulate
        >>> async def program(comm):
        ...     mine = SparseVector.from_dense(torch.eye(4)[comm.rank])
        ...     return (await Allgather().reduce(comm, mine, k=1, step=0)).total.to_dense().tolist()
        >>> simulate(program, world_size=3).results[2]
        [1.0, 1.0, 1.0, 0.0]

    References: Ok-Topk, Table 1, "TopkA"; Renggli et al., SparCML, SC 2019; Tang et al., 1-bit Adam,
    ICML 2021; Seide et al., 1-bit SGD, Interspeech 2014.
    """

    def __init__(
        self, codec: Codec[Any] | None = None, cap: float | None = 1.0, *, keep_error: bool = True
    ) -> None:
        check_cap(cap, "Allgather")
        self.codec: Codec[Any] = codec or Coo()
        self.cap, self.keep_error = cap, keep_error
        self.result: Result = "whole" if self.codec.is_dense else "sum"

    def for_layers(self, sizes: Sequence[int]) -> Allgather:
        """Return one whose codec knows the layers."""
        return Allgather(self.codec.for_layers(sizes), self.cap, keep_error=self.keep_error)

    def cost(self, job: Job) -> Cost:
        """Return ``2 k (P - 1)`` words and P - 1 headers, ``log2 P`` messages (Ok-Topk, Table 1).

        Example:
            >>> Allgather().cost(Job(10**6, k=1000, world_size=4)).words
            6006.0
        """
        entries = job.size if self.codec.is_dense else job.k
        sent = allgatherv(self.codec.nbytes(round(entries), job.size), job.world_size)
        decoded = (job.world_size - 1) * entries
        return sent + Cost(0, 0, encoded=entries, decoded=decoded, turns=sent.messages)

    def promised_words(self, job: Job, *, exchangeable: bool) -> float | None:
        """Return the cost of k entries: a cap of 1 lets no more through."""
        return self.cost(job).words if self.cap == 1 and self.codec.exact else None

    async def reduce(self, comm: Communicator, selected: Vector, k: int, step: int) -> Reduced:
        """Collect, then merge."""
        codec, size, dtype = self.codec, selected.size, selected.values.dtype
        mine: Vector
        if codec.is_dense:
            mine, most = DenseVector(selected.to_dense()), size
        else:
            mine, most = capped(selected, k, self.cap), most_entries(k, self.cap, size)
        with comm.stage("pack"):
            encoded = codec.seeded(comm.rank, step).encode(mine)
        if self.cap is None and not codec.is_dense:
            length = torch.tensor([encoded.payload.numel()])
            capacities = [int(t) for t in await comm.allgather(length, "sizes")]
        else:
            capacities = [codec.nbytes(most, size, dtype)] * comm.world_size
        framing = MessageFraming(codec)
        messages = await comm.allgatherv(encoded.payload, capacities, "allgather", framing)
        with comm.stage("unpack"):
            await comm.work(sum(m.numel() for m in messages))
            shares = [
                encoded.decoded if rank == comm.rank else m for rank, m in enumerate(messages)
            ]
            total = _sum(codec, shares, mine)
        if isinstance(mine, SparseVector) and not (self.keep_error or codec.is_exact(dtype)):
            return Reduced(total, mine, less(mine, [encoded.decoded]))
        return Reduced(total, encoded.decoded)


def _sum(codec: Codec[Any], shares: Sequence[Vector | Tensor], like: Vector) -> Vector:
    if isinstance(like, SparseVector):
        return sum_messages(codec, [s for s in shares if not isinstance(s, DenseVector)], like)
    total = torch.zeros_like(like.values)
    for share in shares:
        vector = codec.decode(share, like.size) if isinstance(share, Tensor) else share
        total += vector.values.to(total.device)
    return DenseVector(total)
