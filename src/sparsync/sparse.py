"""Vectors in sparse and dense form, and the operations on both.

Selectors produce a ``SparseVector``, codecs encode it, and collectives sum it.  When a sum has so many
entries that sparsity no longer pays, a ``DenseVector`` replaces it, and the stream stays dense from there
on (SparCML, section 5.1).
"""

from __future__ import annotations

import builtins
import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.errors import ConfigurationError

__all__ = [
    "DenseVector",
    "SparseVector",
    "Vector",
    "even_boundaries",
    "host_memory",
    "run_length",
    "runs",
]


@dataclass(frozen=True, eq=False)
class SparseVector:
    """A vector of ``size`` elements of which ``nnz`` are stored; the others are ``absent``.

    Attributes:
        indices: `[nnz]`, ``torch.int64``, strictly ascending, in ``[0, size)``; candidates collected for
            a selector may be ``torch.int32``.
        values: `[nnz]`, any floating or integer dtype, on the device of ``indices``.
        size: number of elements n of the whole vector.
        absent: the value of the elements that are not stored: 0, or the neutral element of the operation
            that made the vector (``sparsync.reduction``).  ``subtract_from_``, ``write_to_`` and
            ``divide_`` are for sums, and assume 0.

    The constructor, which is on the hot path, checks only types; ``check`` verifies the elements.

    Example:
        >>> v = SparseVector.from_dense(torch.tensor([0.0, 3.0, 0.0, -1.0]))
        >>> v.indices.tolist(), v.values.tolist(), v.nnz
        ([1, 3], [3.0, -1.0], 2)
    """

    indices: Tensor
    values: Tensor
    size: int
    absent: int | float = 0

    def __post_init__(self) -> None:
        tensors = isinstance(self.indices, Tensor) and isinstance(self.values, Tensor)
        if not (tensors and isinstance(self.size, int)):
            kinds = ", ".join(type(x).__name__ for x in (self.indices, self.values, self.size))
            raise ConfigurationError(
                f"SparseVector: indices, values and size are {kinds}; give two tensors and an int"
            )

    @staticmethod
    def empty(size: int, like: Tensor) -> SparseVector:
        """Return the zero vector of ``size`` elements with the dtype and device of ``like``."""
        indices = torch.empty(0, dtype=torch.int64, device=like.device)
        return SparseVector(indices, like.new_empty(0), size)

    @staticmethod
    def from_dense(dense: Tensor, absent: int | float = 0) -> SparseVector:
        """Keep the elements of a 1-D tensor that differ from ``absent``; NaN is always kept."""
        indices = (dense if absent == 0 else dense != absent).nonzero().flatten()
        return SparseVector(indices, dense[indices], dense.numel(), absent)

    @staticmethod
    def join(parts: Sequence[SparseVector]) -> SparseVector:
        """Concatenate vectors of the same size, without adding; indices must ascend from part to part."""
        indices, values = (torch.cat([getattr(p, f) for p in parts]) for f in ("indices", "values"))
        return SparseVector(indices, values, parts[0].size, parts[0].absent)

    @staticmethod
    def merge(parts: Sequence[SparseVector], within: Tensor | None = None) -> SparseVector:
        """Sum vectors of the same size in the given order (a left fold); zero sums are not stored.

        Elements outside ``within`` (ascending indices) are dropped.  Without ``within``, a single vector
        is returned unchanged, even if it stores zeros.

        Example:
            >>> a = SparseVector.from_dense(torch.tensor([0.0, 1.0, 2.0]))
            >>> b = SparseVector.from_dense(torch.tensor([5.0, -1.0, 0.0]))
            >>> SparseVector.merge([a, b]).to_dense().tolist()
            [5.0, 0.0, 2.0]
        """
        # Vectors are added in the given order, not in the order of their arrival: float addition is not
        # associative, and a sum must have the same bits on every run.
        if len(parts) == 1 and within is None:
            return parts[0]
        streams, size = [(p.indices, p.values) for p in parts], parts[0].size
        return SparseVector(*kernels.merge(streams, size, within), size)

    @property
    def nnz(self) -> int:
        """The number of stored elements."""
        return self.indices.numel()

    def split(self, boundaries: Sequence[int]) -> list[SparseVector]:
        """Cut the vector into the regions ``[boundaries[i], boundaries[i + 1])`` with a single search."""
        cuts = torch.tensor(list(boundaries), dtype=torch.int64, device=self.indices.device)
        places = pairwise(torch.searchsorted(self.indices, cuts).tolist())
        return [
            SparseVector(
                self.indices[low:high] - start, self.values[low:high], stop - start, self.absent
            )
            for (low, high), (start, stop) in zip(places, pairwise(boundaries), strict=True)
        ]

    def embed(self, start: int, size: int) -> SparseVector:
        """Return a vector of ``size`` elements with this region at offset ``start``, and nothing else."""
        indices = self.indices + start if start else self.indices
        return SparseVector(indices, self.values, size, self.absent)

    def restrict(self, indices: Tensor) -> SparseVector:
        """Keep the elements whose index is among the ascending ``indices``."""
        return self.keep(kernels.restrict(self.indices, indices))

    def keep(self, which: Tensor | builtins.slice) -> SparseVector:
        """Keep the stored elements selected by a mask, by ascending positions, or by a slice."""
        indices = self.indices[which].to(torch.int64)
        return SparseVector(indices, self.values[which], self.size, self.absent)

    def top(self, k: int) -> SparseVector:
        """Keep the ``k`` stored elements of largest magnitude; ties go to the lower index."""
        if self.nnz <= k and self.indices.dtype == torch.int64:
            return self
        return self.keep(kernels.top(self.values, k) if self.nnz > k else slice(None))

    def to_dense(self) -> Tensor:
        """Return the `[size]` tensor, with ``absent`` for elements that are not stored."""
        dense = self.values.new_full((self.size,), self.absent)
        dense[self.indices] = self.values
        return dense

    def to(self, device: torch.device) -> SparseVector:
        """Return this vector with its tensors on a device."""
        indices, values = self.indices.to(device), self.values.to(device)
        return SparseVector(indices, values, self.size, self.absent)

    def to_numpy(self) -> tuple[Any, Any, int]:
        """Return ``(indices, values, size)`` with NumPy arrays, which share the memory of CPU tensors.

        Elements that are not stored have the value ``absent``.

        Raises:
            ConfigurationError: NumPy lacks the dtype of the values.
        """
        return _numpy(self.indices), _numpy(self.values), self.size

    def to_scipy(self) -> Any:
        """Return a ``scipy.sparse.coo_array`` of one row, `[1, size]`.

        Unless ``absent`` is 0, all elements are stored, because SciPy assumes 0 for all others.

        Raises:
            ConfigurationError: SciPy is not installed, or lacks the dtype of the values.
        """
        return _scipy(*self._with_zeros_absent().to_numpy())

    def to_torch(self) -> Tensor:
        """Return a coalesced ``torch.sparse_coo_tensor``, `[size]`.

        Unless ``absent`` is 0, all elements are stored, because PyTorch assumes 0 for all others.
        """
        vector = self._with_zeros_absent()
        # the tensor may be declared coalesced, because indices ascend and are unique
        indices, shape = vector.indices.view(1, -1), (vector.size,)
        made, device = torch.sparse_coo_tensor, vector.values.device
        return made(
            indices, vector.values, shape, device=device, check_invariants=False, is_coalesced=True
        )

    def _with_zeros_absent(self) -> SparseVector:
        """Return an equal vector whose ``absent`` is 0."""
        if self.absent == 0:
            return self
        # zeros are also stored: if the result is given to the same operation again, elements that are
        # not stored count as the neutral element
        everywhere = torch.arange(self.size, device=self.indices.device)
        return SparseVector(everywhere, self.to_dense(), self.size)

    def subtract_from_(self, dense: Tensor) -> None:
        """``dense -= self``, in place, touching ``nnz`` elements."""
        kernels.subtract_(dense, self.indices, self.values)

    def write_to_(self, dense: Tensor) -> None:
        """``dense = self``, in place, in the dtype of ``dense``."""
        kernels.scatter_(dense, self.indices, self.values)

    def divide_(self, divisor: int) -> None:
        """``self /= divisor``, in place."""
        kernels.divide_(self.values, divisor)

    def isfinite(self) -> Tensor:
        """Return a boolean mask of the stored elements that are neither NaN nor Inf."""
        return torch.isfinite(self.values)

    def first_nonfinite(self, dtype: torch.dtype | None = None) -> int | None:
        """Return the index of the first NaN or Inf, before or after a cast to ``dtype``, or None."""
        at = _first_nonfinite(self.values, dtype)
        return None if at is None else int(self.indices[at])

    def check(self) -> SparseVector:
        """Return this vector; raise ``ConfigurationError`` if any of its fields is invalid."""
        if not 0 <= self.size < 2**63:
            raise ConfigurationError(
                f"SparseVector: size is {self.size}; give the number of elements, in [0, 2^63)"
            )
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
    """A vector that stores all of its elements.

    Attributes:
        values: `[size]`.
        absent: the value of the elements that sparse forms of this vector do not store, as in
            ``SparseVector``.
    """

    values: Tensor
    absent: int | float = field(default=0, repr=False)

    @property
    def size(self) -> int:
        """The number of elements n."""
        return self.values.numel()

    @property
    def nnz(self) -> int:
        """The number of stored elements, i.e. of all elements."""
        return self.values.numel()

    def to(self, device: torch.device) -> DenseVector:
        """Return this vector with its tensor on a device."""
        return DenseVector(self.values.to(device), self.absent)

    def to_dense(self) -> Tensor:
        """Return the stored tensor itself."""
        return self.values

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the elements."""
        return self.values.dtype

    def to_numpy(self) -> tuple[Any, Any, int]:
        """Return the elements that differ from ``absent``, as ``SparseVector.to_numpy`` does."""
        return SparseVector.from_dense(self.values, self.absent).to_numpy()

    def to_scipy(self) -> Any:
        """Return the elements that differ from ``absent``, as ``SparseVector.to_scipy`` does."""
        return SparseVector.from_dense(self.values, self.absent).to_scipy()

    def to_torch(self) -> Tensor:
        """Return the elements that differ from ``absent``, as ``SparseVector.to_torch`` does."""
        return SparseVector.from_dense(self.values, self.absent).to_torch()

    def run(self, start: int, stop: int) -> Tensor:
        """Return elements ``[start, stop)``; the caller must not write to them."""
        return self.values[start:stop]

    def terms(self, start: int, stop: int) -> tuple[Tensor, ...]:
        """Return the ``run`` as one vector, or as two vectors of the same dtype that must be added.

        If there are two vectors, the first is in separate memory, and the caller may overwrite it.
        """
        return (self.run(start, stop),)

    def subtract_from_(self, dense: Tensor, start: int = 0, plus: Tensor | None = None) -> None:
        """Add ``plus - self`` to ``dense`` in place; ``dense`` may be only the run from ``start``."""
        if plus is not None:
            dense += plus
        dense -= self.run(start, start + dense.numel())

    def write_to_(self, dense: Tensor, start: int = 0) -> None:
        """Copy elements from ``start`` into ``dense``, as many as it has, converted to its dtype."""
        dense.copy_(self.run(start, start + dense.numel()))

    def divide_(self, divisor: int) -> None:
        """``self /= divisor``, in place."""
        kernels.divide_(self.values, divisor)

    def isfinite(self) -> Tensor:
        """Return a boolean mask of the elements that are neither NaN nor Inf."""
        return torch.isfinite(self.values)

    def first_nonfinite(self, dtype: torch.dtype | None = None) -> int | None:
        """Return the index of the first NaN or Inf, before or after a cast to ``dtype``, or None."""
        return _first_nonfinite(self.values, dtype)


Vector = SparseVector | DenseVector


def run_length(like: Tensor) -> int:
    """Return how many elements of a long vector to process at a time, on the device of ``like``.

    On a CPU, a few vectors of that length fit into the cache.  On an accelerator, one such vector keeps
    the device busy.
    """
    return 1 << 18 if like.is_cpu else 1 << 24


def runs(size: int, like: Tensor, most: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield start and end of a vector's runs, of at most ``most`` or ``run_length(like)`` elements."""
    step = most or run_length(like)
    for start in range(0, size, step):
        yield start, min(start + step, size)


