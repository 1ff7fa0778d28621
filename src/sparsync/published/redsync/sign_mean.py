"""Sign-mean, RedSync's quantisation: a message contains indices, and one mean per layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Literal, final

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError, WireFormatError
from sparsync.kernels import packing
from sparsync.sparse import SparseVector
from sparsync.transports.ledger import Parts
from sparsync.wire.codec import LONG_HEADER_BYTES, Codec, Encoded, Header
from sparsync.wire.coo import INDEX_BYTES, pack_words, unpack_words

__all__ = ["SignMean"]

_FORMS = MappingProxyType({"coo": 1, "packed": 2})
_COUNT_BYTES = _MEAN_BYTES = 4
_LAYER_LIMIT = 1 << 16


@final
@dataclass(eq=False)
class SignMean(Codec[SparseVector]):
    """Sends indices, and one mean for all values in a layer; see ``docs/wire-format.md``.

    Every entry of a layer is decoded as the mean of the layer's entries.  This is a projection,
    ``|x - Q(x)|^2 = |x|^2 - nnz mean^2``, so the error may be kept in the residual.  The error is small
    if all entries have the same sign and similar magnitudes, as after ``OneSigned`` selection.

    A mean is computed in float64 and rounded to float32.  Finite values have a finite mean.  A NaN or Inf
    makes the mean, and so its whole layer, NaN or Inf.

    Args:
        indices: "coo": one word per index, as published; "packed": Elias-Fano, as in ``Packed``.
        layers: the numbers of elements in 1 to 65535 layers (``for_layers`` sets them); None means one
            layer.

    Cost: 16 bytes, 8 bytes per layer, and the indices: 4 nnz bytes, or as in ``Packed``.   State: none.
    Differs from the paper: fused layers share a message; indices may be packed; the caller may keep the
    rounding error, which the paper drops.

    Example:
        >>> v = SparseVector.from_dense(torch.tensor([0.0, 1.0, 3.0, 0.0]))
        >>> encoded = SignMean().encode(v)
        >>> encoded.payload[16:].tolist(), encoded.decoded.values.tolist()
        ([2, 0, 0, 0, 0, 0, 0, 64, 1, 0, 0, 0, 2, 0, 0, 0], [2.0, 2.0])

    References: Fang et al., `RedSync <https://arxiv.org/abs/1808.04357>`_, JPDC 2019, section 5.2.3.
    """

    format = 6
    options = tuple(_FORMS.values())
    header_bytes = LONG_HEADER_BYTES

    indices: Literal["coo", "packed"] = "coo"
    layers: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.indices not in _FORMS:
            raise ConfigurationError(
                f"indices={self.indices!r} is unknown; use one of {', '.join(_FORMS)}"
            )
        layers = None if self.layers is None else tuple(self.layers)
        if layers is not None and not (0 < len(layers) < _LAYER_LIMIT and min(layers) >= 0):
            raise ConfigurationError(
                f"{len(layers)} layers of {min(layers, default=0)} or more elements do not fit one "
                f"message; give the sizes (>= 0) of 1 to {_LAYER_LIMIT - 1} layers"
            )
        self.layers, self.option = layers, _FORMS[self.indices]
        self.detail = 1 if layers is None else len(layers)

    def for_layers(self, sizes: Sequence[int]) -> SignMean:
        """Return a codec with a mean for each layer."""
        return SignMean(self.indices, sizes)

    def encode(self, vector: SparseVector) -> Encoded[SparseVector]:
        """Encode a vector; ``decoded`` has the same indices, and the mean as every value in a layer."""
        # signs need no bits: after ``OneSigned``, all values in a layer have the sign of their mean
        # (5.2.3)
        start, indices, size = self.start(vector), vector.indices, vector.size
        counts = self._counts(indices, size)
        means = _means(vector.values, counts)
        # one count per layer, as in the paper's message (section 5.3: "an initial element, which
        # indicates the length"), because the layers of a fused group are concatenated
        table = torch.stack([counts.to(torch.int32), means.view(torch.int32)], 1).flatten()
        packed = self.indices == "packed"
        raw = packing.pack_indices(indices.contiguous(), size) if packed else pack_words(indices)
        decoded = _spread(indices, means, counts, vector.values.dtype, size)
        return Encoded(self.message(start, table, raw), decoded)

    def decode(self, payload: Tensor, size: int) -> SparseVector:
        """Decode a message; check every bit except the means of layers with entries."""
        header, body = self.body(payload, size)
        if header.detail != self.detail:
            raise WireFormatError(
                f"a message has {header.detail} layers, expected {self.detail}; do all ranks "
                "fuse the same layers?"
            )
        middle = (_COUNT_BYTES + _MEAN_BYTES) * header.detail
        table = packing.view_as(body[:middle], torch.uint32).view(-1, 2)
        counts, means = table[:, 0].to(torch.int64), table[:, 1].contiguous().view(torch.float32)
        if header.option == _FORMS["packed"]:
            indices = packing.unpack_indices(body[middle:], header.entries, size)
        else:
            indices = unpack_words(body[middle:], size)
        # The counts are redundant, because the indices determine the layers.  A mismatch reveals that
        # ranks fuse different layers; means would then be used for the wrong entries.
        found = self._counts(indices, size)
        if not torch.equal(found, counts):
            at = int((found != counts).nonzero()[0])
            raise WireFormatError(
                f"a message says that layer {at} has {int(counts[at])} entries, but "
                f"{int(found[at])} of its indices lie there; do all ranks fuse the same layers?"
            )
        if bool(means.view(torch.int32)[counts == 0].any()):
            # every vector has exactly one encoding, so refuse bytes without a meaning
            raise WireFormatError("a message has a mean for a layer without entries; it is corrupt")
        return _spread(indices, means, counts, header.dtype, size)

    def layout(self, header: Header) -> Parts:
        """Return the numbers of bytes of header and counts, of indices, and of means."""
        _, _, nnz, form, size, layers = header
        assert size is not None
        return Parts(
            header=LONG_HEADER_BYTES + _COUNT_BYTES * layers,
            index=packing.index_bytes(nnz, size) if form == _FORMS["packed"] else INDEX_BYTES * nnz,
            value=_MEAN_BYTES * layers,
        )

    def _counts(self, indices: Tensor, size: int) -> Tensor:
        """Return how many of the ascending indices are in each layer."""
        cuts = [0, *accumulate((size,) if self.layers is None else self.layers)]
        if cuts[-1] != size:
            raise ConfigurationError(
                f"sign-mean has layers of {cuts[-1]} elements together, but the vector has {size}; "
                "pass for_layers the sizes of the layers that travel together"
            )
        cut = torch.tensor(cuts, device=indices.device)
        return torch.searchsorted(indices.contiguous(), cut).diff()


def _means(values: Tensor, counts: Tensor) -> Tensor:
    """Return the float32 mean of each layer; 0 for a layer without entries."""
    # dividing by a power of two is exact, and keeps sums of the largest float64 values finite
    scale = 2.0 ** values.numel().bit_length()
    sums = torch.segment_reduce(values.double() / scale, "sum", lengths=counts)
    means = sums / counts.clamp(min=1) * scale
    # the mean of finite values stays finite; NaN and Inf pass through, so all ranks refuse the step
    largest = torch.finfo(torch.float32).max
    return torch.where(sums.isfinite(), means.clamp(-largest, largest), means).to(torch.float32)


def _spread(
    indices: Tensor, means: Tensor, counts: Tensor, dtype: torch.dtype, size: int
) -> SparseVector:
    """Return a vector in which each entry's value is the mean of its layer."""
    values = means.to(dtype).repeat_interleave(counts, output_size=indices.numel())
    return SparseVector(indices, values, size)
