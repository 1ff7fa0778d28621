"""Dense format: every value in its place, no indices."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from sparsync.errors import WireFormatError
from sparsync.sparse import DenseVector
from sparsync.transports.ledger import Parts
from sparsync.wire.base import HEADER_BYTES, Codec, Encoded, Header

__all__ = ["Whole"]


@final
class Whole(Codec[DenseVector]):
    """Header, then all values as they are (SparCML's dense form: the count equals the size).

    Args:
        dtype: values are rounded to it; finite ones stay finite.  None: they travel as they are.

    Cost: 8 + 4 n bytes for float32, 8 + 2 n for bfloat16.   State: none.
    Differs from the paper: the header names the form; there it is told by the count alone.

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
        """Tell whether values of ``dtype`` arrive as they are."""
        return self.dtype in (None, dtype)

    def encode(self, vector: DenseVector) -> Encoded[DenseVector]:
        """Encode; ``decoded`` are the values themselves, or rounded ones in their dtype."""
        start, values = self.start(vector), vector.values
        sent = values if self.dtype is None else _rounded(values, self.dtype)
        return Encoded(self.message(start, sent), DenseVector(sent.to(values.dtype)))

    def decode(self, payload: Tensor, size: int) -> DenseVector:
        """Decode and check the count; values have the dtype that travelled."""
        header, body = self.body(payload, size)
        if header.entries != size:
            raise WireFormatError(
                f"a dense message has {header.entries} values, expected {size}; do all ranks cut the "
                "same regions?"
            )
        return DenseVector(body.clone().view(header.dtype))  # a copy is aligned

    def header(self, nnz: int, size: int, dtype: torch.dtype) -> Header:
        """Return the header of a message, with the dtype that travels."""
        return super().header(nnz, size, self.dtype or dtype)

    def layout(self, header: Header) -> Parts:
        """Return 8 bytes of header and the dtype's width per element."""
        return Parts(HEADER_BYTES, value=header.dtype.itemsize * header.entries)


def _rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round; finite values are cut to the largest number that both dtypes can hold."""
    limit = min(torch.finfo(dtype).max, torch.finfo(values.dtype).max)
    largest = torch.tensor(limit).to(dtype)
    if float(largest) > limit:  # 65,504 in float16 would round to 65,536 in bfloat16
        largest = torch.nextafter(largest, torch.zeros_like(largest))
    limit = float(largest)
    return torch.where(values.isfinite(), values.clamp(-limit, limit), values).to(dtype)
