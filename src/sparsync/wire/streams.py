"""The wire format of sparse streams: sparse messages, and dense ones from where those are shorter."""

from __future__ import annotations

import copy
from typing import final

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError
from sparsync.sparse import DenseVector, SparseVector, Vector
from sparsync.transports.ledger import Parts
from sparsync.wire.base import Codec, Encoded, Header
from sparsync.wire.coo import Coo
from sparsync.wire.whole import Whole

__all__ = ["StreamCodec"]


@final
class StreamCodec(Codec[Vector]):
    """A codec for sparse vectors and one for dense ones; the header says which a message is.

    Args:
        sparse: for sparse vectors (default: ``Coo()``, as in the paper).
        dense: for dense ones (default: ``Whole()``).
        factor: a vector stays sparse up to ``factor * delta`` entries, delta being where the dense
            message is no longer than the sparse one (coo: ``N i / (c + i)``).  Below 1 in practice,
            for sparse sums take longer (``benchmarks/streams.md`` measures it); None: always sparse.

    Cost: that of the codec whose form the vector has.   State: none.
    Differs from the paper: the switch follows the bytes of both codecs, whichever they are.

    Example:
        >>> codec = StreamCodec()
        >>> codec.limit(1000, torch.float32), StreamCodec(factor=0.5).limit(1000, torch.float32)
        (500, 250)

    References: SparCML, section 5.1 ("Switching to a Dense Format").
    """

    def __init__(
        self,
        sparse: Codec[SparseVector] | None = None,
        dense: Codec[DenseVector] | None = None,
        *,
        factor: float | None = 1.0,
    ) -> None:
        if factor is not None and not 0 <= factor <= 1:
            raise ConfigurationError(
                f"StreamCodec: factor is {factor}; give the part of delta up to which a vector stays "
                "sparse, in [0, 1], or None"
            )
        self.sparse, self.dense, self.factor = sparse or Coo(), dense or Whole(), factor
        # a limit is a bisection, and every region of every step asks for one; seeded copies share them
        self._limits: dict[tuple[int, torch.dtype], int] = {}

    def __repr__(self) -> str:
        return f"StreamCodec({self.sparse!r}, {self.dense!r}, factor={self.factor})"

    def seeded(self, rank: int, step: int) -> StreamCodec:
        """Return the codec for one message source and step."""
        twin = copy.copy(self)
        twin.sparse, twin.dense = self.sparse.seeded(rank, step), self.dense.seeded(rank, step)
        return twin

    def limit(self, size: int, dtype: torch.dtype) -> int | None:
        """Return the most entries with which a vector of ``size`` elements stays sparse; None: all."""
        if self.factor is None:
            return None
        if (size, dtype) not in self._limits:
            dense, limit = self.dense.nbytes(size, size, dtype), 0
            if dense >= self.sparse.nbytes(0, size, dtype):
                limit = int(self.factor * self.sparse.entries_within(dense, size, dtype))
            self._limits[size, dtype] = limit
        return self._limits[size, dtype]

    def is_exact(self, dtype: torch.dtype) -> bool:
        """Tell whether values of ``dtype`` arrive as they are in both forms."""
        return self.sparse.is_exact(dtype) and self.dense.is_exact(dtype)

    def encode(self, vector: Vector) -> Encoded[Vector]:
        """Encode a vector in the form that it has."""
        encoded: Encoded[SparseVector] | Encoded[DenseVector]
        if isinstance(vector, SparseVector):
            encoded = self.sparse.encode(vector)
        else:
            encoded = self.dense.encode(vector)
        return Encoded(encoded.payload, encoded.decoded)

    def decode(self, payload: Tensor, size: int) -> Vector:
        """Decode one whole message as a vector of ``size`` elements, in the form that it has."""
        return self._codec_of(Header.read(payload)).decode(payload, size)

    def parts(self, nnz: int, size: int, dtype: torch.dtype) -> Parts:
        """Return the bytes of the longest message of at most ``nnz`` entries, whichever form it has."""
        limit = self.limit(size, dtype)
        if limit is None or nnz <= limit:
            return self.sparse.parts(min(nnz, size), size, dtype)
        longest = self.sparse.parts(limit, size, dtype), self.dense.parts(size, size, dtype)
        return max(longest, key=lambda parts: parts.nbytes)

    def read_header(self, buffer: Tensor) -> Header:
        """Read the header of a message in either form.

        Raises:
            WireFormatError: the buffer does not start with a header of either codec.
        """
        return self._codec_of(Header.read(buffer)).read_header(buffer)

    def layout(self, header: Header) -> Parts:
        """Return the exact bytes of the message that starts with ``header``."""
        return self._codec_of(header).layout(header)

    def _codec_of(self, header: Header) -> Codec[SparseVector] | Codec[DenseVector]:
        return self.dense if header.format == self.dense.format else self.sparse
