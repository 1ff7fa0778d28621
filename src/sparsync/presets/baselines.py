"""What Ok-Topk is compared with (Table 1, section 5.4), and the dense baselines."""

from __future__ import annotations

from sparsync.collectives import Allgather, Dense, Dynamic, GTopk, Ring
from sparsync.presets.base import Algorithm
from sparsync.selection import Everything, Exact, GaussianK
from sparsync.wire import StreamCodec
from sparsync.wire.base import Codec

__all__ = ["allgather", "dense", "gaussiank", "gtopk", "ring_dense", "topkdsa"]


def dense() -> Algorithm:
    """Plain allreduce of every element: the baseline."""
    return Algorithm("dense", Everything, Dense)


def ring_dense() -> Algorithm:
    """Allreduce of every element on a ring: SparCML's second dense baseline (section 8.1)."""
    return Algorithm("ring-dense", Everything, lambda: Ring(cap=None, dense=True))


def allgather(*, codec: Codec | None = None, cap: float | None = 1.0) -> Algorithm:
    """TopkA: exact local top-k, allgather, local sum (Ok-Topk, Table 1).

    Args:
        codec: wire format (default: coo).
        cap: at most ``cap * k`` entries per rank are taken; None: any number.
    """
    return Algorithm("allgather", Exact, lambda: Allgather(codec, cap))


def topkdsa(*, codec: StreamCodec | None = None) -> Algorithm:
    """TopkDSA: exact local top-k, SparCML's dynamic sparse allreduce (Ok-Topk, Table 1)."""
    return Algorithm("topkdsa", Exact, lambda: Dynamic(codec))


def gtopk(*, codec: Codec | None = None) -> Algorithm:
    """gTop-k: exact local top-k, top-k again at every node of a reduction tree (Shi et al., 2019).

    Args:
        codec: wire format (default: coo).
    """
    return Algorithm("gtopk", Exact, lambda: GTopk(codec))


def gaussiank(*, codec: Codec | None = None, cap: float | None = 2.0) -> Algorithm:
    """Gaussian-k: a threshold from mean and deviation, adjusted until 3 k / 4 are found; allgather.

    Args:
        codec: wire format (default: coo).
        cap: at most ``cap * k`` entries per rank are taken (ours: the estimate has no upper end).
    """
    return Algorithm("gaussiank", GaussianK, lambda: Allgather(codec, cap))
