"""Collectives of the ``Communicator``, built from point-to-point calls, for any world size.

Logarithmic ones run on a circulant graph: with skips ``s_0 = P, s_{i+1} = ceil(s_i / 2)`` down to 1
there are ``ceil(log2 P)`` rounds, and every block crosses each rank's port once.  For P a power of
two these are the rounds and volumes of recursive doubling and halving.

References: Bruck et al., IEEE TPDS 1997 (allgather); Träff, "Optimal, Non-pipelined Reduce-scatter
and Allreduce Algorithms", 2024 (the circulant reduce-scatter).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsync.transports.framing import Framing, Raw, Several

if TYPE_CHECKING:
    from sparsync.transports.base import Communicator, ReduceOp

__all__ = [
    "allgather",
    "allreduce",
    "alltoallv",
    "dissemination_allgatherv",
    "ring_allgatherv",
    "rounds",
]


def rounds(world_size: int) -> Iterator[tuple[int, int]]:
    """Yield ``(skip, count)``, widest round first: send ``count`` blocks ``skip`` ranks on.

    Example:
        >>> list(rounds(6)), sum(count for _, count in rounds(6))
        ([(3, 3), (2, 1), (1, 1)], 5)
    """
    wide = world_size
    while wide > 1:
        skip = (wide + 1) // 2
        yield skip, wide - skip
        wide = skip


async def allreduce(comm: Communicator, tensor: Tensor, phase: str, op: ReduceOp) -> Tensor:
    """Reduce-scatter, then allgather.  Cost: 2 ceil(log2 P) messages, 2 n (P - 1) / P elements."""
    world_size, size = comm.world_size, tensor.numel()
    width = -(-size // world_size)
    padded = tensor.new_zeros(width * world_size)
    padded[:size] = tensor.flatten()
    blocks = padded.view(world_size, width)  # block r belongs to rank r
    for skip, count in rounds(world_size):
        theirs = await _exchange(comm, blocks, comm.rank + skip, count, skip, phase)
        for i, block in enumerate(theirs):
            _combine_(blocks[(comm.rank + i) % world_size], block, op)
        await comm.work(theirs.numel() * theirs.element_size(), dense=True)
    for skip, count in reversed(list(rounds(world_size))):
        theirs = await _exchange(comm, blocks, comm.rank, count, -skip, phase)
        for i, block in enumerate(theirs):
            blocks[(comm.rank + skip + i) % world_size] = block
    return padded[:size].view(tensor.shape)


async def _exchange(
    comm: Communicator, blocks: Tensor, first: int, count: int, skip: int, phase: str
) -> Tensor:
    """Send ``count`` blocks from ``first`` on to ``rank + skip``; as many come from ``rank - skip``."""
    framing = Raw("value" if blocks.is_floating_point() else "control")
    world_size, width = blocks.shape
    first %= world_size
    ends = blocks[first : first + count], blocks[: max(first + count - world_size, 0)]
    payload = torch.cat(ends).view(-1).view(torch.uint8)
    source, dest = (comm.rank - skip) % world_size, (comm.rank + skip) % world_size
    receiving = comm.irecv(source, payload.numel(), phase, framing)
    sending = comm.isend(payload, dest, phase, framing)
    theirs: Tensor = await receiving
    await sending
    return theirs.to(blocks.device).view(blocks.dtype).view(count, width)


def _combine_(mine: Tensor, theirs: Tensor, op: ReduceOp) -> None:
    """``mine = mine op theirs``, in place."""
    if op == "sum":
        mine += theirs
    elif op == "max":
        torch.maximum(mine, theirs, out=mine)
    else:
        torch.minimum(mine, theirs, out=mine)


async def allgather(comm: Communicator, tensor: Tensor, phase: str) -> list[Tensor]:
    """Collect equal shapes.  Cost: ceil(log2 P) messages, (P - 1) n elements received."""
    payload = tensor.contiguous().reshape(-1).view(torch.uint8)
    framing = Raw("value" if tensor.is_floating_point() else "control")
    blocks = await comm.allgatherv(payload, [payload.numel()] * comm.world_size, phase, framing)
    # a received block may start at any byte: clone aligns it before the dtype is put back
    return [b.to(tensor.device).clone().view(tensor.dtype).view(tensor.shape) for b in blocks]


async def dissemination_allgatherv(
    comm: Communicator, payload: Tensor, capacities: Sequence[int], phase: str, framing: Framing
) -> list[Tensor]:
    """Collect one message per rank.  Cost: ceil(log2 P) messages; all others' bytes received.

    A message is sent again in every round by the ranks that hold it early, its owner first: when
    one rank holds most bytes it sends them up to ceil(log2 P) times (the ring sends them once).
    """
    world_size, rank = comm.world_size, comm.rank
    blocks = [payload.to(comm.device)]  # blocks[i] belongs to rank + i
    for skip, count in reversed(list(rounds(world_size))):
        around = [capacities[(rank + i) % world_size] for i in range(skip + count)]
        outgoing, expected = Several(framing, around[:count]), Several(framing, around[skip:])
        source, dest = (rank + skip) % world_size, (rank - skip) % world_size
        receiving = comm.irecv(source, sum(around[skip:]), phase, expected)
        sending = comm.isend(torch.cat(blocks[:count]), dest, phase, outgoing)
        blocks += expected.cut(await receiving)
        await sending
    return [blocks[(r - rank) % world_size] for r in range(world_size)]


async def ring_allgatherv(
    comm: Communicator, payload: Tensor, capacities: Sequence[int], phase: str, framing: Framing
) -> list[Tensor]:
    """Collect one message per rank.  Cost: P - 1 messages; sent and received at most the total."""
    world_size, rank = comm.world_size, comm.rank
    blocks = {rank: payload.to(comm.device)}
    for hop in range(world_size - 1):
        passing, coming = (rank - hop) % world_size, (rank - hop - 1) % world_size
        receiving = comm.irecv((rank - 1) % world_size, capacities[coming], phase, framing)
        sending = comm.isend(blocks[passing], (rank + 1) % world_size, phase, framing)
        blocks[coming] = await receiving
        await sending
    return [blocks[r] for r in range(world_size)]


async def alltoallv(
    comm: Communicator,
    payloads: Sequence[Tensor],
    capacities: Sequence[int],
    phase: str,
    framing: Framing,
) -> list[Tensor]:
    """Exchange one message with every rank, destinations rotated (rank + 1, rank + 2, ...)."""
    world_size, rank = comm.world_size, comm.rank
    receiving, sending = {}, []
    for shift in range(1, world_size):
        source, dest = (rank - shift) % world_size, (rank + shift) % world_size
        receiving[source] = comm.irecv(source, capacities[source], phase, framing)
        sending.append(comm.isend(payloads[dest], dest, phase, framing))
    received = {rank: payloads[rank].to(comm.device)}
    for source, operation in receiving.items():
        received[source] = await operation
    for operation in sending:
        await operation
    return [received[r] for r in range(world_size)]
