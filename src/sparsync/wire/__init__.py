"""Wire formats: one codec per file; every message describes itself by the same header."""

from sparsync.wire.base import Codec, Encoded
from sparsync.wire.coo import Coo
from sparsync.wire.packed import Packed
from sparsync.wire.qsgd import Qsgd, SparseQsgd
from sparsync.wire.sign_mean import SignMean
from sparsync.wire.signs import Signs
from sparsync.wire.streams import StreamCodec
from sparsync.wire.whole import Whole

__all__ = [
    "Codec",
    "Coo",
    "Encoded",
    "Packed",
    "Qsgd",
    "SignMean",
    "Signs",
    "SparseQsgd",
    "StreamCodec",
    "Whole",
]
