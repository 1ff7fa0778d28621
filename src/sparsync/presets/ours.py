"""Our own algorithms; ``budgeted`` is the default of ``attach``."""

from __future__ import annotations

from sparsync.collectives import Budgeted, Halving
from sparsync.presets.base import Algorithm
from sparsync.selection import Exact
from sparsync.wire.base import Codec

__all__ = ["budgeted", "halving"]


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
