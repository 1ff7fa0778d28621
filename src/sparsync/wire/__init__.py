"""As what bytes: one codec per file, all with the same 8-byte self-describing header."""

from sparsync.wire.base import Codec, Encoded
from sparsync.wire.coo import Coo

__all__ = ["Codec", "Coo", "Encoded"]
