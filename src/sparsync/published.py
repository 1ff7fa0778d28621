"""Algorithms with settings of their own: Ok-Topk, RedSync and SparCML as published, and bounded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

from torch import Tensor

from sparsync.algorithm import Algorithm
from sparsync.collectives import Allgather, Dynamic, OkTopk
from sparsync.collectives.costs import WORD_BYTES, Job
from sparsync.errors import ConfigurationError, require
from sparsync.selection import Blockwise, BySize, Layered, OneSigned, Reused
from sparsync.sparse import SparseVector
from sparsync.wire import Qsgd, SignMean, SparseQsgd, StreamCodec
from sparsync.wire.base import Codec

__all__ = ["SPARCML_SETTINGS", "oktopk", "oktopk_paper", "redsync", "redsync_quantized", "sparcml"]

_DENSE_BELOW = 128 * 1024  # bytes; RedSync, section 5.4: allreduce is cheaper than compressing
_SEARCH_FROM = 4 * 2**20  # bytes; RedSync, section 5.4
_FUSION = 4 * 2**20  # bytes of gradient per message; RedSync, section 5.3, gives no number
_SEARCHED = 1.5  # entries that a search selects, over k: it stops between 1 and 2
_BLOCK = 512  # SparCML, section 8.3: k of every 512 consecutive elements


# ---- Ok-Topk (Li & Hoefler, PPoPP 2022) -------------------------------------------------------------


def oktopk(
    *,
    threshold_period: int | Literal["auto"] = 32,
    cap: float | None = 1.0,
    floor: float | None = 2 / 3,
    **options: Any,
) -> Algorithm:
    """Ok-Topk with histogram cuts, histogram threshold and a cap: a volume bound on every step.

    The bound supposes that supports lie where they were on the step before (the paper: 64 steps
    before), and k / P >= 256.

    Args:
        threshold_period: tau', steps between exact local thresholds (paper, section 5.2: 32); "auto":
            renewed when the local count leaves a band of 11 % around k, by each rank for itself.
        cap: at most ``cap * k`` entries are taken, locally and globally.
        floor: a step that finds fewer than ``floor * k`` local entries is made exact (early in training
            a threshold reused for 32 steps finds 0.03 to 0.1 k, benchmarks/threshold_period.md); None:
            never, as published.
        options: see ``sparsync.collectives.OkTopk``.
    """
    if cap is not None and floor is not None:
        floor = min(floor, cap)
    if threshold_period != "auto":
        options["threshold_period"] = threshold_period  # of the global threshold as well
    elif options.get("global_threshold", "histogram") != "histogram":
        raise ConfigurationError(
            "oktopk: threshold_period='auto' needs global_threshold='histogram', which is exact on "
            "every step; give a number of steps, or omit global_threshold"
        )
    return Algorithm(
        "oktopk",
        lambda: Reused(threshold_period, cap, floor),
        lambda: OkTopk(cap=cap, **options),
    )


def oktopk_paper(*, threshold_period: int = 32, **options: Any) -> Algorithm:
    """Ok-Topk as published: averaged boundaries, allgathered threshold, no cap.

    Args:
        threshold_period: tau' (paper, section 5.2: 32 for VGG and LSTM, 128 for BERT).
        options: see ``sparsync.collectives.OkTopk``; tau = 64 (section 3.1.1), trigger 4 (5.3).
    """
    published = {
        "boundaries": "average",
        "global_threshold": "allgather",
        "cap": None,
        "repartition_trigger": None,
    }
    return Algorithm(
        "oktopk-paper",
        lambda: Reused(threshold_period, cap=None),
        lambda: OkTopk(threshold_period=threshold_period, **{**published, **options}),
    )


# ---- RedSync (Fang et al., 2018) --------------------------------------------------------------------


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
    """RGC: the k largest of every layer, by the method that suits its size (Algorithms 4 and 5).

    For ``attach(ddp, algorithm="redsync", density=0.001, correction=...)`` with
    ``Correction(momentum=0.9, nesterov=True)`` and an SGD without momentum.  Layers of a fused group
    are exchanged while the backward pass continues; with ``Correction(clip=...)`` after it.  The default
    sizes are the paper's, for 3.5 GB/s.

    Args:
        compress_thd: layers of fewer bytes are exchanged dense.
        thsd1: bytes from which top-k is trimmed, not exact (default: all, as in section 5.4).
        thsd2: bytes from which it is a binary search, with reuse.
        reuse_period: steps that a threshold serves.
        cap: at most ``cap * k`` entries per rank and group are taken (a search finds up to 2 k); None:
            any number, at the price of a round for the lengths.
        codec: wire format (default: coo, 32-bit indices and the values as they are).
        fusion_bytes: gradients that travel in one message (Horovod's tensor fusion).
    """
    return Algorithm(
        "redsync",
        lambda: Layered(lambda: BySize(0, thsd1 or 0, thsd2, reuse_period, cap)),
        lambda: Allgather(codec, cap),
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
    """Quantised RGC: entries of one sign, the other on the next step, and one mean for them.

    The output layer is not quantised (section 5.2.3), and is exchanged as in "redsync".

    Args:
        compress_thd: as in "redsync".
        thsd1: likewise.
        thsd2: likewise; the search is new on every step.
        cap: likewise.
        codec: wire format (default: ``SignMean()``; ``SignMean("packed")`` is shorter).
        keep_error: what the mean rounds away stays in the residual; False, as published: it is lost.
        fusion_bytes: as in "redsync".
    """
    plain = redsync(
        compress_thd=compress_thd, thsd1=thsd1, thsd2=thsd2, cap=cap, fusion_bytes=fusion_bytes
    )
    return replace(
        plain,
        name="redsync-quantized",
        make_selector=lambda: Layered(lambda: OneSigned(BySize(0, thsd1 or 0, thsd2, 1, cap))),
        make_collective=lambda: Allgather(codec or SignMean(), cap, keep_error=keep_error),
        output=plain,
    )


def _fused(job: Job) -> tuple[int, Job]:
    """Take all for one layer, in fused messages: a search finds more than k."""
    nbytes = WORD_BYTES * job.size
    entries = min((_SEARCHED if nbytes >= _SEARCH_FROM else 1.0) * job.k, job.size)
    groups = max(-(-nbytes // _FUSION), 1)
    return groups, job._replace(k=entries / groups, size=-(-job.size // groups))


# ---- SparCML (Renggli et al., SC 2019) --------------------------------------------------------------


def sparcml(
    *,
    bits: Literal[2, 4, 8] | None = 4,
    quantize: Literal["local", "reduced"] = "local",
    keep_error: bool = False,
    scale: Literal["l2", "max"] = "max",
    quantization_block: int | None = None,
    block: int = _BLOCK,
    seed: int = 0,
) -> Algorithm:
    """SparCML's quantised top-k SGD (Algorithm 1): layer by layer, and sums, not means.

    ``attach(model, algorithm="sparcml", density=16 / 512)``: every parameter is a unit, exchanged
    as soon as its gradient is there; a learning rate that was tuned for means is to be divided
    by world_size.
    ``attach(model, **SPARCML_SETTINGS["cifar-10"])`` is what the paper used.

    Args:
        bits: of a quantised value; None: no quantisation (ATIS, Hansards).
        quantize: "local": what ranks select (Algorithm 1); "reduced": what becomes dense on the way,
            in the second half of the dynamic collective (section 6).
        keep_error: keep the local quantisation error in the residual.  QSGD is unbiased but not
            contractive, and its error fed back explodes: True shrinks the decoded values by
            ``1 / (1 + omega)``, which makes it so.  False, as published: the error is lost, and
            reported.
        scale: of a quantisation block: "max" or "l2" (the paper does not say; QSGD proves its bounds for
            "l2" and uses "max" in its experiments, whose noise is several times smaller).
        quantization_block: entries that share a scale.  Default: 1024 for "local" (section 6); 256 for
            "reduced", where 4 bits are still contractive on every input (1024 are not).
        block: consecutive elements of which ``density * block`` are selected (section 8.3: 512).
        seed: of the random rounding.

    Raises:
        ConfigurationError: "reduced" with a quantiser whose kept error would explode.
    """
    require(quantize in ("local", "reduced"), f"quantize is {quantize!r}; choose local or reduced")
    shrink = keep_error if quantize == "local" else False
    quantization_block = quantization_block or (1024 if quantize == "local" else 256)
    arguments: dict[str, Any] = {
        "bits": bits, "block": quantization_block, "scale": scale, "shrink": shrink, "seed": seed
    }  # fmt: skip

    def make() -> Dynamic:
        if bits is None:
            return Dynamic(cap=None)
        if quantize == "local":
            return Dynamic(cap=None, local=SparseQsgd(**arguments), keep_error=keep_error)
        rounding = Qsgd(**arguments)
        if not rounding.contractive:
            raise ConfigurationError(
                f"sparcml: {bits} bits over blocks of {quantization_block} with scale '{scale}' are "
                "not contractive, and the error of a reduced sum is kept: it would explode; use "
                "more bits, smaller quantization blocks or scale='max'"
            )
        return Dynamic(StreamCodec(dense=rounding), cap=None)

    def calls(job: Job) -> tuple[int, Job]:
        """Take all for one layer, of which every block gives equally many entries."""
        per_block = min(-(-int(job.k) * block // job.size), block)
        return 1, job._replace(k=max(job.k, per_block * job.size // block))

    return Algorithm(
        "sparcml",
        lambda: Blockwise(block=block),
        make,
        average=False,
        shared=False,
        unit_bytes=1,  # a unit is closed by its first parameter: layer-wise
        calls=calls,
    )


def _attention(name: str, parameter: Tensor) -> bool:
    """Tell the weights of attention layers, by their names."""
    return "attention" in name or "attn" in name


def _setting(entries: int, bits: Literal[2, 4, 8] | None, **more: Any) -> Mapping[str, Any]:
    algorithm = replace(sparcml(bits=bits), options=(("bits", bits),), **more)
    return MappingProxyType({"algorithm": algorithm, "density": entries / _BLOCK})


SPARCML_SETTINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "cifar-10": _setting(16, 4),  # ResNet-110, section 8.3: 8 or 16 of 512
        "cifar-10, 8 of 512": _setting(8, 4),
        "atis": _setting(2, None),  # LSTM, section 8.3: "no additional quantization strategy"
        "hansards": _setting(4, None),
        "asr": _setting(4, None, compress=_attention),  # section 8.4: the attention layer alone
        "imagenet, wide resnet": _setting(1, None),  # section 8.4
    }
)
