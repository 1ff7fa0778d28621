"""Operations for reducing vectors: element-wise, associative, with a neutral element.

*Absent means neutral*: an element that a sparse vector does not store is the operation's neutral
element (0 for a sum, 1 for a product, -inf for a maximum), and elements equal to it are never sent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeVar

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError, first_line
from sparsync.sparse import DenseVector, SparseVector, Vector

__all__ = [
    "OPERATIONS",
    "SUM",
    "Reduction",
    "combine",
    "densify",
    "entries_of",
    "fold",
    "neutral_absent",
    "reduction",
]

Number = int | float
V = TypeVar("V", SparseVector, DenseVector, Vector)


@dataclass(frozen=True)
class Reduction:
    """A binary operation with a neutral element.

    Attributes:
        name: the name that ranks compare before any data moves.
        apply: a function `[m], [m] -> [m]`, element-wise and associative; it must not modify its
            arguments.
        neutral: returns, for a dtype, the element e with ``apply(e, x) == x == apply(x, e)``.
        commutative: whether the operands may be swapped.  If not, collectives that cannot keep the rank
            order refuse the operation.

    Example:
        >>> gcd = Reduction("gcd", torch.gcd, lambda dtype: 0)
        >>> gcd.apply(torch.tensor([12]), torch.tensor([18])).tolist()
        [6]
    """

    name: str
    apply: Callable[[Tensor, Tensor], Tensor]
    neutral: Callable[[torch.dtype], Number]
    commutative: bool = True

    def check(self, dtype: torch.dtype) -> Number:
        """Return the neutral element for ``dtype``; refuse a dtype that the operation does not support.

        Raises:
            ConfigurationError: the operation is not defined on ``dtype``, e.g. "and" on floats.
        """
        # the operation is tried on one element, because torch cannot list the dtypes that it supports
        try:
            element = self.neutral(dtype)
            self.apply(
                torch.full((1,), element, dtype=dtype, device="cpu"),
                torch.zeros(1, dtype=dtype, device="cpu"),
            )
        except Exception as error:  # a user's operation may raise anything
            raise ConfigurationError(
                f"operation '{self.name}' is not defined on {dtype} ({first_line(error)}); convert the "
                "values first, or give another operation"
            ) from error
        return element

    def __repr__(self) -> str:
        return f"Reduction({self.name!r})"  # no address, because ranks compare options by repr


def reduction(operation: str | Reduction) -> Reduction:
    """Return the operation with a given name; a ``Reduction`` is returned unchanged.

    Raises:
        ConfigurationError: the name is unknown; the message lists the known ones.

    Example:
        >>> reduction("max").neutral(torch.float32)
        -inf
    """
    if isinstance(operation, Reduction):
        return operation
    if not isinstance(operation, str) or operation not in OPERATIONS:
        raise ConfigurationError(
            f"unknown operation {operation!r}; choose one of {', '.join(OPERATIONS)}, or give a "
            "sparsync.reduction.Reduction with its neutral element"
        )
    return OPERATIONS[operation]


def _lowest(dtype: torch.dtype) -> Number:
    return -torch.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _highest(dtype: torch.dtype) -> Number:
    return torch.inf if dtype.is_floating_point else torch.iinfo(dtype).max


def _truth(combine: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda a, b: combine(a, b).to(a.dtype)


SUM = Reduction("sum", torch.add, lambda dtype: 0)

OPERATIONS: MappingProxyType[str, Reduction] = MappingProxyType(
    {
        operation.name: operation
        for operation in (
            SUM,
            Reduction("max", torch.maximum, _lowest),
            Reduction("min", torch.minimum, _highest),
            Reduction("prod", torch.mul, lambda dtype: 1),
            # bitwise, for integers; -1 has all bits set
            Reduction("and", torch.bitwise_and, lambda dtype: -1),
            Reduction("or", torch.bitwise_or, lambda dtype: 0),
            Reduction("xor", torch.bitwise_xor, lambda dtype: 0),
            # logical: 0 and 1 are the truth values in any dtype
            Reduction("logical_and", _truth(torch.logical_and), lambda dtype: 1),
            Reduction("logical_or", _truth(torch.logical_or), lambda dtype: 0),
        )
    }
)


def combine(a: Vector, b: Vector, operation: Reduction = SUM, limit: int | None = None) -> Vector:
    """Return ``a operation b`` for vectors of the same size and dtype, each sparse or dense.

    The result is sparse if both operands are sparse and ``|a| + |b|``, a cheap bound on its number of
    entries, is at most ``limit``.  If ``limit`` is None, it is sparse whenever both operands are.

    Cost: O(|a| + |b|) if both are sparse; if all indices of ``b`` follow those of ``a``, the two are
    concatenated.

    Example:
        >>> a, b = (SparseVector.from_dense(torch.tensor(x)) for x in ([1.0, 0, 0], [2.0, 0, 3.0]))
        >>> combine(a, b).nnz, combine(a, b, limit=2)
        (2, DenseVector(values=tensor([3., 0., 3.])))
    """
    if isinstance(a, SparseVector) and isinstance(b, SparseVector):
        if limit is None or a.nnz + b.nnz <= limit:
            return neutral_absent(_combine_sparse(a, b, operation), operation)
        a = densify(a, operation)
    if isinstance(a, SparseVector):
        values = b.to_dense().clone()
        values[a.indices] = operation.apply(a.values, values[a.indices])
    elif isinstance(b, SparseVector):
        values = a.values.clone()
        values[b.indices] = operation.apply(values[b.indices], b.values)
    else:
        values = operation.apply(a.values, b.values)
    return neutral_absent(DenseVector(values), operation)


def fold(vectors: Iterable[Vector], operation: Reduction = SUM, limit: int | None = None) -> Vector:
    """Return ``((v0 op v1) op v2) ...``, dense as soon as more than ``limit`` entries are possible.

    Sparse vectors are summed in a single merge, whose result is bit-identical to the left fold.

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
    whole = functools.reduce(lambda a, b: combine(a, b, operation, limit), vectors)
    return neutral_absent(whole, operation)  # ``combine`` has not seen a single vector


def densify(vector: Vector, operation: Reduction = SUM) -> DenseVector:
    """Return the dense form of a vector; absent elements become the operation's neutral element."""
    if isinstance(vector, DenseVector):
        return vector
    sparse = neutral_absent(vector, operation)
    return DenseVector(sparse.to_dense(), sparse.absent)


def neutral_absent(vector: V, operation: Reduction) -> V:
    """Return the vector, with the operation's neutral element for elements that it does not store.

    Example:
        >>> product = SparseVector(torch.tensor([1]), torch.tensor([5.0]), 3)
        >>> neutral_absent(product, OPERATIONS["prod"]).to_dense()
        tensor([1., 5., 1.])
    """
    if operation is SUM:
        return vector
    return replace(vector, absent=operation.neutral(vector.values.dtype))


def entries_of(vector: Vector, operation: Reduction = SUM) -> int:
    """Return the number of entries in a vector's sparse form, which omits neutral elements.

    Example:
        >>> entries_of(DenseVector(torch.tensor([0.0, 2.0])))
        1
    """
    if isinstance(vector, SparseVector):
        return vector.nnz
    return int((vector.values != operation.neutral(vector.values.dtype)).sum())


def _combine_sparse(a: SparseVector, b: SparseVector, operation: Reduction) -> SparseVector:
    if a.nnz == 0 or b.nnz == 0:
        return b if a.nnz == 0 else a
    # if the supports follow one another, like the regions that ranks own, nothing has to be added
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
