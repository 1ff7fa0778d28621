"""What the tests of packed messages share: vectors to pack, and the choice of a backend."""

from unittest import mock

import torch
from hypothesis import strategies as st

from sparsync import SparseVector
from sparsync.kernels import native

from .strategies import float_dtypes, palette

FORMS = ["bf16", "int8", "fp32"]
forms = st.sampled_from(FORMS)
BACKENDS = ["torch", "native"] if native.instruction_sets() else ["torch"]
backends = st.sampled_from(BACKENDS)


def vector(indices, values, size, dtype=torch.float32) -> SparseVector:
    indices = torch.tensor(indices, dtype=torch.int64)
    return SparseVector(indices, torch.tensor(values, dtype=dtype), size)


def using(backend: str):
    """Make the door choose a backend: for float32 on the CPU it would always be the fastest."""
    return mock.patch.object(native, "chosen", return_value=backend)


@st.composite
def packable(draw, max_nnz: int = 40):
    """Vectors of any density, in regions of up to 2^32 elements, of every kind of float."""
    nnz = draw(st.integers(0, max_nnz))
    size = draw(st.one_of(st.integers(nnz, 2 * nnz + 9), st.integers(nnz, 1 << 32)))
    edges = st.one_of(st.integers(0, max(size - 1, 0)), st.sampled_from([0, max(size - 1, 0)]))
    indices = sorted(draw(st.sets(edges, max_size=nnz))) if size else []
    dtype = draw(float_dtypes)
    numbers = st.one_of(st.sampled_from(palette(dtype)), st.floats(width=32))
    values = draw(st.lists(numbers, min_size=len(indices), max_size=len(indices)))
    return vector(indices, values, size, dtype)
