"""Vectors, codecs and backends for the tests of the wire formats."""

from itertools import pairwise
from unittest import mock

import torch
from hypothesis import strategies as st

from sparsync import DenseVector, SparseVector
from sparsync.kernels import native
from sparsync.published.redsync import SignMean
from sparsync.wire import Codec, Coo, LloydMax, Packed, Qsgd, SparseQsgd, Whole

from .strategies import boundaries_of, float_dtypes, palette

FORMS = ["bf16", "int8", "fp32"]
forms = st.sampled_from(FORMS)
BACKENDS = ["torch", *native.instruction_sets()[:1]]
backends = st.sampled_from(BACKENDS)


def vector(indices, values, size, dtype=torch.float32) -> SparseVector:
    indices = torch.tensor(indices, dtype=torch.int64)
    return SparseVector(indices, torch.tensor(values, dtype=dtype), size)


def using(backend: str):
    """Make the dispatcher choose this backend; by default, it chooses the fastest for float32 on CPUs."""
    return mock.patch.object(native, "chosen", return_value=backend)


@st.composite
def packable(draw, max_nnz: int = 40):
    """Draw vectors with any density and every kind of float, in regions of up to 2^32 elements."""
    nnz = draw(st.integers(0, max_nnz))
    size = draw(st.one_of(st.integers(nnz, 2 * nnz + 9), st.integers(nnz, 1 << 32)))
    edges = st.one_of(st.integers(0, max(size - 1, 0)), st.sampled_from([0, max(size - 1, 0)]))
    indices = sorted(draw(st.sets(edges, max_size=nnz))) if size else []
    dtype = draw(float_dtypes)
    numbers = st.one_of(st.sampled_from(palette(dtype)), st.floats(width=32))
    values = draw(st.lists(numbers, min_size=len(indices), max_size=len(indices)))
    return vector(indices, values, size, dtype)


def hex_of(payload: torch.Tensor) -> str:
    return bytes(payload.tolist()).hex()


def uint8(raw: bytes) -> torch.Tensor:
    return torch.tensor(list(raw), dtype=torch.uint8)


def rounded(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    """Return a dense vector after a round trip."""
    return codec.encode(DenseVector(values)).decoded.values


@st.composite
def messages(draw, codecs=(Coo, Whole, Packed, Qsgd, SparseQsgd, SignMean, LloydMax)):
    """Draw a codec with any settings, and a vector that it accepts."""
    make, sparse = draw(st.sampled_from(codecs)), draw(packable())
    block = draw(st.sampled_from([1, 3, 8, 256]))
    if make is Packed:
        return Packed(draw(forms), block=block), sparse
    if make is SignMean:
        layers = [b - a for a, b in pairwise(draw(boundaries_of(sparse.size)))]
        form = draw(st.sampled_from(["coo", "packed"]))
        return SignMean(form, draw(st.sampled_from([layers, None]))), sparse
    if make is Coo:
        return Coo(), sparse
    dense = DenseVector(sparse.values)
    if make is Whole:
        return Whole(), dense
    if make is LloydMax:
        return LloydMax(draw(st.sampled_from(LloydMax.options)), block=block), dense
    scale, shrink = draw(st.sampled_from(["l2", "max"])), draw(st.booleans())
    bits = draw(st.sampled_from([2, 4, 8]))
    codec = make(bits, block=block, scale=scale, shrink=shrink).seeded(1, 2)
    return codec, sparse if make is SparseQsgd else dense


def receiver_of(codec: Codec) -> Codec:
    """Return a codec with other settings, if messages carry their sender's settings."""
    if isinstance(codec, SignMean):
        return SignMean("coo" if codec.indices == "packed" else "packed", codec.layers)
    return type(codec)()
