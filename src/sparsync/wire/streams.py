"""The wire format of sparse streams: sparse messages, and dense ones from where those are shorter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError
from sparsync.sparse import DenseVector, SparseVector, Vector
from sparsync.transports.ledger import Parts
from sparsync.wire.base import HEADER_BYTES, Codec, first_bytes, parse_header
from sparsync.wire.coo import Coo
from sparsync.wire.whole import DenseCodec, Whole

__all__ = ["EncodedStream", "StreamCodec"]


@dataclass(frozen=True, eq=False)
class EncodedStream:
    """An encoded vector.

    Attributes:
        payload: `[nbytes]` with ``torch.uint8``: what travels.
        decoded: what the receiver will see, sparse or dense as the message is.
    """

    payload: Tensor
    decoded: Vector


@final
class StreamCodec:
    """A codec for sparse vectors and one for dense ones; the header says which a message is.

    Args:
        sparse: for sparse vectors (default: coo, as in the paper).
        dense: for dense ones (default: the values as they are).
        factor: a vector stays sparse up to ``factor * delta`` entries, delta being where the dense
            message is no longer than the sparse one (coo: ``N i / (c + i)``).  Below 1 in practice,
            for sparse sums take longer (``benchmarks/streams.md`` measures it); None: always sparse.

    State: the limits that were asked for.

    Example:
        >>> codec = StreamCodec()
        >>> codec.limit(1000, torch.float32), StreamCodec(factor=0.5).limit(1000, torch.float32)
        (500, 250)

    References: SparCML, section 5.1 ("Switching to a Dense Format").
    """

    def __init__(
        self,
        sparse: Codec | None = None,
        dense: DenseCodec | None = None,
        *,
        factor: float | None = 1.0,
    ) -> None:
        if factor is not None and not 0 <= factor <= 1:
            raise ConfigurationError(
                f"StreamCodec: factor is {factor}; give the part of delta up to which a vector stays "
                "sparse, in [0, 1], or None"
            )
        self.sparse, self.dense, self.factor = sparse or Coo(), dense or Whole(), factor
        self._limits: dict[tuple[int, torch.dtype], int] = {}

    def __repr__(self) -> str:
        return f"StreamCodec({self.sparse!r}, {self.dense!r}, factor={self.factor})"

    def seeded(self, rank: int, step: int) -> StreamCodec:
        """Return the codec for one message source and step."""
        sparse, dense = self.sparse.seeded(rank, step), self.dense.seeded(rank, step)
        if sparse is self.sparse and dense is self.dense:
            return self
        return StreamCodec(sparse, dense, factor=self.factor)

    def limit(self, size: int, dtype: torch.dtype) -> int | None:
        """Return the most entries with which a vector of ``size`` elements stays sparse; None: all."""
        if self.factor is None:
            return None
        if (
            size,
            dtype,
        ) not in self._limits:  # a bisection, asked for by every region of every step
            dense, limit = self.dense.nbytes(size, dtype), 0
            if dense >= self.sparse.nbytes(0, size, dtype):
                limit = int(self.factor * self.sparse.entries_within(dense, size, dtype))
            self._limits[size, dtype] = limit
        return self._limits[size, dtype]

    def is_exact(self, dtype: torch.dtype) -> bool:
        """Tell whether values of ``dtype`` arrive as they are in both forms."""
        return self.sparse.is_exact(dtype) and self.dense.is_exact(dtype)

    def encode(self, vector: Vector) -> EncodedStream:
        """Encode a vector in the form that it has."""
        if isinstance(vector, SparseVector):
            encoded = self.sparse.encode(vector)
            return EncodedStream(encoded.payload, encoded.decoded)
        payload, decoded = self.dense.encode(vector.values)
        return EncodedStream(payload, DenseVector(decoded))

    def decode(self, payload: Tensor, size: int) -> Vector:
        """Decode one whole message as a vector of ``size`` elements.

        Raises:
            WireFormatError: the message is malformed or of neither codec.
        """
        if self._is_dense(payload):
            return DenseVector(self.dense.decode(payload, size))
        return self.sparse.decode(payload, size)

    def most_bytes(self, nnz: int, size: int, dtype: torch.dtype) -> int:
        """Bound the bytes of a message of at most ``nnz`` entries, whichever form it has."""
        limit = self.limit(size, dtype)
        if limit is None or nnz <= limit:
            return self.sparse.nbytes(min(nnz, size), size, dtype)
        return max(self.sparse.nbytes(limit, size, dtype), self.dense.nbytes(size, dtype))

    def measure(self, buffer: Tensor) -> Parts:
        """Return the bytes of the message at the start of ``buffer``, read from its header."""
        return self.dense.measure(buffer) if self._is_dense(buffer) else self.sparse.measure(buffer)

    def _is_dense(self, buffer: Tensor) -> bool:
        return parse_header(first_bytes(buffer, HEADER_BYTES)).format == self.dense.format
