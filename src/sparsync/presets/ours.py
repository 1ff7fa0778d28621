"""Our own algorithms; ``budgeted`` is the default of ``attach``."""

from __future__ import annotations

from sparsync.collectives import Budgeted, Halving, QuantizedAllgather
from sparsync.presets.base import Algorithm
from sparsync.selection import Everything, Exact
from sparsync.wire import Signs
from sparsync.wire.base import Codec

__all__ = ["budgeted", "halving", "signs"]

_SCALE_BITS = 32


def budgeted(*, codec: Codec | None = None, budget: float = 2.0) -> Algorithm:
    """Ours, the default: exact selection, hashed regions, packed bytes, a byte budget that holds.

    Args:
        codec: wire format (default: packed, bf16).
        budget: see ``sparsync.collectives.Budgeted``.
    """
    return Algorithm("budgeted", Exact, lambda: Budgeted(codec, budget=budget))


def halving(*, codec: Codec | None = None) -> Algorithm:
    """Ours, for many ranks: O(k) volume in O(log P) rounds; exact local selection, packed bytes."""
    return Algorithm("halving", Exact, lambda: Halving(codec))


def signs(*, block: int = 256) -> Algorithm:
    """One bit per element and a scale per block: for Adam's updates, which are all about as large.

    With ``LocalUpdates``, whose period makes up for sending every element.

    Args:
        block: consecutive elements that share a scale.
    """
    return Algorithm(
        "signs",
        Everything,
        lambda: QuantizedAllgather(Signs(block)),
        shared=False,
        bits=1 + _SCALE_BITS / block,
    )