def host_memory(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros in host memory, pinned if ``device`` is a GPU, so that runs are copied fast."""
    # copies from pageable memory take several times as long
    pinned = device.type == "cuda" and torch.cuda.is_available()
    return torch.zeros(size, dtype=dtype, pin_memory=pinned, device="cpu")


def _first_nonfinite(values: Tensor, dtype: torch.dtype | None) -> int | None:
    """Return the position of the first NaN or Inf, or None; without any, this takes a single pass."""
    if dtype == torch.float16:  # the other dtypes have the range of float32 and cannot overflow
        values = values.to(dtype)
    # The magnitude keys of Inf and NaN are greater than those of all numbers. With a limit of 0, ``find``
    # returns None as soon as it finds one of them.
    infinity = int(kernels.magnitude_keys(values.new_full((1,), torch.inf, device="cpu")))
    if kernels.find(values, infinity, 0) is not None:
        return None
    return int((~torch.isfinite(values)).nonzero()[0])


def _numpy(tensor: Tensor) -> Any:
    try:
        return tensor.detach().cpu().numpy()
    except TypeError as error:
        raise ConfigurationError(
            f"NumPy has no {tensor.dtype}; take to_torch(), or reduce values of another dtype"
        ) from error


def _scipy(indices: Any, values: Any, size: int) -> Any:
    try:
        sparse = importlib.import_module("scipy.sparse")  # optional; only this function needs it
    except ImportError as error:
        raise ConfigurationError(
            f"to_scipy needs SciPy ({error}): pip install scipy, or take to_numpy()"
        ) from error
    return sparse.coo_array((values, (0 * indices, indices)), shape=(1, size))


def even_boundaries(size: int, parts: int) -> list[int]:
    """Cut ``[0, size)`` into ``parts`` regions whose widths differ by at most one.

    Example:
        >>> even_boundaries(10, 4)
        [0, 2, 5, 7, 10]
    """
    return [size * i // parts for i in range(parts + 1)]
