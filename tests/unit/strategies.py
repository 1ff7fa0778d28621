"""Strategies for property tests: vectors full of ties, zeros and awkward floats."""

import torch
from hypothesis import strategies as st
from torch import Tensor

from sparsync import SparseVector

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGER_OF = {torch.float32: torch.int32, torch.float64: torch.int64}
INTEGER_OF |= {torch.float16: torch.int16, torch.bfloat16: torch.int16}

float_dtypes = st.sampled_from(FLOATS)


def smallest(dtype: torch.dtype) -> float:
    """The smallest denormal: the float whose bits are 1."""
    return torch.ones(1, dtype=INTEGER_OF[dtype]).view(dtype).item()


def palette(dtype: torch.dtype, *, finite: bool = False) -> list[float]:
    """Draw few distinct values of every kind of float, so that vectors of them have many ties."""
    tiny, big = smallest(dtype), torch.finfo(dtype).max
    values = [0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 0.5, tiny, -tiny, big, -big]
    return values if finite else [*values, float("inf"), float("-inf"), float("nan")]


@st.composite
def dense_tensors(draw, max_size: int = 30, dtype: torch.dtype | None = None, finite: bool = False):
    dtype = dtype or draw(float_dtypes)
    values = draw(st.lists(st.sampled_from(palette(dtype, finite=finite)), max_size=max_size))
    return torch.tensor(values, dtype=dtype)


@st.composite
def sparse_vectors(draw, dtype: torch.dtype | None = None, max_size: int = 30):
    return SparseVector.from_dense(draw(dense_tensors(max_size=max_size, dtype=dtype)))


@st.composite
def families(draw, max_parts: int = 5, max_size: int = 12):
    """Draw several dense vectors of one size and dtype, one per rank, with any float32 values."""
    size = draw(st.integers(0, max_size))
    element = st.one_of(st.just(0.0), st.floats(width=32))
    part = st.lists(element, min_size=size, max_size=size)
    return [torch.tensor(p) for p in draw(st.lists(part, min_size=1, max_size=max_parts))]


@st.composite
def boundaries_of(draw, size: int, max_parts: int = 5) -> list[int]:
    """Draw ascending cuts of ``[0, size]``, including empty regions."""
    inner = draw(st.lists(st.integers(0, size), max_size=max_parts - 1))
    return [0, *sorted(inner), size]


def same(a: Tensor, b: Tensor) -> None:
    """Assert equal shape, dtype and bits, except that any NaN equals any other NaN."""
    assert a.dtype == b.dtype
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def same_vector(a: SparseVector, b: SparseVector) -> None:
    assert a.size == b.size
    same(a.indices, b.indices)
    same(a.values, b.values)
