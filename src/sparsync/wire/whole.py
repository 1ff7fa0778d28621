"""Dense messages: every value in its place, no indices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError, WireFormatError
from sparsync.transports.ledger import Parts
from sparsync.wire.base import HEADER_BYTES, Header, first_bytes, pack_header, parse_header

__all__ = ["DenseCodec", "EncodedDense", "Whole"]


class EncodedDense(NamedTuple):
    """An encoded dense vector.

    Attributes:
        payload: `[nbytes]` with ``torch.uint8``: what travels.
        decoded: `[size]` what the receiver will see.
    """

    payload: Tensor
    decoded: Tensor


class DenseCodec(ABC):
    """Turns dense vectors into bytes and back.  ``format`` is its number in the message header."""

    format: ClassVar[int]

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"  # ranks compare options by it: no address in it

    def seeded(self, rank: int, step: int) -> DenseCodec:
        """Return the codec for one message source and step: itself, unless it draws random numbers."""
        return self

    @abstractmethod
    def encode(self, values: Tensor) -> EncodedDense:
        """Encode `[size]` values; 0 of them is legal."""

    @abstractmethod
    def decode(self, payload: Tensor, size: int) -> Tensor:
        """Decode one whole message of ``size`` values; checks every byte it uses."""

    @abstractmethod
    def parts(self, size: int, dtype: torch.dtype) -> Parts:
        """Return the exact bytes of a message, by purpose, without encoding it."""

    @abstractmethod
    def measure(self, buffer: Tensor) -> Parts:
        """Return the bytes of the message at the start of ``buffer``, read from its header."""

    @abstractmethod
    def is_exact(self, dtype: torch.dtype) -> bool:
        """Tell whether values of ``dtype`` arrive as they are."""

    def nbytes(self, size: int, dtype: torch.dtype = torch.float32) -> int:
        """Return the exact bytes of a message without encoding it."""
        return self.parts(size, dtype).nbytes


@final
class Whole(DenseCodec):
    """Header, then all values as they are (SparCML's dense form: the count equals the size).

    Args:
        dtype: values are rounded to it; finite ones stay finite.  None: they travel as they are.

    Cost: 8 + 4 n bytes for float32, 8 + 2 n for bfloat16.   State: none.
    Differs from the paper: the header names the form; there it is told by the count alone.

    Example:
        >>> Whole().encode(torch.tensor([1.0])).payload.tolist()
        [81, 3, 1, 0, 1, 0, 0, 0, 0, 0, 128, 63]

    References: SparCML, section 5.1.
    """

    format = 3

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dtype or ''})"

    def encode(self, values: Tensor) -> EncodedDense:
        """Encode; ``decoded`` are the values themselves, or rounded ones in their dtype."""
        if values.dim() != 1:
            raise ConfigurationError(f"a dense message of shape {tuple(values.shape)}; flatten it")
        sent = values if self.dtype is None else _rounded(values, self.dtype)
        header = pack_header(Header(self.format, sent.dtype, sent.numel()))
        start = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        body = sent.contiguous().view(torch.uint8)
        return EncodedDense(torch.cat([start.to(values.device), body]), sent.to(values.dtype))

    def decode(self, payload: Tensor, size: int) -> Tensor:
        """Decode and check the count; values have the dtype that travelled.

        Raises:
            WireFormatError: the payload is not a dense message of ``size`` elements.
        """
        expected = self.measure(payload).nbytes
        header = parse_header(first_bytes(payload, HEADER_BYTES))
        if header.count != size or payload.numel() != expected:
            raise WireFormatError(
                f"a dense message of {payload.numel()} bytes says that it has {header.count} values, "
                f"expected {size} in {expected} bytes; it is truncated or corrupt"
            )
        return payload[HEADER_BYTES:].clone().view(header.dtype)  # a copy is aligned

    def parts(self, size: int, dtype: torch.dtype) -> Parts:
        """Return 8 bytes of header and the dtype's width per element."""
        return Parts(header=HEADER_BYTES, value=(self.dtype or dtype).itemsize * size)

    def measure(self, buffer: Tensor) -> Parts:
        """Read count and dtype.

        Raises:
            WireFormatError: the buffer does not start with the header of a dense message.
        """
        header = parse_header(first_bytes(buffer, HEADER_BYTES))
        if header.format != self.format or header.option:
            raise WireFormatError(
                f"a message has format {header.format}, expected dense ({self.format}); "
                "do all ranks use the same codec?"
            )
        return Parts(header=HEADER_BYTES, value=header.dtype.itemsize * header.count)

    def is_exact(self, dtype: torch.dtype) -> bool:
        """Say whether nothing is rounded."""
        return self.dtype in (None, dtype)


def _rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round; what is finite is cut to what ``dtype`` can hold."""
    limit = torch.finfo(dtype).max
    return torch.where(values.isfinite(), values.clamp(-limit, limit), values).to(dtype)
