"""Vectors in their two forms, sparse and dense, and the operations on both.

Selectors make a ``SparseVector``, codecs turn it into bytes, collectives sum it.  ``DenseVector`` takes
its place when sparsity no longer pays: from there on a sparse stream (SparCML, section 5.1) is dense.
"""

from __future__ import annotations

import builtins
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.errors import ConfigurationError
from sparsync.reduction import SUM, Reduction

__all__ = [
    "DenseVector",
    "SparseVector",
    "Vector",
    "as_vector",
    "combine",
    "densify",
    "even_boundaries",
    "fold",
]


@dataclass(frozen=True, eq=False)
class SparseVector:
    """A vector of ``size`` elements of which ``nnz`` are stored; absent elements are neutral.

    The neutral element is 0, except for operations other than the sum (``sparsync.reduction``).

    Attributes:
        indices: `[nnz]` with ``torch.int64``, strictly ascending, in ``[0, size)``; candidates that were
            collected for a selector may have ``torch.int32``.
        values: `[nnz]`, any floating or integer dtype, on the device of ``indices``.
        size: number of elements n of the whole vector.

    The constructor checks only types (it is on the hot path); ``check`` verifies the elements.

    Example:
        >>> v = SparseVector.from_dense(torch.tensor([0.0, 3.0, 0.0, -1.0]))
        >>> v.indices.tolist(), v.values.tolist(), v.nnz
        ([1, 3], [3.0, -1.0], 2)
    """

    indices: Tensor
    values: Tensor
    size: int

    def __post_init__(self) -> None:
        tensors = isinstance(self.indices, Tensor) and isinstance(self.values, Tensor)
        if not (tensors and isinstance(self.size, int)):
            kinds = ", ".join(type(x).__name__ for x in (self.indices, self.values, self.size))
            raise ConfigurationError(
                f"SparseVector: indices, values and size are {kinds}; give two tensors and an int"
            )

    @staticmethod
    def empty(size: int, like: Tensor) -> SparseVector:
        """Make the zero vector of ``size`` elements with the dtype and device of ``like``."""
        indices = torch.empty(0, dtype=torch.int64, device=like.device)
        return SparseVector(indices, like.new_empty(0), size)

    @staticmethod
    def from_dense(dense: Tensor, absent: int | float = 0) -> SparseVector:
        """Keep the elements of a 1-D tensor that differ from ``absent``, as NaN does."""
        indices = (dense if absent == 0 else dense != absent).nonzero().flatten()
        return SparseVector(indices, dense[indices], dense.numel())

    @staticmethod
    def join(parts: Sequence[SparseVector]) -> SparseVector:
        """Unite vectors of one size whose indices ascend from part to part (nothing is added)."""
        indices, values = (torch.cat([getattr(p, f) for p in parts]) for f in ("indices", "values"))
        return SparseVector(indices, values, parts[0].size)

    @staticmethod
    def merge(parts: Sequence[SparseVector], within: Tensor | None = None) -> SparseVector:
        """Sum vectors of one size, in the order given (a left fold); zero sums are not stored.

        Elements that are not ``within`` (ascending indices) are left out.

        Example:
            >>> a = SparseVector.from_dense(torch.tensor([0.0, 1.0, 2.0]))
            >>> b = SparseVector.from_dense(torch.tensor([5.0, -1.0, 0.0]))
            >>> SparseVector.merge([a, b]).to_dense().tolist()
            [5.0, 0.0, 2.0]
        """
        # in the order given, whatever arrived first: float addition is not associative, and a sum needs
        # the same bits on every run
        if len(parts) == 1 and within is None:
            return parts[0]
        streams, size = [(p.indices, p.values) for p in parts], parts[0].size
        return SparseVector(*kernels.merge(streams, size, within), size)

    @property
    def nnz(self) -> int:
        """Number of stored elements."""
        return self.indices.numel()

    def split(self, boundaries: Sequence[int]) -> list[SparseVector]:
        """Cut into the regions ``[boundaries[i], boundaries[i + 1])``, in one search."""
        cuts = torch.tensor(list(boundaries), dtype=torch.int64, device=self.indices.device)
        places = pairwise(torch.searchsorted(self.indices, cuts).tolist())
        return [
            SparseVector(self.indices[low:high] - start, self.values[low:high], stop - start)
            for (low, high), (start, stop) in zip(places, pairwise(boundaries), strict=True)
        ]

    def embed(self, start: int, size: int) -> SparseVector:
        """Place this region at ``start`` of a vector of ``size`` elements."""
        return SparseVector(self.indices + start if start else self.indices, self.values, size)

    def restrict(self, indices: Tensor) -> SparseVector:
        """Keep the elements whose index occurs in the ascending ``indices``."""
        return self.keep(kernels.restrict(self.indices, indices))

    def keep(self, which: Tensor | builtins.slice) -> SparseVector:
        """Keep the stored elements named by a mask, by ascending positions, or by a slice."""
        return SparseVector(self.indices[which].to(torch.int64), self.values[which], self.size)

    def top(self, k: int) -> SparseVector:
        """Keep the ``k`` stored elements of largest magnitude; ties go to the lower index."""
        if self.nnz <= k and self.indices.dtype == torch.int64:
            return self
        return self.keep(kernels.top(self.values, k) if self.nnz > k else slice(None))

    def to_dense(self, absent: int | float = 0) -> Tensor:
        """Return the `[size]` tensor, with ``absent`` for elements that are not stored."""
        dense = self.values.new_full((self.size,), absent)
        dense[self.indices] = self.values
        return dense

    def to(self, device: torch.device) -> SparseVector:
        """Move to a device."""
        return SparseVector(self.indices.to(device), self.values.to(device), self.size)

    def subtract_from_(self, dense: Tensor) -> None:
        """``dense -= self``, in place, touching ``nnz`` elements."""
        kernels.subtract_(dense, self.indices, self.values)

    def write_to_(self, dense: Tensor) -> None:
        """``dense = self``, in place, in the dtype of ``dense``."""
        kernels.scatter_(dense, self.indices, self.values)

    def divide_(self, divisor: int) -> None:
        """``self /= divisor``, in place."""
        self.values.div_(divisor)

    def isfinite(self) -> Tensor:
        """Return a boolean mask over the stored elements: neither NaN nor Inf."""
        return torch.isfinite(self.values)

    def first_nonfinite(self, dtype: torch.dtype | None = None) -> int | None:
        """Return the index of the first element that is NaN or Inf, here or in ``dtype``; else None."""
        at = _first_nonfinite(self.values, dtype)
        return None if at is None else int(self.indices[at])

    def check(self) -> SparseVector:
        """Return self; ConfigurationError unless shapes, dtypes and indices are as documented."""
        if self.indices.dim() != 1 or self.indices.shape != self.values.shape:
            raise ConfigurationError(
                f"SparseVector: indices {tuple(self.indices.shape)} and values "
                f"{tuple(self.values.shape)} must be 1-D and equally long"
            )
        if self.indices.dtype != torch.int64:
            raise ConfigurationError(
                f"SparseVector: indices are {self.indices.dtype}; convert them to torch.int64"
            )
        if self.nnz:
            first, last = int(self.indices[0]), int(self.indices[-1])
            if first < 0 or last >= self.size or bool((self.indices.diff() <= 0).any()):
                raise ConfigurationError(
                    f"SparseVector: indices must be strictly ascending within [0, {self.size}); "
                    "coalesce duplicates and sort first"
                )
        return self


