"""The papers' formats: sparse messages (Ok-Topk's COO), dense ones, and either by size (SparCML)."""

from __future__ import annotations

import copy
from typing import Any, final

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError, WireFormatError
from sparsync.kernels.packing import unordered, view_as
from sparsync.sparse import DenseVector, SparseVector, Vector
from sparsync.transports.communicator import bytes_of
from sparsync.transports.ledger import Parts
from sparsync.wire.codec import HEADER_BYTES, Codec, Encoded, Header, Opened, Writer, written

__all__ = ["INDEX_BYTES", "Coo", "StreamCodec", "Whole", "pack_words", "unpack_words"]

INDEX_BYTES = 4


@final
class Coo(Codec[SparseVector]):
    """Writes a header, all indices (u32, ascending), and then all values, as in the papers.

    Cost: 8 + 8 nnz bytes for float32.   State: none.
    Differs from the paper: indices are relative to the region, so a vector may have more elements than
    32 bits can index; in addition to the "2k words", a message has a header of two words.

    Example:
        >>> v = SparseVector.from_dense(torch.tensor([0.0, 1.0, 0.0]))
        >>> Coo().encode(v).payload.tolist()
        [81, 1, 1, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 128, 63]

    References: Li & Hoefler, Ok-Topk, PPoPP 2022, section 2 ("COO").
    """

    format = 1
    exact = True

    def encode(self, vector: SparseVector) -> Encoded[SparseVector]:
        """Encode a vector; ``decoded`` is the vector itself."""
        start = self.start(vector)
        return Encoded(self.message(start, pack_words(vector.indices), vector.values), vector)

    def decode(self, payload: Tensor, size: int) -> SparseVector:
        """Decode a message; check the count, and the order and range of its indices."""
        header, body = self.body(payload, size)
        middle = INDEX_BYTES * header.entries
        indices = unpack_words(body[:middle], size)
        return SparseVector(indices, view_as(body[middle:], header.dtype), size)

    def layout(self, header: Header) -> Parts:
        """Return 8 bytes of header, 4 per index, and the dtype's width per value."""
        count = header.entries
        return Parts(HEADER_BYTES, INDEX_BYTES * count, header.dtype.itemsize * count)


