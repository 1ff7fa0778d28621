"""Labelled sparse rows as plain arrays, and the part of a data set that one rank holds."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from sparsync.errors import ConfigurationError

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix  # type: ignore[import-untyped, unused-ignore]

__all__ = ["Rows", "Shard", "narrowed", "optional", "row_range"]

_INT32_END = 1 << 31


def optional(module: str) -> Any:
    """Import a module of the extra ``linear``.

    Raises:
        ConfigurationError: its package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigurationError(
            f"linear models on sparse data need {module.split('.')[0]}, which is not installed "
            f"({error}): pip install 'sparsync[linear]'"
        ) from error


@dataclass(frozen=True)
class Shard:
    """The rows of one rank: `[first_row, first_row + rows)` of the whole data set.

    Attributes:
        features: `[rows, dimensions]` with ``float32`` values; may be mapped from a file and is
            then read-only.
        labels: `[rows]` with ``float32``, each -1 or +1.
        rows_total: rows of the whole data set, over all ranks.
        first_row: number of this rank's first row in the whole, 0-based.
    """

    features: csr_matrix
    labels: np.ndarray
    rows_total: int
    first_row: int


def row_range(rows: int, *, rank: int, world_size: int) -> tuple[int, int]:
    """Return the rows `[first, stop)` of a rank: contiguous, sizes differ by at most one.

    With fewer rows than ranks the last ranks have none.

    Raises:
        ConfigurationError: there is no such rank.

    Example:
        >>> [row_range(10, rank=rank, world_size=4) for rank in range(4)]
        [(0, 3), (3, 6), (6, 8), (8, 10)]
    """
    if not 0 <= rank < world_size:
        raise ConfigurationError(
            f"rank {rank} of world_size {world_size}; expected 0 <= rank < world_size"
        )
    each, extra = divmod(rows, world_size)
    first = rank * each + min(rank, extra)
    return first, first + each + (rank < extra)


@dataclass(frozen=True)
class Rows:
    """Labelled rows in compressed sparse row form; indices ascend within a row, each once.

    Attributes:
        labels: `[rows]` with ``float64``, as the source has them.
        indptr: `[rows + 1]` with ``int64``: where each row starts in the two below.
        indices: `[non-zeros]` with ``int32``, or ``int64`` where that is too small.
        values: `[non-zeros]` with ``float32``.

    Example:
        >>> rows = Rows.of_lists([1.0, -1.0], [[0, 4], [2]], [[0.5, 0.25], [1.0]])
        >>> rows.count, rows.cut(1, 2).indices
        (2, array([2], dtype=int32))
    """

    labels: np.ndarray
    indptr: np.ndarray
    indices: np.ndarray
    values: np.ndarray

    @classmethod
    def of_lists(
        cls, labels: list[float], indices: list[list[int]], values: list[list[float]]
    ) -> Rows:
        """Gather rows that were read one by one."""
        return cls(
            np.array(labels, dtype=np.float64),
            np.cumsum([0, *map(len, indices)], dtype=np.int64),
            narrowed(np.array([i for row in indices for i in row], dtype=np.int64)),
            np.array([v for row in values for v in row], dtype=np.float32),
        )

    @classmethod
    def join(cls, parts: Sequence[Rows]) -> Rows:
        """Concatenate parts; a single part is returned as it is, not copied."""
        if not parts:
            return cls.of_lists([], [], [])
        if len(parts) == 1:
            return parts[0]
        starts = np.cumsum([0, *(len(part.values) for part in parts)])
        shifted = [part.indptr[1:] + start for part, start in zip(parts, starts, strict=False)]
        return cls(
            np.concatenate([part.labels for part in parts]),
            np.concatenate([np.zeros(1, dtype=np.int64), *shifted]),
            np.concatenate([part.indices for part in parts]),
            np.concatenate([part.values for part in parts]),
        )

    @property
    def count(self) -> int:
        """The number of rows."""
        return len(self.labels)

    def cut(self, first: int, stop: int) -> Rows:
        """Return rows `[first, stop)`; indices and values are views of this one's."""
        low, high = int(self.indptr[first]), int(self.indptr[stop])
        return Rows(
            self.labels[first:stop],
            self.indptr[first : stop + 1] - low,
            self.indices[low:high],
            self.values[low:high],
        )

    def to_csr(self, dimensions: int, *, shift: int = 0) -> csr_matrix:
        """Return a ``scipy.sparse.csr_matrix`` over the same values; not to be modified.

        Args:
            dimensions: number of columns.
            shift: added to every index; other than 0 it copies the indices.
        """
        indices = self.indices
        if shift:
            indices = indices + np.array(shift, dtype=indices.dtype)
        narrow = indices.dtype == np.int32 and len(self.values) < _INT32_END
        pointers = self.indptr.astype(np.int32) if narrow else self.indptr
        matrix = optional("scipy.sparse").csr_matrix(
            (self.values, indices, pointers), shape=(self.count, dimensions), copy=False
        )
        # known by construction; finding it out would read every index
        matrix.has_sorted_indices = matrix.has_canonical_format = True
        return cast("csr_matrix", matrix)


def narrowed(indices: np.ndarray) -> np.ndarray:
    """Return the indices as ``int32`` where they fit, which is half of the memory."""
    if indices.size and int(indices.max()) >= _INT32_END - 1:  # one is kept for ``shift``
        return indices.astype(np.int64, copy=False)
    return indices.astype(np.int32)
