"""Published settings of ``OuterStep``: BMUF, Qsparse-local-SGD, DiLoCo, SparseLoCo.

References: Chen and Huo, "Scalable training of deep learning machines by incremental block training with
intra-block parallel optimization and blockwise model-update filtering", ICASSP 2016; Basu et al.,
"Qsparse-local-SGD", NeurIPS 2019; Douillard et al., "DiLoCo", 2023; Sarfi et al.,
`SparseLoCo <https://arxiv.org/abs/2508.15706>`_, 2025.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from sparsync.collectives import Allgather
from sparsync.presets import Algorithm
from sparsync.selection import Blockwise
from sparsync.wire import SparseQsgd

__all__ = ["OUTER_SETTINGS", "sparseloco"]

_CHUNK, _ENTRIES = 4096, 64  # SparseLoCo: chunks of 64 x 64; 1.6 %, of its 1 to 3 %


def sparseloco(*, bits: int = 4) -> Algorithm:
    """SparseLoCo's exchange: chunk-wise top-k, quantised, collected by all ranks.

    Its quantiser takes 2 bits and is not random.  Ours at 2 bits is not contractive without shrinking
    values to 2 / 9, so 4 are the default; with Elias-Fano indices an entry then takes 12.5 bits, where
    2 and a position in its chunk are 14.

    Args:
        bits: of a value: 2, 4 or 8; one scale per chunk.

    Example:
        >>> sparseloco().name, sparseloco(bits=2).options
        ('sparseloco', (('bits', 2),))
    """
    codec = SparseQsgd(bits, block=_ENTRIES, scale="max")
    if not codec.contractive:
        codec = SparseQsgd(bits, block=_ENTRIES, scale="max", shrink=True)
    return Algorithm(
        "sparseloco",
        lambda: Blockwise(block=_CHUNK),
        lambda: Allgather(codec),
        options=(("bits", bits),),
    )


# ``OuterStep(model, **OUTER_SETTINGS["diloco"])``
OUTER_SETTINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "bmuf": MappingProxyType(  # its block learning rate is 1; nesterov=True: NBM rather than CBM
            {"algorithm": "dense", "density": 1.0, "period": 8, "momentum": None}  # period: ours
        ),
        "qsparse-local": MappingProxyType(  # Algorithm 1 with Top_k; its experiments have H = 1, 4, 8
            {"algorithm": "allgather", "density": 0.01, "period": 8}  # density: ours
        ),
        "diloco": MappingProxyType(  # section 3: H = 500, Nesterov with 0.7 and 0.9
            {
                "algorithm": "dense",
                "density": 1.0,
                "period": 500,
                "outer_lr": 0.7,
                "momentum": 0.9,
                "nesterov": True,
            }
        ),
        "sparseloco": MappingProxyType(  # Algorithm 1; its experiments have H = 15 to 250
            {
                "algorithm": sparseloco(),
                "density": _ENTRIES / _CHUNK,
                "period": 30,
                "residual_decay": 0.95,  # its beta, for an outer momentum; the value is ours
            }
        ),
    }
)
