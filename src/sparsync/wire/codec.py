"""The interface of codecs, and the header at the start of every message.

See ``docs/wire-format.md`` for the bytes.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar, final

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError, WireFormatError
from sparsync.kernels import divide_
from sparsync.sparse import Vector
from sparsync.transports.communicator import bytes_of
from sparsync.transports.ledger import Framing, Parts

__all__ = [
    "HEADER_BYTES",
    "LONG_HEADER_BYTES",
    "Codec",
    "Encoded",
    "Header",
    "MessageFraming",
    "Opened",
    "Writer",
    "check_block",
    "check_dtype",
    "check_end",
    "decode_as",
    "written",
]

HEADER_BYTES = 8
LONG_HEADER_BYTES = 16  # includes the region's size and the codec's detail
_MAGIC = 0x51  # first byte of every message: 5 looks like the S of sparsync, and 1 is the version
_SHORT, _LONG = struct.Struct("<4BI"), struct.Struct("<4BIQ")
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64)
_CODE_OF = MappingProxyType({dtype: code for code, dtype in enumerate(_DTYPES, start=1)})
_SIZE_LIMIT = 1 << 32  # elements per region, so indices relative to it fit 32 bits
_SIZE_BITS = 48  # bits of the long header's second word that hold the size; the rest is the detail
_BLOCK_LIMIT = 1 << 16  # the header's detail has 16 bits

V = TypeVar("V", bound=Vector)


class Header(NamedTuple):
    """The first 8 or 16 bytes of a message."""

    format: int  # number of the codec
    dtype: torch.dtype  # dtype of the decoded values
    entries: int
    option: int = 0  # meaning defined by the codec
    size: int | None = None  # elements of the region; None in a header of 8 bytes
    detail: int = 0  # 16 bits defined by the codec, e.g. the length of its blocks

    @property
    def nbytes(self) -> int:
        """Length of the header."""
        return HEADER_BYTES if self.size is None else LONG_HEADER_BYTES

    def pack(self) -> bytes:
        """Return the header as little-endian bytes: magic, format, dtype, option, count, size, detail.

        Example:
            >>> list(Header(1, torch.float32, 258).pack())
            [81, 1, 1, 0, 2, 1, 0, 0]
        """
        if self.entries >= _SIZE_LIMIT:
            raise ConfigurationError(f"{self.entries} entries exceed a message; use smaller units")
        if self.dtype not in _CODE_OF:
            known = ", ".join(str(dtype) for dtype in _CODE_OF)
            raise ConfigurationError(f"values of {self.dtype} have no wire format; choose {known}")
        first = (_MAGIC, self.format, _CODE_OF[self.dtype], self.option, self.entries)
        if self.size is None:
            return _SHORT.pack(*first)
        return _LONG.pack(*first, self.size | self.detail << _SIZE_BITS)

    @staticmethod
    def read(buffer: Tensor, nbytes: int = HEADER_BYTES) -> Header:
        """Read the header at the start of ``buffer``, with the second word if ``nbytes`` includes it."""
        # slicing an array is faster than slicing a tensor, and a rank reads dozens of headers per step
        host = buffer if buffer.is_cpu else buffer[:nbytes].cpu()
        raw = host.numpy()[:nbytes].tobytes()
        if len(raw) < HEADER_BYTES:
            raise WireFormatError(
                f"{len(raw)} bytes cannot hold a message header of {HEADER_BYTES}"
            )
        magic, format_, code, option, count = _SHORT.unpack_from(raw)
        if magic != _MAGIC:
            raise _foreign(raw)
        if not 1 <= code <= len(_DTYPES):
            raise WireFormatError(f"unknown value dtype {code} in a message header")
        header = Header(format_, _DTYPES[code - 1], count, option)
        if len(raw) < LONG_HEADER_BYTES:
            return header
        word = int.from_bytes(raw[HEADER_BYTES:], "little")
        return header._replace(size=word & ((1 << _SIZE_BITS) - 1), detail=word >> _SIZE_BITS)


@dataclass(frozen=True, eq=False)
class Encoded(Generic[V]):
    """The payload to send (uint8), and the vector that the receiver will decode from it."""

    payload: Tensor
    decoded: V


class Codec(ABC, Generic[V]):
    """Turns vectors into bytes and back, without any state.

    ``V`` is the type of the vectors: ``SparseVector``, ``DenseVector``, or ``Vector`` for both.  Every
    message starts with a header that describes it.  A message's length follows from the header alone,
    never from values or positions, so a codec pads every message to the longest case.  More entries
    never make a message shorter.

    ``docs/extending.md`` shows how to write a codec; ``sparsync.testing.check_codec`` checks it.
    """

    format: ClassVar[int]  # the codec's number in the header; 128 to 255 are for other packages
    # whether no value is ever rounded; a codec that rounds accepts only floating-point values
    exact: bool = False
    is_dense: ClassVar[bool] = False  # a message has one entry per element
    options: ClassVar[tuple[int, ...]] = (0,)  # legal values of the header's option
    header_bytes: ClassVar[int] = HEADER_BYTES  # or LONG_HEADER_BYTES
    option: int = 0  # the option in the headers of this codec
    detail: int = 0  # the detail in the headers of this codec; 0 if there is none

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"  # no address, because ranks compare options by repr

    @abstractmethod
    def encode(self, vector: V) -> Encoded[V]:
        """Encode a vector, which may have no entries; equal vectors must give equal bytes.

        Finite values must stay finite, and nonfinite values nonfinite: rounding must neither create a
        NaN or Inf nor hide one from the other ranks.  If entries share a scale, one nonfinite entry may
        make the others nonfinite (``spreading`` in ``check_codec``).
        """

    @abstractmethod
    def decode(self, payload: Tensor, size: int) -> V:
        """Decode one whole message as a vector of ``size`` elements.

        Raises:
            WireFormatError: the codec never writes such bytes, or the vector's size is not ``size``.
        """

    @abstractmethod
    def layout(self, header: Header) -> Parts:
        """Return the exact number of bytes of the message with this header, split by purpose."""

    def header(self, nnz: int, size: int, dtype: torch.dtype) -> Header:
        """Return the header of a message with ``nnz`` of ``size`` elements."""
        entries = size if self.is_dense else nnz
        if self.header_bytes == HEADER_BYTES:
            return Header(self.format, dtype, entries, self.option)
        return Header(self.format, dtype, entries, self.option, size, self.detail)

    def is_legal(self, header: Header) -> bool:
        """Return whether this codec writes such a header; the caller checks format, option and count."""
        return (header.detail > 0) == (self.detail > 0)

    def seeded(self, rank: int, step: int) -> Codec[V]:
        """Return the codec for messages that ``rank`` sends at ``step``; by default, this one."""
        return self

    def for_layers(self, sizes: Sequence[int]) -> Codec[V]:
        """Return the codec for vectors whose layers have these sizes; by default, this one."""
        return self

    def is_exact(self, dtype: torch.dtype) -> bool:
        """Return whether values of ``dtype`` arrive unchanged."""
        return self.exact

    @property
    def contractive(self) -> bool:
        """Whether ``E |x - Q(x)|^2 < |x|^2`` for every nonzero x, as error feedback requires."""
        return True

    # ---- sizes ----

    def parts(self, nnz: int, size: int, dtype: torch.dtype) -> Parts:
        """Return the exact number of bytes of a message, split by purpose, without encoding it."""
        return self.layout(self.header(nnz, size, dtype))

    def nbytes(self, nnz: int, size: int, dtype: torch.dtype = torch.float32) -> int:
        """Return the exact number of bytes of a message, without encoding it."""
        return self.parts(nnz, size, dtype).nbytes

    def measure(self, buffer: Tensor) -> Parts:
        """Return the number of bytes, by purpose, of the message at the start of ``buffer``."""
        return self.layout(self.read_header(buffer))

    def entries_within(self, nbytes: int, size: int, dtype: torch.dtype = torch.float32) -> int:
        """Return the largest number of entries, at most ``size``, whose message fits in ``nbytes``."""
        # bisection is valid because messages never get shorter with more entries
        fitting = bisect_right(
            range(size + 1), nbytes, key=lambda nnz: self.nbytes(nnz, size, dtype)
        )
        if not fitting:
            raise ConfigurationError(
                f"a budget of {nbytes} bytes cannot hold a message without entries, which takes "
                f"{self.nbytes(0, size, dtype)}; give more bytes"
            )
        return fitting - 1

    # ---- for implementations ----

    def start(self, vector: V) -> bytes:
        """Return the bytes of a message's header; refuse a vector that the codec cannot encode."""
        values, size = vector.values, vector.size
        name = type(self).__name__
        if values.dim() != 1:
            raise ConfigurationError(f"{name}: values of shape {tuple(values.shape)}; flatten them")
        if not (self.exact or values.dtype.is_floating_point):
            raise ConfigurationError(
                f"{name} rounds values and takes floats, not {values.dtype}; use Coo or Whole for "
                "integers"
            )
        if not vector.nnz <= size <= _SIZE_LIMIT:
            raise ConfigurationError(
                f"{name}: got {vector.nnz} entries in a region of {size} elements; a region has at most "
                "2^32 elements, and no more entries than elements: use smaller units or more regions"
            )
        return self.header(vector.nnz, size, values.dtype).pack()

    @staticmethod
    def message(start: bytes, *pieces: Tensor) -> Tensor:
        """Join a message's header and the bytes of 1-D tensors of any dtype; return the message."""
        header = torch.frombuffer(bytearray(start), dtype=torch.uint8)
        return torch.cat([header.to(pieces[0].device), *map(bytes_of, pieces)])

    def read_header(self, buffer: Tensor) -> Header:
        """Read the header of a message; raise WireFormatError unless this codec writes such headers."""
        header = Header.read(buffer, self.header_bytes)
        name = type(self).__name__
        if header.format != self.format:
            raise WireFormatError(
                f"a message has format {header.format}, expected {name} ({self.format}); do all ranks "
                "use the same codec?"
            )
        if header.option not in self.options:
            raise _foreign(header._replace(size=None).pack())
        if header.nbytes < self.header_bytes:
            raise WireFormatError(
                f"{buffer.numel()} bytes cannot hold the header of {name}, {self.header_bytes} bytes"
            )
        count, size = header.entries, header.size
        sound = size is None or (
            count <= size <= _SIZE_LIMIT and (count == size or not self.is_dense)
        )
        if not (sound and (self.exact or header.dtype.is_floating_point) and self.is_legal(header)):
            raise WireFormatError(
                f"a message claims {count} entries of {size} elements of {header.dtype}, option "
                f"{header.option}, detail {header.detail}, which {name} never writes; it is corrupt"
            )
        return header

    def body(self, payload: Tensor, size: int) -> tuple[Header, Tensor]:
        """Check a whole message's length and region; return its header and the bytes after it."""
        header = self.read_header(payload)
        expected = self.layout(header).nbytes
        if payload.numel() != expected:
            raise WireFormatError(
                f"a message of {payload.numel()} bytes says that it has {header.entries} entries, "
                f"which take {expected} bytes; it is truncated or corrupt"
            )
        if header.size not in (None, size):
            raise WireFormatError(
                f"a message is for a region of {header.size} elements, expected {size}; do all ranks "
                "divide the vector in the same way?"
            )
        return header, payload[header.nbytes :]


