"""Sign-mean: indices, and one mean per layer in place of its values (RedSync's quantisation)."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Literal, NamedTuple, final

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError, WireFormatError
from sparsync.kernels import packing
from sparsync.sparse import SparseVector
from sparsync.transports.ledger import Parts
from sparsync.wire.base import HEADER_BYTES, Codec, Encoded, Header, first_bytes, pack_header

__all__ = ["SignMean"]

_FORMS = MappingProxyType({"coo": 1, "packed": 2})
_SHAPE = struct.Struct("<Q")  # the size in 48 bits, the number of layers in 16
_START_BYTES = HEADER_BYTES + _SHAPE.size
_INDEX_BYTES = _COUNT_BYTES = _MEAN_BYTES = 4
_SIZE_LIMIT = 1 << 32
_LAYER_LIMIT = 1 << 16


class _Shape(NamedTuple):
    """What the first 16 bytes say."""

    header: Header
    size: int
    layers: int

    def parts(self) -> Parts:
        return _parts(self.header.count, self.size, self.header.option, self.layers)


@final
class SignMean(Codec):
    """Header, shape, a count and a mean per layer, indices: see ``docs/wire-format.md``.

    Every entry of a layer arrives as the mean of the layer's entries, a projection:
    ``|x - Q(x)|^2 = |x|^2 - nnz mean^2``, so the error may be kept in the residual.  It is small where
    entries have one sign and one magnitude: ``OneSigned`` selection belongs to this codec.  Mixed
    signs are legal and merely lose more.

    A mean is summed in float64 in the order of the indices and rounded to float32.  Finite values
    have a finite mean; a NaN or Inf makes its whole layer NaN or Inf.  A mean that the dtype rounds
    to zero makes explicit zeros.

    Args:
        indices: "coo", as published, one word each; "packed", ours, Elias-Fano as in ``Packed``.
        layers: elements per layer, 1 to 65535 layers (``for_layers`` sets them); None: one layer.

    Cost: 16 bytes, 8 per layer; 4 nnz bytes of indices, or those of ``Packed``.   State: none.
    Differs from the paper: the message is [header, (count, mean) per layer, indices], so fused layers
    share one; packed indices; the rounding error is the caller's to keep (the paper drops it).

    Example:
        >>> v = SparseVector.from_dense(torch.tensor([0.0, 1.0, 3.0, 0.0]))
        >>> encoded = SignMean().encode(v)
        >>> encoded.payload[16:].tolist(), encoded.decoded.values.tolist()
        ([2, 0, 0, 0, 0, 0, 0, 64, 1, 0, 0, 0, 2, 0, 0, 0], [2.0, 2.0])

    References: Fang et al., `RedSync <https://arxiv.org/abs/1808.04357>`_, JPDC 2019, section 5.2.3.
    """

    format = 6
    exact = False
    options = tuple(_FORMS.values())

    def __init__(
        self, indices: Literal["coo", "packed"] = "coo", layers: Sequence[int] | None = None
    ) -> None:
        if indices not in _FORMS:
            raise ConfigurationError(
                f"indices={indices!r} is unknown; use one of {', '.join(_FORMS)}"
            )
        if layers is not None and not (0 < len(layers) < _LAYER_LIMIT and min(layers) >= 0):
            raise ConfigurationError(
                f"{len(layers)} layers of {min(layers, default=0)} or more elements do not fit one "
                f"message; give the sizes (>= 0) of 1 to {_LAYER_LIMIT - 1} layers"
            )
        self.indices, self.layers = indices, None if layers is None else tuple(layers)

    def __repr__(self) -> str:
        return f"SignMean(indices={self.indices!r}, layers={self.layers})"

    def for_layers(self, sizes: Sequence[int]) -> SignMean:
        """Return a codec with a mean for each layer."""
        return SignMean(self.indices, sizes)

    def encode(self, vector: SparseVector) -> Encoded:
        """Encode; ``decoded`` has the same indices and, layer by layer, the same value."""
        values, size = vector.values, vector.size
        if not values.dtype.is_floating_point:
            raise ConfigurationError(
                f"sign-mean averages values and takes floats, not {values.dtype}; use Coo for integers"
            )
        if not vector.nnz <= size <= _SIZE_LIMIT:
            raise ConfigurationError(
                f"sign-mean takes regions of up to 2^32 elements and no more entries than elements, "
                f"not {vector.nnz} of {size}; use smaller units or more regions"
            )
        counts = self._counts(vector.indices, size)
        means = _means(values, counts)
        form = _FORMS[self.indices]
        header = pack_header(Header(self.format, values.dtype, vector.nnz, form))
        start = bytearray(header + _SHAPE.pack(size | counts.numel() << 48))
        pieces = [
            torch.frombuffer(start, dtype=torch.uint8).to(values.device),
            torch.stack([counts.to(torch.int32), means.view(torch.int32)], 1).view(-1),
            _packed(vector.indices, size, form),
        ]
        payload = torch.cat([piece.view(torch.uint8) for piece in pieces])
        return Encoded(payload, _spread(vector.indices, means, counts, values.dtype, size))

    def decode(self, payload: Tensor, size: int) -> SparseVector:
        """Decode and check every bit but the means', which may be anything where entries are.

        Raises:
            WireFormatError: the payload is not a sign-mean message for ``size`` elements in these
                layers.
        """
        header, _, layers = self._checked(payload, size)
        middle = _START_BYTES + (_COUNT_BYTES + _MEAN_BYTES) * layers
        table = _words(payload[_START_BYTES:middle]).view(-1, 2)
        counts, means = table[:, 0].to(torch.int64), table[:, 1].contiguous().view(torch.float32)
        indices = _unpacked(payload[middle:], header.count, size, header.option)
        found = self._counts(indices, size)
        if not torch.equal(found, counts):
            at = int((found != counts).nonzero()[0])
            raise WireFormatError(
                f"a message says that layer {at} has {int(counts[at])} entries, but "
                f"{int(found[at])} of its indices lie there; do all ranks fuse the same layers?"
            )
        if bool(means.view(torch.int32)[counts == 0].any()):
            raise WireFormatError("a message has a mean for a layer without entries; it is corrupt")
        return _spread(indices, means, counts, header.dtype, size)

    def parts(self, nnz: int, size: int, dtype: torch.dtype) -> Parts:
        """Return 16 bytes of header and shape, 4 per layer's count; indices; 4 per layer's mean."""
        return _parts(nnz, size, _FORMS[self.indices], self._layer_count)

    def measure(self, buffer: Tensor) -> Parts:
        """Read count, size, form of the indices and number of layers.

        Raises:
            WireFormatError: the buffer does not start with a sign-mean header.
        """
        return self._shape(buffer).parts()

    @property
    def _layer_count(self) -> int:
        return 1 if self.layers is None else len(self.layers)

    def _counts(self, indices: Tensor, size: int) -> Tensor:
        """Return how many of the ascending indices lie in each layer."""
        cuts = [0, *accumulate((size,) if self.layers is None else self.layers)]
        if cuts[-1] != size:
            raise ConfigurationError(
                f"sign-mean has layers of {cuts[-1]} elements together, but the vector has {size}; "
                "pass for_layers the sizes of the layers that travel together"
            )
        return torch.searchsorted(indices, torch.tensor(cuts, device=indices.device)).diff()

    def _checked(self, payload: Tensor, size: int) -> _Shape:
        """Read what stands before the layers, and check it against the payload."""
        shape = self._shape(payload)
        expected = shape.parts().nbytes
        if payload.numel() != expected:
            raise WireFormatError(
                f"a message of {payload.numel()} bytes says that it has {shape.header.count} entries "
                f"in {shape.layers} layers, which take {expected} bytes; it is truncated or corrupt"
            )
        if (shape.size, shape.layers) != (size, self._layer_count):
            raise WireFormatError(
                f"a message is for {shape.size} elements in {shape.layers} layers, expected {size} in "
                f"{self._layer_count}; do all ranks fuse the same layers?"
            )
        return shape

    def _shape(self, buffer: Tensor) -> _Shape:
        raw = first_bytes(buffer, _START_BYTES)
        header = self.check_header(raw)
        if len(raw) < _START_BYTES:
            raise WireFormatError(
                f"{len(raw)} bytes cannot hold a sign-mean header of {_START_BYTES}"
            )
        (word,) = _SHAPE.unpack_from(raw, HEADER_BYTES)
        size, layers = word & ((1 << 48) - 1), word >> 48
        if not (header.count <= size <= _SIZE_LIMIT and layers and header.dtype.is_floating_point):
            raise WireFormatError(
                f"a message claims {header.count} entries of {size} elements in {layers} layers of "
                f"{header.dtype}, which sign-mean never writes; it is corrupt"
            )
        return _Shape(header, size, layers)


def _parts(nnz: int, size: int, form: int, layers: int) -> Parts:
    packed = form == _FORMS["packed"]
    return Parts(
        header=_START_BYTES + _COUNT_BYTES * layers,
        index=(packing.index_bits(nnz, size) + 7) // 8 if packed else _INDEX_BYTES * nnz,
        value=_MEAN_BYTES * layers,
    )


def _means(values: Tensor, counts: Tensor) -> Tensor:
    """Return the float32 mean of each layer; 0 where it has no entries."""
    scale = 2.0 ** values.numel().bit_length()  # exact, and no sum of float64 overflows
    sums = torch.segment_reduce(values.double() / scale, "sum", lengths=counts)
    means = sums / counts.clamp(min=1) * scale
    largest = torch.finfo(torch.float32).max
    return torch.where(sums.isfinite(), means.clamp(-largest, largest), means).to(torch.float32)


def _spread(
    indices: Tensor, means: Tensor, counts: Tensor, dtype: torch.dtype, size: int
) -> SparseVector:
    """Give every entry of a layer the layer's mean."""
    values = means.to(dtype).repeat_interleave(counts, output_size=indices.numel())
    return SparseVector(indices, values, size)


def _packed(indices: Tensor, size: int, form: int) -> Tensor:
    if form == _FORMS["packed"]:
        return packing.pack_indices(indices.contiguous(), size)
    return indices.to(torch.uint32)


def _unpacked(raw: Tensor, count: int, size: int, form: int) -> Tensor:
    """Read the indices, and check their order and range."""
    if form == _FORMS["packed"]:
        return packing.unpack_indices(raw, count, size)
    indices = _words(raw).to(torch.int64)
    if count and (int(indices[-1]) >= size or bool((indices.diff() <= 0).any())):
        raise WireFormatError(f"a message's indices are not strictly ascending within [0, {size})")
    return indices


def _words(raw: Tensor) -> Tensor:
    """View bytes as u32, copying where they do not start on a word."""
    return (raw.clone() if raw.storage_offset() % 4 else raw).view(torch.uint32)
