"""Wire formats, one codec per file; every message starts with the same self-describing header."""

from typing import Any, Final

from sparsync.tables import Table
from sparsync.wire.codec import Codec, Encoded
from sparsync.wire.coo import Coo, StreamCodec, Whole
from sparsync.wire.levels import LloydMax
from sparsync.wire.packed import Packed
from sparsync.wire.qsgd import Qsgd, SparseQsgd

__all__ = [
    "CODECS",
    "Codec",
    "Coo",
    "Encoded",
    "LloydMax",
    "Packed",
    "Qsgd",
    "SparseQsgd",
    "StreamCodec",
    "Whole",
]

# one row per codec and, if it has several, per form of its values; the contract tests check every row
CODECS: Final[Table[Codec[Any]]] = Table(
    "codecs",
    {
        "coo": Coo(),
        "packed": Packed(),
        "packed, int8": Packed("int8"),
        "packed, fp32": Packed("fp32"),
        "whole": Whole(),
        "qsgd": SparseQsgd(),
        "qsgd, dense": Qsgd(),
        "lloyd-max": LloydMax(),
        "streams": StreamCodec(),
    },
    lambda found: isinstance(found, Codec),
    "an object of a subclass of sparsync.wire.Codec",
)