class Writer(Protocol):
    """Writes values, or the sum of two vectors, to a message."""

    def __call__(self, start: int, values: Tensor, more: Tensor | None = None) -> None:
        """Write ``values``, plus ``more`` if given, from element ``start`` on; change nothing else."""


class Opened(ABC):
    """A checked message of a dense vector, which is decoded in runs of consecutive elements."""

    @abstractmethod
    def decode_to(
        self, into: Tensor, divisor: float = 1.0, *, add: bool = False, start: int = 0
    ) -> None:
        """Decode elements from ``start`` on, divide them, and write them to ``into`` or add them."""

    @abstractmethod
    def is_finite(self) -> bool:
        """Return whether the message contains neither NaN nor Inf."""


def decode_as(codec: Codec[V], message: Tensor, size: int, dtype: torch.dtype) -> V:
    """Decode a message from another rank; refuse values whose dtype is not this rank's."""
    # A codec decodes to the dtype that the header claims.  If that is not this rank's dtype, a later sum
    # would raise an obscure error or round differently.
    vector = codec.decode(message, size)
    _check_dtype(vector.values.dtype, dtype)
    return vector


def check_dtype(codec: Codec[Any], message: Tensor, dtype: torch.dtype) -> None:
    """Refuse a message unless it has the dtype that this rank sends for values of ``dtype``."""
    _check_dtype(codec.read_header(message).dtype, codec.header(0, 0, dtype).dtype)


