"""What a rank trains on: its rows of a data set, and which rows these are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sparsync.errors import ConfigurationError

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix  # type: ignore[import-untyped, unused-ignore]

__all__ = ["Shard", "row_range"]


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

    Args:
        rows: how many there are; may be fewer than ranks: then the last ranks have none.
        rank: whose rows.
        world_size: number of ranks.

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
