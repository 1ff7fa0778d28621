"""What our own collectives cost: their bytes depend on the codec, not on words of 4 bytes."""

from __future__ import annotations

import math

from sparsync.planning.cost import Cost
from sparsync.transports.primitives import rounds
from sparsync.wire.base import Codec
from sparsync.wire.packed import Packed
from sparsync.wire.whole import DenseCodec

__all__ = ["budgeted", "halving", "quantized_allgather"]


def budgeted(
    k: int,
    size: int,
    world_size: int,
    *,
    codec: Codec,
) -> Cost:
    """Return what ``collectives.Budgeted`` costs, on the mean of ranks and steps.

    Each rank sends every other its share of k entries, then its largest sums: k / P entries, and
    k / P + 4 sqrt(k / P) + 4, packed, of n / P elements.  ``lower_bound_words`` bounds every step.

    Args:
        k: entries asked for.
        size: elements n of the vector.
        world_size: P.
        codec: wire format.

    Example:
        >>> from sparsync.wire import Packed
        >>> from sparsync.planning.cost import lower_bound_words
        >>> cost = budgeted(147_283, 14_728_266, 8, codec=Packed())
        >>> cost.messages, round(cost.words / lower_bound_words(147_283, 8), 2)
        (14, 0.78)
    """
    width, mean = -(-size // world_size), k / world_size
    share = min(width, k, math.ceil(mean + 4 * (math.sqrt(mean) + 1)))
    pair = codec.nbytes(round(mean), width) + codec.nbytes(share, width)
    return Cost(2 * (world_size - 1), (world_size - 1) * pair)


def halving(k: int, size: int, world_size: int, *, codec: Codec | None = None) -> Cost:
    """Bound what ``collectives.Halving`` costs on any input: blocks of ceil(k / P) entries.

    Args:
        k: entries asked for.
        size: elements n of the vector.
        world_size: P.
        codec: wire format; default packed, bf16.

    Example:
        >>> halving(147_283, 14_728_266, 8).messages
        6
    """
    codec = codec or Packed()
    quota, width = -(-k // world_size), -(-size // world_size)
    own = codec.nbytes(min(quota, width), width)
    scattered = sum(
        codec.nbytes(min(quota, width) * count, width * count) for _, count in rounds(world_size)
    )
    return Cost(2 * (world_size - 1).bit_length(), scattered + own * (world_size - 1))


def quantized_allgather(size: int, world_size: int, *, codec: DenseCodec) -> Cost:
    """Return what ``collectives.QuantizedAllgather`` costs: every rank gets all others' vectors.

    Args:
        size: elements n of the vector.
        world_size: P.
        codec: wire format.

    Example:
        >>> from sparsync.wire import Signs
        >>> quantized_allgather(2048, 4, codec=Signs())  # 3 messages' worth of 16 + 8 * 4 + 256
        Cost(messages=2, nbytes=912)
    """
    return Cost((world_size - 1).bit_length(), (world_size - 1) * codec.nbytes(size))
