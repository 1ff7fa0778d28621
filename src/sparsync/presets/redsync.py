"""RedSync: residual gradient compression, layer by layer, in fused messages that are allgathered.

References: Fang, Hsieh et al., "RedSync: Reducing Synchronization Traffic for Distributed Deep
Learning", 2018.
"""

from __future__ import annotations

from torch import Tensor

from sparsync.collectives import Allgather
from sparsync.presets.base import Algorithm
from sparsync.selection import BySize, Layered, OneSigned
from sparsync.wire import Codec, SignMean

__all__ = ["redsync", "redsync_quantized"]

_DENSE_BELOW = 128 * 1024  # bytes, section 5.4: allreduce is cheaper than compressing
_SEARCH_FROM = 4 * 2**20  # bytes, section 5.4
_FUSION = 4 * 2**20  # bytes of gradient per message: section 5.3 fuses, and gives no number


def redsync(
    *,
    compress_thd: float = _DENSE_BELOW,
    thsd1: float | None = None,
    thsd2: float = _SEARCH_FROM,
    reuse_period: int = 5,
    cap: float | None = 2.0,
    codec: Codec | None = None,
    fusion_bytes: int = _FUSION,
) -> Algorithm:
    """RGC: the k largest of every layer, by the method that suits its size (Algorithms 4 and 5).

    ``attach(ddp, "redsync", density=0.001, correction=Correction(momentum=0.9, nesterov=True))``, with
    an SGD that has no momentum of its own.  Layers of a fused group are exchanged while the backward
    pass goes on; with ``Correction(clip=...)`` after it.

    Args:
        compress_thd: layers of fewer bytes are exchanged dense.
        thsd1: from so many bytes on trimmed, not exact, top-k (default: all, as in section 5.4).
        thsd2: from so many bytes on binary search, with reuse.
        reuse_period: steps that a threshold serves.
        cap: at most ``cap * k`` entries per rank and group are taken (a search finds up to 2 k); None:
            any number, at the price of a round for the lengths.
        codec: wire format (default: coo, 32-bit indices and the values as they are).
        fusion_bytes: gradients that travel in one message (Horovod's tensor fusion).

    The thresholds that are given are the paper's, for 3.5 GB/s; those of the network at hand:

    Example:
        >>> from sparsync.planning.redsync_costs import size_thresholds
        >>> dense_below, exact_below, trimmed_below = size_thresholds(8, 0.001, alpha=0, beta=8e-9)
        >>> redsync(compress_thd=dense_below, thsd1=exact_below, thsd2=trimmed_below).name
        'redsync'
    """
    return Algorithm(
        "redsync",
        lambda: Layered(lambda: BySize(0, thsd1 or 0, thsd2, reuse_period, cap)),
        lambda: Allgather(codec, cap),
        shared=False,
        unit_bytes=fusion_bytes,
        compress=lambda name, parameter: _nbytes(parameter) >= compress_thd,
        corrects=True,
    )


def redsync_quantized(
    *,
    compress_thd: float = _DENSE_BELOW,
    thsd1: float | None = None,
    thsd2: float = _SEARCH_FROM,
    cap: float | None = 2.0,
    codec: Codec | None = None,
    keep_error: bool = True,
    fusion_bytes: int = _FUSION,
) -> Algorithm:
    """Quantised RGC: entries of one sign, the other on the next step, and one mean for them.

    The output layer is not quantised (section 5.2.3): it goes as in "redsync", in messages of its own.

    Args:
        compress_thd: as in "redsync".
        thsd1: likewise.
        thsd2: likewise; the search is new on every step.
        cap: likewise.
        codec: wire format (default: ``SignMean()``; ``SignMean("packed")`` is ours).
        keep_error: what the mean rounds away stays in the residual; False, as published: it is lost.
        fusion_bytes: as in "redsync".
    """
    return Algorithm(
        "redsync-quantized",
        lambda: Layered(lambda: OneSigned(BySize(0, thsd1 or 0, thsd2, 1, cap))),
        lambda: Allgather(codec or SignMean(), cap, keep_error=keep_error),
        shared=False,
        unit_bytes=fusion_bytes,
        compress=lambda name, parameter: _nbytes(parameter) >= compress_thd,
        corrects=True,
        output=redsync(thsd1=thsd1, thsd2=thsd2, cap=cap),
    )


def _nbytes(parameter: Tensor) -> int:
    return parameter.numel() * parameter.element_size()
