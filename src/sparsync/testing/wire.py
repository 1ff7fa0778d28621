"""The contract of a codec."""

from __future__ import annotations

import torch

from sparsync.errors import WireFormatError
from sparsync.sparse import SparseVector
from sparsync.testing.cases import cases, same
from sparsync.wire.base import Codec

__all__ = ["check_codec"]


def check_codec(codec: Codec) -> None:
    """Check a codec: round trips, exact sizes, refusal of every truncated message.

    Example:
        >>> from sparsync.wire import Coo
        >>> check_codec(Coo())
    """
    for case in cases():
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            vector = SparseVector.from_dense(case.make(0, 2, 1).to(dtype))
            encoded = codec.encode(vector)
            where = f"{type(codec).__name__}, case '{case.name}', {dtype}"
            assert encoded.payload.dtype == torch.uint8, f"{where}: payload is not bytes"
            nbytes = codec.nbytes(vector.nnz, vector.size, dtype)
            assert encoded.payload.numel() == nbytes, f"{where}: nbytes is wrong"
            longer = torch.cat([encoded.payload, torch.zeros(9, dtype=torch.uint8)])
            assert codec.measure(longer).nbytes == nbytes, f"{where}: measure is wrong"
            decoded = codec.decode(encoded.payload, vector.size)
            assert same(decoded, encoded.decoded), f"{where}: decode differs from decoded"
            if codec.exact:
                assert same(decoded, vector), f"{where}: an exact codec changed the vector"
            for length in {0, 1, 7, nbytes // 2, nbytes - 1} - {nbytes}:
                try:
                    codec.decode(encoded.payload[:length], vector.size)
                except WireFormatError:
                    continue
                raise AssertionError(f"{where}: {length} of {nbytes} bytes were accepted")
