"""Multiply sparse rows with vectors on the threads of one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, TypeVar, final

import numpy as np
import torch
from scipy.sparse import csr_matrix  # type: ignore[import-untyped, unused-ignore]

from sparsync.errors import ConfigurationError
from sparsync.linear.problem import Floats, LazyWeights
from sparsync.sparse import SparseVector

__all__ = ["Products", "even_cuts"]

T = TypeVar("T")


def even_cuts(size: int, parts: int) -> list[int]:
    """Return the boundaries of contiguous parts, whose sizes differ by at most one.

    Example:
        >>> even_cuts(10, 4)
        [0, 2, 5, 7, 10]
    """
    return [size * part // parts for part in range(parts + 1)]


@final
class Products:
    """Multiplies sparse rows on several threads (SciPy leaves Python's lock while it does).

    Rows are cut into one block per thread, whose sums are added in the order of the blocks: a result
    depends on the number of threads (to rounding), never on which of them is first.

    Args:
        threads: at least 1; 1 starts none.
        compact_factor: sums are sorted together, not added up in dense vectors, if this many times the
            stored elements are still fewer than the columns (default: where both take equally long).

    Example:
        >>> products = Products(threads=2)
        >>> rows = csr_matrix(np.array([[1.0, 0.0, 2.0], [0.0, 0.0, 3.0]]))
        >>> products.transposed(rows, np.array([1.0, 10.0])).to_dense().tolist()
        [1.0, 0.0, 32.0, 11.0]
        >>> products.close()
    """

    def __init__(self, threads: int = 1, *, compact_factor: int = 30) -> None:
        if threads < 1:
            raise ConfigurationError(f"threads is {threads}; give at least 1")
        self.threads, self.compact_factor = threads, compact_factor
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def scores(self, rows: csr_matrix, weights: LazyWeights) -> Floats:
        """Return ``rows w + intercept``, `[rows]`; reads the weights of the stored columns alone."""

        def block(start: int, stop: int) -> Floats:
            part = rows[start:stop]
            stored = np.arange(part.nnz, dtype=part.indices.dtype)
            # every stored element its own column: the product gathers, then adds row by row
            gathered = csr_matrix((part.data, stored, part.indptr), (stop - start, part.nnz))
            result: Floats = gathered @ weights.at(part.indices)
            return result

        parts = self._map(block, even_cuts(rows.shape[0], self.threads))
        scores: Floats = np.concatenate(parts) + weights.dtype.type(weights.intercept)
        return scores

    def transposed(self, rows: csr_matrix, coefficients: Floats) -> SparseVector:
        """Return ``rows^T coefficients`` and, as the last element, the coefficients' sum.

        Where no row stores anything, nothing is stored here.

        Cost: O(nnz + columns / threads): the sums are added up in dense vectors; O(nnz log nnz) where
        rows store much less than there are columns.  The bits are the same.
        """
        stored: Any = None
        if rows.nnz * self.compact_factor < rows.shape[1]:
            stored, places = np.unique(rows.indices, return_inverse=True)
            columns = csr_matrix((rows.data, places, rows.indptr), (rows.shape[0], len(stored)))
        else:
            columns = rows
        indices, values = self._sums(columns, coefficients)
        if stored is not None:
            indices = stored[indices]
        indices = np.append(indices, rows.shape[1]).astype(np.int64)
        values = np.append(values, coefficients.sum(dtype=values.dtype))
        return SparseVector(torch.from_numpy(indices), torch.from_numpy(values), rows.shape[1] + 1)

    def _sums(self, rows: csr_matrix, coefficients: Floats) -> tuple[Any, Floats]:
        """Return where ``rows^T coefficients`` is not zero, and its values there."""
        blocks: list[Floats] = self._map(
            lambda start, stop: rows[start:stop].T @ coefficients[start:stop],
            even_cuts(rows.shape[0], self.threads),
        )

        def reduce(start: int, stop: int) -> tuple[Any, Floats]:
            total = blocks[0][start:stop]
            for block in blocks[1:]:
                total = total + block[start:stop]
            at = np.flatnonzero(total)
            return at + start, total[at]

        parts = self._map(reduce, even_cuts(rows.shape[1], self.threads))
        return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])

    def _map(self, function: Callable[[int, int], T], cuts: Sequence[int]) -> list[T]:
        if self._pool is None:
            return [function(start, stop) for start, stop in pairwise(cuts)]
        return list(self._pool.map(function, cuts[:-1], cuts[1:]))
