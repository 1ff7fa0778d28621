"""The seam of the wire formats: ``Codec``, and the 8-byte header of self-describing messages.

See ``docs/wire-format.md`` for the bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, final

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError, WireFormatError
from sparsync.sparse import SparseVector
from sparsync.transports.framing import Framing
from sparsync.transports.ledger import Parts

__all__ = [
    "HEADER_BYTES",
    "Codec",
    "Encoded",
    "Header",
    "MessageFraming",
    "pack_header",
    "parse_header",
]

HEADER_BYTES = 8
_MAGIC = 0x51  # '5parsync', version 1
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64)
_CODE_OF = MappingProxyType({dtype: code for code, dtype in enumerate(_DTYPES, start=1)})


@dataclass(frozen=True)
class Header:
    """The first 8 bytes of every message.

    Attributes:
        format: which codec wrote the message.
        dtype: of the decoded values.
        count: number of entries.
    """

    format: int
    dtype: torch.dtype
    count: int


def pack_header(header: Header) -> Tensor:
    """Return the header's 8 bytes: magic, format, dtype, zero, count (u32, little-endian).

    Example:
        >>> pack_header(Header(1, torch.float32, 258)).tolist()
        [81, 1, 1, 0, 2, 1, 0, 0]
    """
    if header.count >= 1 << 32:
        raise ConfigurationError(f"{header.count} entries exceed one message; use smaller units")
    if header.dtype not in _CODE_OF:
        raise ConfigurationError(f"values of {header.dtype} have no wire format")
    start = bytes([_MAGIC, header.format, _CODE_OF[header.dtype], 0])
    return torch.frombuffer(
        bytearray(start + header.count.to_bytes(4, "little")), dtype=torch.uint8
    )


def parse_header(buffer: Tensor) -> Header:
    """Read the header at the start of ``buffer``.

    Raises:
        WireFormatError: too short, wrong magic or version, unknown dtype.
    """
    if buffer.numel() < HEADER_BYTES:
        raise WireFormatError(
            f"{buffer.numel()} bytes cannot hold a message header of {HEADER_BYTES}"
        )
    raw = bytes(buffer[:HEADER_BYTES].tolist())
    if raw[0] != _MAGIC or raw[3] != 0:
        raise WireFormatError(
            f"a message starts with {raw[:4].hex()}, not with {_MAGIC:02x} (version 1); "
            "do all ranks run the same version of sparsync?"
        )
    if not 1 <= raw[2] <= len(_DTYPES):
        raise WireFormatError(f"unknown value dtype {raw[2]} in a message header")
    return Header(raw[1], _DTYPES[raw[2] - 1], int.from_bytes(raw[4:8], "little"))


@dataclass(frozen=True, eq=False)
class Encoded:
    """An encoded vector.

    Attributes:
        payload: `[nbytes]` with ``torch.uint8``: what travels.
        decoded: what the receiver will see; differs from the input if the codec rounds.
    """

    payload: Tensor
    decoded: SparseVector


class Codec(ABC):
    """Turns sparse vectors into bytes and back.  Stateless.

    ``format`` is the codec's number in the message header; ``exact`` says that nothing is rounded.
    """

    format: ClassVar[int]
    exact: ClassVar[bool]

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"  # ranks compare options by it: no address in it

    @abstractmethod
    def encode(self, vector: SparseVector) -> Encoded:
        """Encode a vector of any number of entries, 0 included."""

    @abstractmethod
    def decode(self, payload: Tensor, size: int) -> SparseVector:
        """Decode one whole message as a vector of ``size`` elements; checks every byte it uses."""

    @abstractmethod
    def parts(self, nnz: int, size: int, dtype: torch.dtype) -> Parts:
        """Return the exact bytes of a message, by purpose, without encoding it."""

    @abstractmethod
    def measure(self, buffer: Tensor) -> Parts:
        """Return the bytes of the message at the start of ``buffer``, read from its header."""

    def nbytes(self, nnz: int, size: int, dtype: torch.dtype = torch.float32) -> int:
        """Return the exact bytes of a message without encoding it."""
        return self.parts(nnz, size, dtype).nbytes


@final
class MessageFraming(Framing):
    """The framing of one codec's messages: length and parts stand in the header."""

    variable = True

    def __init__(self, codec: Codec) -> None:
        self.codec = codec

    def length(self, buffer: Tensor) -> int:
        """Read the length from the header."""
        return self.codec.measure(buffer).nbytes

    def parts(self, payload: Tensor) -> Parts:
        """Read the parts from the header."""
        return self.codec.measure(payload)
