"""RedSync's settings by name: RGC, and RGC with quantised values."""

from __future__ import annotations

from dataclasses import replace

from sparsync.algorithm import Algorithm
from sparsync.collectives import Allgather
from sparsync.collectives.costs import WORD_BYTES, Job
from sparsync.errors import require
from sparsync.published.redsync.selectors import BySize, Layered, OneSigned
from sparsync.published.redsync.sign_mean import SignMean
from sparsync.sparse import SparseVector
from sparsync.units import check_unit_bytes
from sparsync.wire.codec import Codec

__all__ = ["redsync", "redsync_quantized"]

_DENSE_BELOW = 128 * 1024  # bytes; section 5.4: an allreduce of smaller layers is cheaper
_SEARCH_FROM = 4 * 2**20  # bytes; section 5.4
_FUSION = 4 * 2**20  # bytes of gradient per message; section 5.3 gives no number
# average number of entries that a search selects, as a multiple of k; between 1 and 2
_SEARCHED = 1.5


def redsync(
    *,
    compress_thd: float = _DENSE_BELOW,
    thsd1: float | None = None,
    thsd2: float = _SEARCH_FROM,
    reuse_period: int = 5,
    cap: float | None = 2.0,
    codec: Codec[SparseVector] | None = None,
    fusion_bytes: int = _FUSION,
) -> Algorithm:
    """RGC: the k largest entries of every layer, by a method that suits its size (Algorithms 4 and 5).

    Use it with ``attach(ddp, algorithm="redsync", density=0.001, correction=...)``, where the correction
    is ``Correction(momentum=0.9, nesterov=True)``, and with SGD without momentum.  Fused layers are
    exchanged while the backward pass continues, or after it with ``Correction(clip=...)``.  The default
    size thresholds are the paper's, for 3.5 GB/s.

    Args:
        compress_thd: layers with fewer bytes are exchanged dense.
        thsd1: size in bytes from which trimmed top-k is used, instead of exact selection (default: exact
            selection is never used, as in section 5.4).
        thsd2: size in bytes from which a binary search with reuse is used.
        reuse_period: number of steps for which a threshold is used.
        cap: a rank sends at most ``cap * k`` entries per message (a search selects up to 2k).  With None,
            as published, there is no limit, but ranks need an extra round to exchange the lengths of
            messages.
        codec: wire format (default: coo, 32-bit indices and unchanged values).
        fusion_bytes: bytes of gradient per message (Horovod's tensor fusion).
    """
    require(compress_thd >= 0, f"compress_thd is {compress_thd}; give bytes >= 0")
    check_unit_bytes(fusion_bytes, "fusion_bytes")
    return Algorithm(
        "redsync",
        lambda: Layered(lambda: BySize(0, thsd1 or 0, thsd2, reuse_period, cap)),
        lambda: Allgather(codec, cap),
        # each layer has its own k (Algorithm 4), so layers do not compete for entries
        shared=False,
        unit_bytes=fusion_bytes,
        compress=lambda _, parameter: parameter.numel() * parameter.element_size() >= compress_thd,
        calls=_fused,
    )


def redsync_quantized(
    *,
    compress_thd: float = _DENSE_BELOW,
    thsd1: float | None = None,
    thsd2: float = _SEARCH_FROM,
    cap: float | None = 2.0,
    codec: Codec[SparseVector] | None = None,
    keep_error: bool = True,
    fusion_bytes: int = _FUSION,
) -> Algorithm:
    """Quantised RGC: steps send positive and negative entries alternately, with one mean for all values.

    The output layer is not quantised (section 5.2.3); it is exchanged as in "redsync".

    Args:
        compress_thd: as in "redsync".
        thsd1: as in "redsync".
        thsd2: as in "redsync", but with a new search on every step.
        cap: as in "redsync".
        codec: wire format (default: ``SignMean()``; ``SignMean("packed")`` is shorter).
        keep_error: whether the mean's rounding error stays in the residual; as published, it is lost.
        fusion_bytes: as in "redsync".
    """
    plain = redsync(
        compress_thd=compress_thd, thsd1=thsd1, thsd2=thsd2, cap=cap, fusion_bytes=fusion_bytes
    )
    return replace(
        plain,
        name="redsync-quantized",
        # thresholds are not reused, because the threshold for one sign says nothing about the other sign
        # ("can not be used with quantization", section 5.2.3)
        make_selector=lambda: Layered(lambda: OneSigned(BySize(0, thsd1 or 0, thsd2, 1, cap))),
        make_collective=lambda: Allgather(codec or SignMean(), cap, keep_error=keep_error),
        output=plain,
    )


def _fused(job: Job) -> tuple[int, Job]:
    """Treat the whole job as one layer in fused messages; searches select more than k entries."""
    nbytes = WORD_BYTES * job.size
    entries = min((_SEARCHED if nbytes >= _SEARCH_FROM else 1.0) * job.k, job.size)
    groups = max(-(-nbytes // _FUSION), 1)
    return groups, job._replace(k=entries / groups, size=-(-job.size // groups))