@final
class Whole(Codec[DenseVector]):
    """Writes a header and then all values (SparCML's dense form: the count equals the size).

    Args:
        dtype: the dtype to which values are rounded; finite values stay finite.  With None, values
            are sent unchanged.

    Cost: 8 + 4 n bytes for float32, 8 + 2 n for bfloat16.   State: none.
    Differs from the paper: the header names the form, which in the paper follows from the count.

    Example:
        >>> Whole().encode(DenseVector(torch.tensor([1.0]))).payload.tolist()
        [81, 3, 1, 0, 1, 0, 0, 0, 0, 0, 128, 63]

    References: SparCML, section 5.1.
    """

    format = 3
    is_dense = True

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype, self.exact = dtype, dtype is None

    def __repr__(self) -> str:
        return f"Whole({self.dtype or ''})"

    def is_exact(self, dtype: torch.dtype) -> bool:
        """Return whether values of ``dtype`` arrive unchanged."""
        return self.dtype in (None, dtype)

    def encode(self, vector: DenseVector) -> Encoded[DenseVector]:
        """Encode a vector; ``decoded`` holds the rounded values in the vector's dtype."""
        start, values = self.start(vector), vector.values
        sent = values if self.dtype is None else _rounded(values, self.dtype)
        return Encoded(self.message(start, sent), DenseVector(sent.to(values.dtype)))

    def decode(self, payload: Tensor, size: int) -> DenseVector:
        """Decode a message and check the count; values have the dtype in which they were sent."""
        header, body = self.body(payload, size)
        self._check_count(header, size)
        # a message may start at any byte, but ``view`` needs aligned memory
        return DenseVector(body.clone().view(header.dtype))

    @staticmethod
    def _check_count(header: Header, size: int) -> None:
        if header.entries != size:
            raise WireFormatError(
                f"a dense message has {header.entries} values, expected {size}; do all ranks cut the "
                "same regions?"
            )

    step = 1  # runs of a message may start anywhere

    def blank(self, size: int, like: Tensor) -> Tensor:
        """Return a message for ``size`` elements, still to be written, on the device of ``like``."""
        start = self.start(DenseVector(like.new_empty(1).expand(size)))  # takes no memory
        return self.message(start, like.new_empty(size, dtype=self.dtype or like.dtype))

    def write_(self, payload: Tensor, start: int, values: Tensor) -> None:
        """Write elements ``[start, start + len(values))`` of a message; change no others."""
        sent = bytes_of(values if self.dtype is None else _rounded(values, self.dtype))
        at = HEADER_BYTES + start * (self.dtype or values.dtype).itemsize
        payload[at : at + sent.numel()] = sent

    def writer(self, payload: Tensor) -> Writer:
        """Return a ``Writer`` for one blank message, which writes like ``write_``."""

        def write(start: int, values: Tensor, more: Tensor | None = None) -> None:
            self.write_(payload, start, values if more is None else values + more)

        return write

    def decode_to(
        self,
        payload: Tensor,
        into: Tensor,
        divisor: float = 1.0,
        *,
        add: bool = False,
        start: int = 0,
        size: int | None = None,
    ) -> None:
        """Decode a message of ``size`` elements, or a run from ``start`` on, into ``into``.

        The values are divided by ``divisor``.  With ``add``, they are added to ``into``; otherwise, they
        overwrite it.
        """
        opened = self.open(payload, into.numel() if size is None else size)
        opened.decode_to(into, divisor, add=add, start=start)

    def open(self, payload: Tensor, size: int) -> Opened:
        """Check a whole message of ``size`` elements; return it for decoding in runs."""
        header, body = self.body(payload, size)
        self._check_count(header, size)
        return _OpenedWhole(body, header.dtype)

    def header(self, nnz: int, size: int, dtype: torch.dtype) -> Header:
        """Return the header of a message, with the dtype in which values are sent."""
        return super().header(nnz, size, self.dtype or dtype)

    def layout(self, header: Header) -> Parts:
        """Return 8 bytes of header and the dtype's width per element."""
        return Parts(HEADER_BYTES, value=header.dtype.itemsize * header.entries)


@final
class _OpenedWhole(Opened):
    """A checked message of ``Whole``."""

    def __init__(self, body: Tensor, dtype: torch.dtype) -> None:
        self._body, self._dtype = body, dtype

    def decode_to(
        self, into: Tensor, divisor: float = 1.0, *, add: bool = False, start: int = 0
    ) -> None:
        """Decode elements from ``start`` on, divide them, and write them to ``into`` or add them."""
        written(self._values(start, start + into.numel()), into, divisor, add=add)

    def is_finite(self) -> bool:
        """Return whether the message contains neither NaN nor Inf."""
        return bool(self._values(0, self._body.numel()).isfinite().all())

    def _values(self, start: int, stop: int) -> Tensor:
        width = self._dtype.itemsize
        # a message may start at any byte, but ``view`` needs aligned memory
        return self._body[start * width : stop * width].clone().view(self._dtype)


