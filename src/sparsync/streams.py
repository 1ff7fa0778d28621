"""Sparse streams: vectors that are sparse as long as that pays, and dense from then on.

References: Renggli et al., SparCML, SC 2019, section 5.1.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch

from sparsync.operations import SUM, Reduction
from sparsync.sparse import DenseVector, SparseVector, Vector

__all__ = ["combine", "delta", "densify", "fold"]


def delta(size: int, value_bytes: int, index_bytes: int = 4) -> int:
    """Return the most entries for which sparse takes no more bytes than dense: ``N i / (c + i)``.

    Args:
        size: number of elements N.
        value_bytes: of one value (isize).
        index_bytes: of one index (c).

    Example:
        >>> delta(1000, value_bytes=4), delta(1000, value_bytes=8)
        (500, 666)

    References: SparCML, section 5.1.
    """
    return size * value_bytes // (index_bytes + value_bytes)


def combine(a: Vector, b: Vector, operation: Reduction = SUM, limit: int | None = None) -> Vector:
    """Return ``a operation b``: sparse if both are and the result surely is, else dense.

    Args:
        a: the left operand (matters to operations that do not commute); not modified.
        b: the right operand, of the same size and dtype; not modified.
        operation: what is absent is its neutral element.
        limit: most entries of a sparse result, whose number is bounded by ``|a| + |b|`` (the size
            of the union is costly); None: two sparse vectors give a sparse one.

    Cost: O(|a| + |b|) where both are sparse; disjoint supports one behind the other are joined.

    Example:
        >>> a, b = (SparseVector.from_dense(torch.tensor(x)) for x in ([1.0, 0, 0], [2.0, 0, 3.0]))
        >>> combine(a, b).nnz, combine(a, b, limit=2)
        (2, DenseVector(values=tensor([3., 0., 3.])))
    """
    if isinstance(a, SparseVector) and isinstance(b, SparseVector):
        if limit is None or a.nnz + b.nnz <= limit:
            return _combine_sparse(a, b, operation)
        a = densify(a, operation)
    if isinstance(a, DenseVector) and isinstance(b, DenseVector):
        return DenseVector(operation.apply(a.values, b.values))
    if isinstance(a, DenseVector):
        assert isinstance(b, SparseVector)
        values = a.values.clone()
        values[b.indices] = operation.apply(values[b.indices], b.values)
        return DenseVector(values)
    assert isinstance(b, DenseVector)
    values = b.values.clone()
    values[a.indices] = operation.apply(a.values, values[a.indices])
    return DenseVector(values)


def fold(vectors: Iterable[Vector], operation: Reduction = SUM, limit: int | None = None) -> Vector:
    """Return ``((v0 op v1) op v2) ...``, dense from where the number of entries may exceed ``limit``.

    Sparse sums are one merge; the result is that of the left fold, bit for bit.

    Example:
        >>> ones = SparseVector.from_dense(torch.ones(2))
        >>> fold([ones, ones, ones]).to_dense().tolist()
        [3.0, 3.0]
    """
    vectors = list(vectors)
    sparse = [v for v in vectors if isinstance(v, SparseVector)]
    few = limit is None or sum(v.nnz for v in sparse) <= limit
    if operation is SUM and few and len(sparse) == len(vectors):
        return SparseVector.merge(sparse)
    return functools.reduce(lambda a, b: combine(a, b, operation, limit), vectors)


def densify(vector: Vector, operation: Reduction = SUM) -> DenseVector:
    """Store all elements: what is absent is the operation's neutral element."""
    if isinstance(vector, DenseVector):
        return vector
    return DenseVector(vector.to_dense(operation.neutral(vector.values.dtype)))


def _combine_sparse(a: SparseVector, b: SparseVector, operation: Reduction) -> SparseVector:
    if a.nnz == 0 or b.nnz == 0:
        return b if a.nnz == 0 else a
    if bool(a.indices[-1] < b.indices[0]):
        return SparseVector.join([a, b])
    if operation is SUM:
        return SparseVector.merge([a, b])
    union = torch.unique(torch.cat([a.indices, b.indices]))
    neutral = operation.neutral(a.values.dtype)
    left, right = (a.values.new_full((union.numel(),), neutral) for _ in range(2))
    left[torch.searchsorted(union, a.indices)] = a.values
    right[torch.searchsorted(union, b.indices)] = b.values
    values = operation.apply(left, right)
    stored = values != neutral
    return SparseVector(union[stored], values[stored], a.size)
