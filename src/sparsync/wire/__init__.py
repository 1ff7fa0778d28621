"""Wire formats: one codec per file; every message describes itself by the same header."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from sparsync.wire.base import Codec, Encoded
from sparsync.wire.levels import LloydMax
from sparsync.wire.packed import Packed
from sparsync.wire.quantised import Qsgd, SparseQsgd
from sparsync.wire.sign_mean import SignMean
from sparsync.wire.streams import Coo, StreamCodec, Whole

__all__ = [
    "CODECS",
    "Codec",
    "Coo",
    "Encoded",
    "LloydMax",
    "Packed",
    "Qsgd",
    "SignMean",
    "SparseQsgd",
    "StreamCodec",
    "Whole",
]

# a row per codec: the contracts check each of them
CODECS: Final[Mapping[str, Codec[Any]]] = MappingProxyType(
    {
        "coo": Coo(),
        "packed": Packed(),
        "packed, int8": Packed("int8"),
        "packed, fp32": Packed("fp32"),
        "whole": Whole(),
        "qsgd": SparseQsgd(),
        "qsgd, dense": Qsgd(),
        "sign-mean": SignMean(),
        "lloyd-max": LloydMax(),
        "streams": StreamCodec(),
    }
)
