"""SparCML's quantised top-k SGD by name, and the settings of its experiments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final, Literal

from torch import Tensor

from sparsync.algorithm import Algorithm
from sparsync.collectives.costs import Job
from sparsync.errors import require
from sparsync.published.sparcml.collectives import Dynamic
from sparsync.selection.blockwise import Blockwise, per_block, share
from sparsync.wire import Qsgd, SparseQsgd, StreamCodec

__all__ = ["DECIDED", "EXCHANGES", "SPARCML_SETTINGS", "sparcml"]

EXCHANGES: Final = (
    "dense",
    "allgather",
    "dynamic",
    "recursive-doubling",
    "ring",
    "sparcml-auto",
    "split-allgather",
    "topkdsa",
)
"""The lossless presets: only these can train linear models (MPI-OPT)."""

DECIDED: Final = ("cap", "codec", "keep_error", "local", "op")
"""Options that the solvers of linear models set themselves, so that messages are summed exactly."""

_BLOCK = 512  # SparCML, section 8.3: k of every 512 consecutive elements


def sparcml(
    *,
    bits: Literal[2, 4, 8] | None = 4,
    quantize: Literal["local", "reduced"] = "local",
    keep_error: bool = False,
    scale: Literal["l2", "max"] = "max",
    quantization_block: int = 1024,
    block: int = _BLOCK,
    seed: int = 0,
) -> Algorithm:
    """SparCML's quantised top-k SGD (Algorithm 1), layer by layer; it applies sums instead of means.

    Use it with ``attach(model, algorithm="sparcml", density=16 / 512)``, or with the paper's settings:
    ``attach(model, **SPARCML_SETTINGS["cifar-10"])``.  Every parameter is exchanged separately, as soon
    as its gradient is ready.  If a learning rate was tuned for means, divide it by world_size.

    Args:
        bits: bits per quantised value; with None, values are not quantised (ATIS, Hansards).
        quantize: "local": quantise the selected entries (Q in Algorithm 1); "reduced": quantise sums that
            become dense in flight, in the second half of the dynamic collective (section 6).
        keep_error: whether the rank that quantises (the sender or, with "reduced", a region's owner)
            keeps the error in its residual.  QSGD is unbiased but not contractive, so the residual would
            grow without bound.  True makes it contractive: it shrinks the decoded values by ``1 / (1 +
            omega)``.  With False, as published, the error is lost and reported.
        scale: scale of a quantisation block: "max" or "l2".  The paper does not say which; QSGD's bounds
            are proven for "l2", while its experiments use "max", which has several times less noise.
        quantization_block: number of entries that share a scale, SparCML's bucket (section 6: "in the
            order of 1024").
        block: number of consecutive elements in a block, of which ``density * block`` are selected
            (section 8.3: 512).
        seed: seed of the random rounding.
    """
    require(quantize in ("local", "reduced"), f"quantize is {quantize!r}; choose local or reduced")
    arguments: dict[str, Any] = {
        "bits": bits, "block": quantization_block, "scale": scale, "shrink": keep_error, "seed": seed
    }  # fmt: skip

    def make() -> Dynamic:
        if bits is None:
            return Dynamic(cap=None)
        if quantize == "local":
            return Dynamic(cap=None, local=SparseQsgd(**arguments), keep_error=keep_error)
        return Dynamic(StreamCodec(dense=Qsgd(**arguments)), cap=None, keep_error=keep_error)

    def calls(job: Job) -> tuple[int, Job]:
        """Treat the whole job as one layer, whose blocks all contribute equally many entries."""
        entries = per_block(round(job.k), job.size, block)
        return 1, job._replace(k=max(job.k, share(entries, job.size, block)))

    return Algorithm(
        "sparcml",
        lambda: Blockwise(block=block),
        make,
        average=False,  # Algorithm 1 applies the sum
        shared=False,  # every block of every layer has its own k (section 8.3)
        unit_bytes=1,  # layer-wise: every parameter alone fills a unit
        calls=calls,
    )


def _attention(name: str, parameter: Tensor) -> bool:
    """Return whether a parameter belongs to an attention layer, judging from its name."""
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
