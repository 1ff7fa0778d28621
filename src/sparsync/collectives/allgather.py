"""TopkA: every rank collects every rank's entries and sums them locally."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from sparsync.collectives.base import Collective, Reduced, capped, check_cap, most_entries
from sparsync.sparse import SparseVector, Vector
from sparsync.transports.base import Communicator
from sparsync.wire.base import Codec, MessageFraming
from sparsync.wire.coo import Coo

__all__ = ["Allgather"]


@final
class Allgather(Collective):
    """Sum sparse vectors by an allgather of the entries and a local merge in rank order.

    Recursive doubling for P a power of two, dissemination otherwise.  Counts travel in the message
    headers; nothing is announced beforehand.

    Args:
        codec: wire format of the entries (default: coo).
        cap: at most ``cap * k`` entries per rank are taken; None: any number.
        keep_error: what the codec rounds away is kept by the sender; False: it is lost, as published
            by RedSync.

    Cost: ceil(log2 P) messages; 2 k (P - 1) words received, as many sent (`costs.allgather`).
    State: none.
    Differs from the paper: at most ``cap * k`` entries per rank are taken (``cap=None``: any number,
    at the price of one round that announces the lengths).

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
        self, codec: Codec | None = None, cap: float | None = 1.0, *, keep_error: bool = True
    ) -> None:
        check_cap(cap, "Allgather")
        self.codec, self.cap, self.keep_error = codec or Coo(), cap, keep_error

    def for_layers(self, sizes: Sequence[int]) -> Allgather:
        """Return one whose codec knows the layers."""
        return Allgather(self.codec.for_layers(sizes), self.cap, keep_error=self.keep_error)

    async def reduce(self, comm: Communicator, selected: Vector, k: int, step: int) -> Reduced:
        """Collect, then merge."""
        mine = capped(selected, k, self.cap)
        with comm.stage("pack"):
            encoded = self.codec.seeded(comm.rank, step).encode(mine)
        if self.cap is None:
            length = torch.tensor([encoded.payload.numel()])
            capacities = [int(t) for t in await comm.allgather(length, "sizes")]
        else:
            most = most_entries(k, self.cap, mine.size)
            capacities = [self.codec.nbytes(most, mine.size, mine.values.dtype)] * comm.world_size
        messages = await comm.allgatherv(
            encoded.payload, capacities, "allgather", MessageFraming(self.codec)
        )
        device = mine.values.device
        with comm.stage("unpack"):
            shares = [
                encoded.decoded if rank == comm.rank else self.codec.decode(m, mine.size).to(device)
                for rank, m in enumerate(messages)
            ]
            await comm.work(sum(m.numel() for m in messages))
            total = SparseVector.merge(shares)
        if self.keep_error or self.codec.is_exact(mine.values.dtype):
            return Reduced(total, encoded.decoded)
        arrived = SparseVector(mine.indices, -encoded.decoded.values, mine.size)
        return Reduced(total, mine, SparseVector.merge([mine, arrived]))
