"""As what bytes: one codec per file, all with the same 8-byte self-describing header."""

from sparsync.wire.base import Codec, Encoded
from sparsync.wire.coo import Coo
from sparsync.wire.packed import Packed
from sparsync.wire.qsgd import Qsgd, SparseQsgd
from sparsync.wire.sign_mean import SignMean
from sparsync.wire.signs import Signs
from sparsync.wire.streams import StreamCodec
from sparsync.wire.whole import DenseCodec, Whole

__all__ = [
    "Codec",
    "Coo",
    "DenseCodec",
    "Encoded",
    "Packed",
    "Qsgd",
    "SignMean",
    "Signs",
    "SparseQsgd",
    "StreamCodec",
    "Whole",
]