def _check_dtype(claimed: torch.dtype, own: torch.dtype) -> None:
    if claimed != own:
        raise WireFormatError(
            f"a message claims values of {claimed}, and this rank's are {own}; it is "
            "corrupt, or the ranks train in different dtypes"
        )


def check_block(block: int) -> None:
    """Raise ConfigurationError unless the block length fits the header."""
    if not 1 <= block < _BLOCK_LIMIT:
        raise ConfigurationError(
            f"block={block} entries cannot share a scale; use 1 to {_BLOCK_LIMIT - 1}"
        )


def check_end(raw: Tensor, bits: int, count: int) -> None:
    """Raise WireFormatError if bits are set after the last of ``count`` codes."""
    used = count * bits % 8
    if used and int(raw[-1]) >> used:
        raise WireFormatError(
            f"a message of {count} quantised values has bits set after the last; it is corrupt"
        )


def written(values: Tensor, into: Tensor, divisor: float, *, add: bool) -> None:
    """Divide values and write them to ``into``, or add them to it; the devices may differ."""
    if add:
        if divisor != 1:  # divide in the wider dtype, as below
            wide = torch.promote_types(values.dtype, into.dtype)
            values = divide_(values.to(wide, copy=True), divisor)
        into += values.to(into.device)
    else:
        divide_(into.copy_(values), divisor)


@final
class MessageFraming(Framing):
    """The framing of a codec's messages: lengths and parts are read from the headers."""

    variable = True

    def __init__(self, codec: Codec[Any]) -> None:
        self.codec = codec

    def length(self, buffer: Tensor) -> int:
        """Return the length of the message, as stated by its header."""
        return self.codec.measure(buffer).nbytes

    def parts(self, payload: Tensor) -> Parts:
        """Return the length of the message, split by purpose, as stated by its header."""
        return self.codec.measure(payload)


def _foreign(raw: bytes) -> WireFormatError:
    return WireFormatError(
        f"a message starts with {raw[:4].hex()}, not with {_MAGIC:02x} (version 1); "
        "do all ranks run the same version of sparsync?"
    )
