"""The two forms of a vector on its way through a step: sparse and dense.

``SparseVector`` is the currency of the library: selectors make it, codecs turn it into bytes,
collectives sum it.  ``DenseVector`` is the same vector where sparsity no longer pays.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.errors import ConfigurationError

__all__ = ["DenseVector", "SparseVector", "Vector"]


@dataclass(frozen=True, eq=False)
class SparseVector:
    """A vector of ``size`` elements of which ``nnz`` are stored; absent elements are neutral.

    Neutral is 0, except where another operation than the sum is at work (``sparsync.operations``).

    Attributes:
        indices: `[nnz]` with ``torch.int64``, strictly ascending, in ``[0, size)``.
        values: `[nnz]`, any floating or integer dtype, on the device of ``indices``.
        size: number of elements n of the whole vector.

    The constructor trusts its arguments (it is on the hot path); ``check`` verifies them.

    Example:
        >>> v = SparseVector.from_dense(torch.tensor([0.0, 3.0, 0.0, -1.0]))
        >>> v.indices.tolist(), v.values.tolist(), v.nnz, v.density
        ([1, 3], [3.0, -1.0], 2, 0.5)
    """

    indices: Tensor
    values: Tensor
    size: int

    @staticmethod
    def empty(size: int, like: Tensor) -> SparseVector:
        """Make the zero vector of ``size`` elements with the dtype and device of ``like``."""
        indices = torch.empty(0, dtype=torch.int64, device=like.device)
        return SparseVector(indices, like.new_empty(0), size)

    @staticmethod
    def from_dense(dense: Tensor, absent: int | float = 0) -> SparseVector:
        """Keep the elements of a 1-D tensor that differ from ``absent`` (NaN does)."""
        indices = (dense if absent == 0 else dense != absent).nonzero().flatten()
        return SparseVector(indices, dense[indices], dense.numel())

    @staticmethod
    def join(parts: Sequence[SparseVector]) -> SparseVector:
        """Unite vectors of one size whose indices ascend from part to part (nothing is added).

        Example:
            >>> a, b = (SparseVector.from_dense(torch.tensor(x)) for x in ([1.0, 0.0], [0.0, 2.0]))
            >>> SparseVector.join([a, b]).to_dense().tolist()
            [1.0, 2.0]
        """
        indices, values = (torch.cat([getattr(p, f) for p in parts]) for f in ("indices", "values"))
        return SparseVector(indices, values, parts[0].size)

    @staticmethod
    def merge(parts: Sequence[SparseVector], within: Tensor | None = None) -> SparseVector:
        """Sum vectors of one size, in the order given (a left fold); zero sums are not stored.

        Args:
            parts: at least one.
            within: ascending indices; elements that are not among them are left out.

        Example:
            >>> a = SparseVector.from_dense(torch.tensor([0.0, 1.0, 2.0]))
            >>> b = SparseVector.from_dense(torch.tensor([5.0, -1.0, 0.0]))
            >>> SparseVector.merge([a, b]).to_dense().tolist()
            [5.0, 0.0, 2.0]
        """
        if len(parts) == 1 and within is None:
            return parts[0]
        streams, size = [(p.indices, p.values) for p in parts], parts[0].size
        return SparseVector(*kernels.merge(streams, size, within), size)

    @property
    def nnz(self) -> int:
        """Number of stored elements."""
        return self.indices.numel()

    @property
    def density(self) -> float:
        """Stored fraction ``nnz / size``; 0 for an empty vector."""
        return self.nnz / self.size if self.size else 0.0

    def slice(self, start: int, stop: int) -> SparseVector:
        """Return the region ``[start, stop)`` with indices relative to ``start`` (views)."""
        bounds = torch.tensor([start, stop], dtype=torch.int64, device=self.indices.device)
        low, high = torch.searchsorted(self.indices, bounds).tolist()
        return SparseVector(self.indices[low:high] - start, self.values[low:high], stop - start)

    def split(self, boundaries: Sequence[int]) -> list[SparseVector]:
        """Cut into the regions ``[boundaries[i], boundaries[i + 1])``, in one search."""
        cuts = torch.tensor(list(boundaries), dtype=torch.int64, device=self.indices.device)
        at = torch.searchsorted(self.indices, cuts).tolist()
        return [
            SparseVector(
                self.indices[at[i] : at[i + 1]] - boundaries[i],
                self.values[at[i] : at[i + 1]],
                boundaries[i + 1] - boundaries[i],
            )
            for i in range(len(boundaries) - 1)
        ]

    def embed(self, start: int, size: int) -> SparseVector:
        """Place this region at ``start`` of a vector of ``size`` elements."""
        return SparseVector(self.indices + start, self.values, size)

    def restrict(self, indices: Tensor) -> SparseVector:
        """Keep the elements whose index occurs in the ascending ``indices``."""
        return self.keep(kernels.restrict(self.indices, indices))

    def keep(self, which: Tensor | builtins.slice) -> SparseVector:
        """Keep the stored elements named by a mask, by ascending positions, or by a slice."""
        return SparseVector(self.indices[which], self.values[which], self.size)

    def top(self, k: int) -> SparseVector:
        """Keep the ``k`` stored elements of largest magnitude; ties go to the lower index."""
        if self.nnz <= k:
            return self
        return self.keep(kernels.top(self.values, k))

    def to_dense(self, absent: int | float = 0) -> Tensor:
        """Return the `[size]` tensor, with ``absent`` where nothing is stored."""
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

    def isfinite(self) -> Tensor:
        """Return a boolean mask over the stored elements: neither NaN nor Inf."""
        return torch.isfinite(self.values)

    def first_nonfinite(self, dtype: torch.dtype | None = None) -> int | None:
        """Return the index of the first NaN or Inf, also if it is one in ``dtype`` only; else None."""
        at = _first_nonfinite(self.values, dtype)
        return None if at is None else int(self.indices[at])

    def check(self) -> SparseVector:
        """Return self, or say what is wrong with it.

        Raises:
            ConfigurationError: shapes, dtypes, order or range of the indices are not as documented.
        """
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
    """A vector stored whole.

    Attributes:
        values: `[size]`, every element.
    """

    values: Tensor

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

    def isfinite(self) -> Tensor:
        """Return a boolean mask over the elements: neither NaN nor Inf."""
        return torch.isfinite(self.values)

    def first_nonfinite(self, dtype: torch.dtype | None = None) -> int | None:
        """Return the index of the first NaN or Inf, also if it is one in ``dtype`` only; else None."""
        return _first_nonfinite(self.values, dtype)


Vector = SparseVector | DenseVector


def _first_nonfinite(values: Tensor, dtype: torch.dtype | None) -> int | None:
    """Return the first position of NaN or Inf: one pass that keeps nothing, where there is none."""
    if dtype == torch.float16:  # the others have float32's range
        values = values.to(dtype)
    infinity = int(kernels.magnitude_keys(values.new_full((1,), torch.inf)))
    if kernels.find(values, infinity, 0) is not None:
        return None
    return int((~torch.isfinite(values)).nonzero()[0])
