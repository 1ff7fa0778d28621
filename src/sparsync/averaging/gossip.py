"""What all synchronous gossip has in common: a message to each neighbour, one from each source."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsync.averaging.graphs import Graph
from sparsync.transports.base import Communicator
from sparsync.transports.framing import Raw

__all__ = ["exchange"]


async def exchange(
    comm: Communicator, graph: Graph, message: Tensor, step: int, phase: str
) -> list[Tensor]:
    """Send ``message`` to all neighbours; return those that came, and the own one, by rank.

    Args:
        comm: the group.
        graph: who sends to whom at ``step``.
        message: `[m]`, of equal length and dtype on all ranks; not modified.
        step: 0-based.
        phase: name in the ledger.

    Cost: as many messages of m elements as there are neighbours and sources.
    """
    payload = message.view(torch.uint8)
    sources = graph.sources(comm.rank, comm.world_size, step)
    dests = graph.neighbours(comm.rank, comm.world_size, step)
    receiving = {s: comm.irecv(s, payload.numel(), phase, Raw("value")) for s in sources}
    sending = [comm.isend(payload, d, phase, Raw("value")) for d in dests]
    messages = {comm.rank: message}
    for source, operation in receiving.items():
        messages[source] = (await operation).to(message.device).view(message.dtype)
    for operation in sending:
        await operation
    return [messages[rank] for rank in sorted(messages)]  # sums do not depend on arrival
