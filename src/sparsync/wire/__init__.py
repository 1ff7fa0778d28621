"""As what bytes: one codec per file, all with the same 8-byte self-describing header."""

from sparsync.wire.base import Codec, Encoded
from sparsync.wire.coo import Coo
from sparsync.wire.packed import Packed

__all__ = ["Codec", "Coo", "Encoded", "Packed"]
