"""Sums over a group whose messages are rounded, and the memory of what rounding took away."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError
from sparsync.transports.base import Communicator
from sparsync.wire import DenseCodec, Qsgd, Whole
from sparsync.wire.base import MessageFraming

__all__ = ["CodedSum", "Values", "codec_of", "coded_allreduce"]

Values = Literal["fp32", "bf16", "int8"]

_INT8_BLOCK: Final = 128  # elements that share a float32 scale, as in ``Packed``: 8.25 bits each
_CODECS: Final = MappingProxyType[str, DenseCodec](
    {"bf16": Whole(torch.bfloat16), "int8": Qsgd(8, block=_INT8_BLOCK, scale="max")}
)


class CodedSum(NamedTuple):
    """A sum of rounded vectors.

    Attributes:
        total: `[n]`, equal on all members.
        lost: `[n]`, what rounding this rank's vector took from ``total``.
        lost_of_sum: `[n]`, what rounding the sum took from it, in this rank's block.
    """

    total: Tensor
    lost: Tensor
    lost_of_sum: Tensor


def codec_of(values: Values) -> DenseCodec | None:
    """Return how values travel; None: as they are.

    Raises:
        ConfigurationError: unknown.

    Example:
        >>> codec_of("fp32"), codec_of("bf16")
        (None, Whole(torch.bfloat16))
    """
    if values not in get_args(Values):
        raise ConfigurationError(f"values is {values!r}; choose fp32, bf16 or int8")
    return _CODECS.get(values)


async def coded_allreduce(
    comm: Communicator, vector: Tensor, codec: DenseCodec, seed: int
) -> CodedSum:
    """Sum over a group: every member sums one block of rounded vectors, and sends the rounded sum.

    Args:
        comm: the group.
        vector: `[n]` of this rank.
        codec: of all messages.
        seed: of the codec's draws, with the rank.

    Cost: S - 1 + ceil(log2 S) messages; 2 n (S - 1) / S elements, rounded.
    """
    size, mine = vector.numel(), comm.rank
    width = -(-size // comm.world_size)
    blocks = [vector[min(r * width, size) :][:width] for r in range(comm.world_size)]
    codec = codec.seeded(comm.rank, seed)
    framing = MessageFraming(codec)
    encoded = [codec.encode(block) for block in blocks]
    lost = vector - torch.cat([one.decoded for one in encoded])
    lost[mine * width :][:width] = 0  # this rank sums its own block, which is not rounded
    capacity = codec.nbytes(width, vector.dtype)
    parcels = [one.payload for one in encoded]
    came = await comm.alltoallv(parcels, [capacity] * comm.world_size, "average", framing)
    total = torch.zeros_like(blocks[mine])
    for rank, message in enumerate(came):
        own = rank == mine
        total += blocks[mine] if own else codec.decode(message, len(total)).to(vector.dtype)
    rounded = codec.encode(total)
    lost_of_sum = torch.zeros_like(vector)
    lost_of_sum[mine * width :][:width] = total - rounded.decoded
    capacities = [codec.nbytes(len(block), vector.dtype) for block in blocks]
    sums = await comm.allgatherv(rounded.payload, capacities, "average", framing)
    whole = [codec.decode(raw, len(blocks[r])).to(vector.dtype) for r, raw in enumerate(sums)]
    return CodedSum(torch.cat(whole), lost, lost_of_sum)
