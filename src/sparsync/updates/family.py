"""Settings of ``OuterStep`` for the default of ``attach`` and for published methods."""

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
_ENTRIES: Final = 64  # kept of 64 x 64, as in SparseLoCo: 1.6 %, within the paper's 1 to 3 %


def sparseloco() -> Algorithm:
    """Return SparseLoCo's exchange: chunk-wise top-k, quantised and allgathered.

    The paper rounds to 2 bits deterministically.  ``SparseQsgd`` at 2 bits would be contractive only if
    values were shrunk to 2 / 9, so 4 bits are used here.  With Elias-Fano indices, an entry then takes
    12.5 bits; with 2 bits and a position in the chunk, it would take 14.
    """
    codec = SparseQsgd(4, block=_ENTRIES, scale="max")
    return Algorithm(
        "sparseloco",
        lambda: Blockwise(block=_CHUNK),
        lambda: Allgather(codec),
        options=(("bits", 4),),
    )


def _chunkwise() -> Algorithm:
    """Return DeMo's exchange: select the largest entries of each chunk, and allgather them."""
    return Algorithm("chunkwise", lambda: Blockwise(block=_CHUNK), Allgather)


OUTER_SETTINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # The default of ``attach``: two bits and a period of 2 for models of a million elements and
        # more (``OuterStep.for_size``). An exchange rounds twice, and delivers its rounding errors
        # later: on average after a quarter of a step with two bits, and after a whole step with one
        # bit. Late updates raise the loss, by 0.5 % with two bits and by 1.4 % with one, on a transformer
        # of 1.3 million elements after 1,000 steps. At first, weights change fastest, and rounding errors
        # are as large as the updates. So updates are exchanged on every step during the first half of
        # the warm-up (100 steps). With one bit on every second step, smaller models lose up to 9 % (a
        # vision transformer of 152,074 elements), so they send more bits (benchmarks/schedules.md). A
        # delay would hide the exchange, but raised the loss by 1.5 to 5 % in trials
        # (docs/design-notes.md).
        "updates": {
            "algorithm": None,
            "density": 1.0,
            "period": None,
            "residual": "weights",
            "noise_correction": True,
            "warmup_steps": 200,
        },
        # the block learning rate is 1; nesterov=True gives NBM instead of CBM; the period is not from
        # the paper
        "bmuf": {"algorithm": "dense", "density": 1.0, "period": 8, "momentum": None},
        # Algorithm 1 with Top_k; the experiments use H = 1, 4, 8; the density is not from the paper
        "qsparse-local": {"algorithm": "allgather", "density": 0.01, "period": 8},
        # section 3 uses H = 500, outer rate 0.7 and Nesterov momentum 0.9
        "diloco": {
            "algorithm": "dense",
            "density": 1.0,
            "period": 500,
            "outer_lr": 0.7,
            "momentum": 0.9,
            "nesterov": True,
        },
        # in sections 2.2 to 2.4, fragments are sent in 4 bits and applied one step later, with DiLoCo's
        # outer step
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
        # for torch.optim.Muon as the inner optimizer; 2 bits with error feedback
        "muloco": {
            "algorithm": "quantised",
            "density": 1.0,
            "period": 30,
            "outer_lr": 0.7,
            "momentum": 0.9,
            "nesterov": True,
        },
        # Algorithm 1; the experiments use H = 15 to 250; 0.95 is the paper's beta for outer momentum
        "sparseloco": {
            "algorithm": sparseloco(),
            "density": _ENTRIES / _CHUNK,
            "period": 30,
            "residual_decay": 0.95,
        },
        # Section 3.  The inner optimizer must be SGD without momentum: the residual is the momentum,
        # and 0.999 is its beta.  A chunk is 64 consecutive elements of a unit; the paper uses 64 x 64
        # blocks of a matrix.  Every 64 chunks send 32 coefficients, as pairs of 32 + 32 bits.  The
        # momentum accumulates steps, i.e. gradients times learning rates, and includes weight decay
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
"""Published settings, to be passed to ``attach`` as ``OuterStep(**OUTER_SETTINGS["diloco"])``."""
