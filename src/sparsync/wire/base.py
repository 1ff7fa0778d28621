"""The seam of the wire formats: ``Codec``, and the 8-byte header of self-describing messages.

See ``docs/wire-format.md`` for the bytes.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Protocol, final

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
    "Measuring",
    "MessageFraming",
    "first_bytes",
    "pack_header",
    "parse_header",
]

HEADER_BYTES = 8
_MAGIC = 0x51  # '5parsync', version 1
_HEADER = struct.Struct("<4BI")
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64)
_CODE_OF = MappingProxyType({dtype: code for code, dtype in enumerate(_DTYPES, start=1)})


@dataclass(frozen=True, slots=True)
class Header:
    """The first 8 bytes of every message.

    Attributes:
        format: which codec wrote the message.
        dtype: of the decoded values.
        count: number of entries.
        option: the codec's own; 0 where it has none.
    """

    format: int
    dtype: torch.dtype
    count: int
    option: int = 0


def pack_header(header: Header) -> bytes:
    """Return the header's 8 bytes: magic, format, dtype, option, count (u32, little-endian).

    Example:
        >>> list(pack_header(Header(1, torch.float32, 258)))
        [81, 1, 1, 0, 2, 1, 0, 0]
    """
    if header.count >= 1 << 32:
        raise ConfigurationError(f"{header.count} entries exceed one message; use smaller units")
    if header.dtype not in _CODE_OF:
        known = ", ".join(str(dtype) for dtype in _CODE_OF)
        raise ConfigurationError(f"values of {header.dtype} have no wire format; choose {known}")
    return _HEADER.pack(_MAGIC, header.format, _CODE_OF[header.dtype], header.option, header.count)


def parse_header(raw: bytes) -> Header:
    """Read the header at the start of ``raw``.

    Raises:
        WireFormatError: too short, wrong magic or version, unknown dtype.
    """
    if len(raw) < HEADER_BYTES:
        raise WireFormatError(f"{len(raw)} bytes cannot hold a message header of {HEADER_BYTES}")
    magic, format_, code, option, count = _HEADER.unpack_from(raw)
    if magic != _MAGIC:
        raise _foreign(raw)
    if not 1 <= code <= len(_DTYPES):
        raise WireFormatError(f"unknown value dtype {code} in a message header")
    return Header(format_, _DTYPES[code - 1], count, option)


def _foreign(raw: bytes) -> WireFormatError:
    return WireFormatError(
        f"a message starts with {raw[:4].hex()}, not with {_MAGIC:02x} (version 1); "
        "do all ranks run the same version of sparsync?"
    )


def first_bytes(buffer: Tensor, nbytes: int) -> bytes:
    """Copy the first bytes of a uint8 tensor to the host (fewer if it is shorter)."""
    # slicing the array, not the tensor, and one copy: a rank reads dozens of headers per step
    host = buffer if buffer.is_cpu else buffer[:nbytes].cpu()
    return host.numpy()[:nbytes].tobytes()


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

    ``format`` is the codec's number in the message header, ``options`` are the values of its option
    byte; ``exact`` says that nothing is rounded, whatever the dtype.  A message never gets shorter by
    more entries.
    """

    format: ClassVar[int]
    exact: ClassVar[bool]
    options: ClassVar[tuple[int, ...]] = (0,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"  # ranks compare options by it: no address in it

    def seeded(self, rank: int, step: int) -> Codec:
        """Return the codec for one message source and step: itself, unless it draws random numbers."""
        return self

    def for_layers(self, sizes: Sequence[int]) -> Codec:
        """Return the codec for vectors of layers of these sizes: itself, unless layers matter."""
        return self

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

    def is_exact(self, dtype: torch.dtype) -> bool:
        """Tell whether values of ``dtype`` arrive as they are."""
        return self.exact

    def nbytes(self, nnz: int, size: int, dtype: torch.dtype = torch.float32) -> int:
        """Return the exact bytes of a message without encoding it."""
        return self.parts(nnz, size, dtype).nbytes

    def entries_within(self, nbytes: int, size: int, dtype: torch.dtype = torch.float32) -> int:
        """Return the largest number of entries, at most ``size``, whose message fits ``nbytes``.

        Raises:
            ConfigurationError: not even the empty message fits.
        """
        fitting = bisect_right(
            range(size + 1), nbytes, key=lambda nnz: self.nbytes(nnz, size, dtype)
        )
        if not fitting:
            raise ConfigurationError(
                f"a budget of {nbytes} bytes cannot hold a message without entries, which takes "
                f"{self.nbytes(0, size, dtype)}; give more bytes"
            )
        return fitting - 1

    def check_header(self, raw: bytes) -> Header:
        """Read the header of a message that must be of this format.

        Raises:
            WireFormatError: not a header, or of another format.
        """
        header = parse_header(raw)
        if header.format != self.format:
            name = type(self).__name__.lower()
            raise WireFormatError(
                f"a message has format {header.format}, expected {name} ({self.format}); "
                "do all ranks use the same codec?"
            )
        if header.option not in self.options:
            raise _foreign(raw)
        return header


class Measuring(Protocol):
    """What can tell the bytes of a message from its start: a ``Codec``, a ``StreamCodec``."""

    def measure(self, buffer: Tensor) -> Parts:
        """Return the bytes of the message at the start of ``buffer``, by purpose."""


@final
class MessageFraming(Framing):
    """The framing of one codec's messages: length and parts stand in the header."""

    variable = True

    def __init__(self, codec: Measuring) -> None:
        self.codec = codec

    def length(self, buffer: Tensor) -> int:
        """Read the length from the header."""
        return self.codec.measure(buffer).nbytes

    def parts(self, payload: Tensor) -> Parts:
        """Read the parts from the header."""
        return self.codec.measure(payload)