@dataclass(frozen=True, eq=False)
class DenseVector:
    """A vector with all of its elements stored."""

    values: Tensor  # [size]

    @property
    def size(self) -> int:
        """Number of elements n."""
        return self.values.numel()

    @property
    def nnz(self) -> int:
        """Number of stored elements: all of them."""
        return self.values.numel()

    def to_dense(self) -> Tensor:
        """Return the stored tensor itself."""
        return self.values

    def subtract_from_(self, dense: Tensor) -> None:
        """``dense -= self``, in place."""
        dense -= self.values

    def write_to_(self, dense: Tensor) -> None:
        """``dense = self``, in place, in the dtype of ``dense``."""
        dense.copy_(self.values)

    def divide_(self, divisor: int) -> None:
        """``self /= divisor``, in place."""
        self.values.div_(divisor)

    def isfinite(self) -> Tensor:
        """Return a boolean mask over the elements: neither NaN nor Inf."""
        return torch.isfinite(self.values)

    def first_nonfinite(self, dtype: torch.dtype | None = None) -> int | None:
        """Return the index of the first element that is NaN or Inf, here or in ``dtype``; else None."""
        return _first_nonfinite(self.values, dtype)


Vector = SparseVector | DenseVector


def _first_nonfinite(values: Tensor, dtype: torch.dtype | None) -> int | None:
    """Return the first position of NaN or Inf; if there is none, one pass over the values tells."""
    if dtype == torch.float16:  # other dtypes have float32's range: nothing overflows in them
        values = values.to(dtype)
    # keys order Inf and NaN above all numbers, and ``find`` returns None as soon as more than 0 reach
    # Inf's
    infinity = int(kernels.magnitude_keys(values.new_full((1,), torch.inf, device="cpu")))
    if kernels.find(values, infinity, 0) is not None:
        return None
    return int((~torch.isfinite(values)).nonzero()[0])