@final
class StreamCodec(Codec[Vector]):
    """Encodes sparse vectors with one codec and dense vectors with a second; the header says which.

    Args:
        sparse: codec for sparse vectors (default: ``Coo()``, as in the paper).
        dense: codec for dense vectors (default: ``Whole()``).
        factor: a vector stays sparse up to ``factor * delta`` entries, where delta is the number of
            entries at which the dense message is no longer than the sparse one
            (coo: ``N i / (c + i)``, for c bytes per index and i per value).  In practice, the best factor
            is below 1, because sparse vectors take longer to sum (measured in ``benchmarks/streams.md``).
            With None, all vectors stay sparse.

    Cost: the cost of the codec for the vector's form.   State: none.
    Differs from the paper: the switch compares the bytes of the two codecs in use.

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
        # Limits are cached, because each takes a bisection and is needed for every region of every step.
        # Seeded copies share the cache.
        self._limits: dict[tuple[int, torch.dtype], int] = {}

    def __repr__(self) -> str:
        return f"StreamCodec({self.sparse!r}, {self.dense!r}, factor={self.factor})"

    def seeded(self, rank: int, step: int) -> StreamCodec:
        """Return a codec for the messages that ``rank`` sends at ``step``."""
        twin = copy.copy(self)
        twin.sparse, twin.dense = self.sparse.seeded(rank, step), self.dense.seeded(rank, step)
        return twin

    def limit(self, size: int, dtype: torch.dtype) -> int | None:
        """Return how many entries a vector may have and still stay sparse; None for no limit."""
        if self.factor is None:
            return None
        if (size, dtype) not in self._limits:
            # a dense message with few bits per element may be shorter than even an empty sparse message;
            # the limit is then 0
            dense, limit = self.dense.nbytes(size, size, dtype), 0
            if dense >= self.sparse.nbytes(0, size, dtype):
                limit = int(self.factor * self.sparse.entries_within(dense, size, dtype))
            self._limits[size, dtype] = limit
        return self._limits[size, dtype]

    def is_exact(self, dtype: torch.dtype) -> bool:
        """Return whether values of ``dtype`` arrive unchanged in both forms."""
        return self.sparse.is_exact(dtype) and self.dense.is_exact(dtype)

    def encode(self, vector: Vector) -> Encoded[Vector]:
        """Encode a vector in its current form."""
        codec: Codec[Any] = self.sparse if isinstance(vector, SparseVector) else self.dense
        return codec.encode(vector)

    def decode(self, payload: Tensor, size: int) -> Vector:
        """Decode one whole message; the result has the form in which the vector was sent."""
        return self._codec_of(Header.read(payload)).decode(payload, size)

    def parts(self, nnz: int, size: int, dtype: torch.dtype) -> Parts:
        """Return the number of bytes, by purpose, of the longest message of ``nnz`` entries or fewer."""
        limit = self.limit(size, dtype)
        if limit is None or nnz <= limit:
            return self.sparse.parts(min(nnz, size), size, dtype)
        longest = self.sparse.parts(limit, size, dtype), self.dense.parts(size, size, dtype)
        return max(longest, key=lambda parts: parts.nbytes)

    def read_header(self, buffer: Tensor) -> Header:
        """Read the header of a message in either form."""
        return self._codec_of(Header.read(buffer)).read_header(buffer)

    def layout(self, header: Header) -> Parts:
        """Return the exact number of bytes of the message with this header, split by purpose."""
        return self._codec_of(header).layout(header)

    def _codec_of(self, header: Header) -> Codec[SparseVector] | Codec[DenseVector]:
        return self.dense if header.format == self.dense.format else self.sparse


def pack_words(indices: Tensor) -> Tensor:
    """Convert int64 indices below 2^32 to u32."""
    return indices.to(torch.uint32)


def unpack_words(raw: Tensor, size: int) -> Tensor:
    """Read u32 indices as int64; raise WireFormatError unless they ascend strictly in ``[0, size)``."""
    indices = view_as(raw, torch.uint32).to(torch.int64)
    if indices.numel() and (int(indices[-1]) >= size or bool((indices.diff() <= 0).any())):
        raise unordered(size)
    return indices


def _rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round values; finite ones are clamped to the largest number that both dtypes can represent."""
    limit = min(torch.finfo(dtype).max, torch.finfo(values.dtype).max)
    for kind in (dtype, values.dtype):
        largest = torch.tensor(limit, dtype=torch.float64, device="cpu").to(kind)
        if float(largest) > limit:  # 65,504 in float16 would round to 65,536 in bfloat16
            largest = torch.nextafter(largest, torch.zeros_like(largest))
        limit = float(largest)
    return torch.where(values.isfinite(), values.clamp(-limit, limit), values).to(dtype)
