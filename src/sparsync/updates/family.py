"""Settings of ``OuterStep``: the default of ``attach``, and those of published methods."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from sparsync.algorithm import Algorithm
from sparsync.collectives import Allgather
from sparsync.presets import resolve
from sparsync.selection import Blockwise
from sparsync.wire import SparseQsgd

__all__ = ["OUTER_SETTINGS", "sparseloco"]

_CHUNK: Final = 4096
_ENTRIES: Final = 64  # per chunk of 64 x 64, as SparseLoCo has it: 1.6 %, of the paper's 1 to 3 %


def sparseloco() -> Algorithm:
    """SparseLoCo's exchange: chunk-wise top-k, quantised, collected by all ranks.

    The paper's quantiser takes 2 bits and is not random.  ``SparseQsgd`` at 2 bits is not contractive
    without shrinking values to 2 / 9, so this takes 4 bits; with Elias-Fano indices an entry then has
    12.5 bits, where 2 bits and a position in the chunk are 14.
    """
    codec = SparseQsgd(4, block=_ENTRIES, scale="max")
    return Algorithm(
        "sparseloco",
        lambda: Blockwise(block=_CHUNK),
        lambda: Allgather(codec),
        options=(("bits", 4),),
    )


def _chunkwise() -> Algorithm:
    """DeMo's exchange: chunk-wise top-k, collected by all ranks."""
    return Algorithm("chunkwise", lambda: Blockwise(block=_CHUNK), Allgather)


OUTER_SETTINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # The default of ``attach``.  With the noise of second moments corrected, one bit costs no more
        # loss than 32; nor does a period of 2, except in the first steps, where weights move fastest and
        # the rounding error is as large as the moves: these are exchanged one by one
        # (benchmarks/schedules.md).  A delay would hide the exchange, but cost 1.5 to 5 % of loss in
        # trials (docs/design-notes.md).
        "updates": {
            "algorithm": resolve("quantised", bits=1, block=512),
            "density": 1.0,
            "period": 2,
            "residual": "weights",
            "noise_correction": True,
            "warmup_steps": 200,
        },
        # its block learning rate is 1; nesterov=True: NBM rather than CBM; the period is a choice
        "bmuf": {"algorithm": "dense", "density": 1.0, "period": 8, "momentum": None},
        # Algorithm 1 with Top_k; its experiments have H = 1, 4, 8; the density is a choice
        "qsparse-local": {"algorithm": "allgather", "density": 0.01, "period": 8},
        # section 3: H = 500, Nesterov with 0.7 and 0.9
        "diloco": {
            "algorithm": "dense",
            "density": 1.0,
            "period": 500,
            "outer_lr": 0.7,
            "momentum": 0.9,
            "nesterov": True,
        },
        # sections 2.2 to 2.4: fragments in 4 bits, applied a step later; the outer step is DiLoCo's
        "streaming-diloco": {
            "algorithm": resolve("quantised", bits=4),
            "density": 1.0,
            "period": 100,
            "fragments": 10,
            "delay": 1,
            "outer_lr": 0.7,
            "momentum": 0.9,
            "nesterov": True,
        },
        # with torch.optim.Muon inside; 2 bits, error feedback
        "muloco": {
            "algorithm": "quantised",
            "density": 1.0,
            "period": 30,
            "outer_lr": 0.7,
            "momentum": 0.9,
            "nesterov": True,
        },
        # Algorithm 1; its experiments have H = 15 to 250; 0.95 is its beta, for an outer momentum
        "sparseloco": {
            "algorithm": sparseloco(),
            "density": _ENTRIES / _CHUNK,
            "period": 30,
            "residual_decay": 0.95,
        },
        # section 3, with SGD without momentum inside: the residual is the momentum, and 0.999 its beta.
        # Chunks are of 64 consecutive elements of a unit where the paper's are 64 x 64 of a matrix; of
        # 64 of them together 32 coefficients are sent, with pairs' 32 + 32 bits.  The momentum is of
        # steps, so of gradients times their learning rates, and weight decay is part of it
        "demo": {
            "algorithm": _chunkwise(),
            "density": 32 / _CHUNK,
            "period": 1,
            "residual_decay": 0.999,
            "dct": 64,
            "sign": True,
        },
    }
)
"""Settings as published: ``OuterStep(**OUTER_SETTINGS["diloco"])`` for ``attach``."""