def combine(a: Vector, b: Vector, operation: Reduction = SUM, limit: int | None = None) -> Vector:
    """Return ``a operation b``, for vectors of one size and dtype, in sparse or dense form.

    The result is sparse if both are and ``|a| + |b|``, a bound that costs nothing, is at most ``limit``;
    with a limit of None, two sparse vectors always give a sparse one.

    Cost: O(|a| + |b|) if both are sparse; supports that lie one behind the other are joined.

    Example:
        >>> a, b = (SparseVector.from_dense(torch.tensor(x)) for x in ([1.0, 0, 0], [2.0, 0, 3.0]))
        >>> combine(a, b).nnz, combine(a, b, limit=2)
        (2, DenseVector(values=tensor([3., 0., 3.])))
    """
    if isinstance(a, SparseVector) and isinstance(b, SparseVector):
        if limit is None or a.nnz + b.nnz <= limit:
            return _combine_sparse(a, b, operation)
        a = densify(a, operation)
    if isinstance(a, SparseVector):
        values = b.to_dense().clone()
        values[a.indices] = operation.apply(a.values, values[a.indices])
        return DenseVector(values)
    if isinstance(b, DenseVector):
        return DenseVector(operation.apply(a.values, b.values))
    values = a.values.clone()
    values[b.indices] = operation.apply(values[b.indices], b.values)
    return DenseVector(values)


def fold(vectors: Iterable[Vector], operation: Reduction = SUM, limit: int | None = None) -> Vector:
    """Return ``((v0 op v1) op v2) ...``, dense as soon as more than ``limit`` entries are possible.

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
    """Store all elements; absent ones become the operation's neutral element."""
    if isinstance(vector, DenseVector):
        return vector
    return DenseVector(vector.to_dense(operation.neutral(vector.values.dtype)))


def _combine_sparse(a: SparseVector, b: SparseVector, operation: Reduction) -> SparseVector:
    if a.nnz == 0 or b.nnz == 0:
        return b if a.nnz == 0 else a
    # regions that ranks own lie one behind the other: an allgather of them adds nothing
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


def as_vector(vector: Any) -> Vector:
    """Return a dense or a sparse vector of the same elements, in the same memory if possible.

    Takes a 1-D tensor or NumPy array, a ``scipy.sparse`` array or matrix with one row, one column or one
    dimension (duplicates are summed), a ``SparseVector`` or a ``DenseVector``.

    Example:
        >>> import numpy as np
        >>> as_vector(np.array([1.0, 0.0], dtype=np.float32)).values
        tensor([1., 0.])
    """
    if isinstance(vector, SparseVector):
        return vector.check()
    if isinstance(vector, DenseVector):
        return DenseVector(_flat(vector.values))
    if isinstance(vector, Tensor):
        return DenseVector(_flat(vector.detach()))  # a sum over ranks is not differentiated
    if hasattr(vector, "tocoo") and hasattr(vector, "shape"):
        return _from_scipy(vector)
    if hasattr(vector, "__array_interface__"):
        try:
            return DenseVector(_flat(torch.as_tensor(vector)))
        except TypeError as error:
            raise ConfigurationError(
                f"the array has dtype {vector.dtype}; convert it to a numeric dtype"
            ) from error
    raise ConfigurationError(
        f"got {type(vector).__name__}; give a 1-D tensor or NumPy array, a scipy.sparse vector, a "
        "SparseVector or a DenseVector"
    )


def _flat(values: Tensor) -> Tensor:
    if values.dim() != 1:
        raise ConfigurationError(f"the tensor has shape {tuple(values.shape)}; flatten it first")
    return values


def _from_scipy(vector: Any) -> SparseVector:
    shape = tuple(vector.shape)
    if len(shape) > 2 or (len(shape) == 2 and 1 not in shape):
        raise ConfigurationError(
            f"the sparse matrix has shape {shape}; give one row, one column, or its flattened form"
        )
    coo = vector.tocoo()
    along = coo.coords[0] if len(shape) == 1 else (coo.col if shape[0] == 1 else coo.row)
    size = shape[0] if len(shape) == 1 else shape[0] * shape[1]
    indices, values = torch.as_tensor(along).to(torch.int64), torch.as_tensor(coo.data)
    unique, at = torch.unique(indices, return_inverse=True)
    summed = torch.zeros(unique.numel(), dtype=values.dtype).index_add_(0, at, values)
    stored = summed != 0  # scipy may store zeros; here absent means zero, and zeros are never sent
    return SparseVector(unique[stored], summed[stored], size)


def even_boundaries(size: int, parts: int) -> list[int]:
    """Cut ``[0, size)`` into ``parts`` regions whose widths differ by at most one.

    Example:
        >>> even_boundaries(10, 4)
        [0, 2, 5, 7, 10]
    """
    return [size * i // parts for i in range(parts + 1)]
