"""The size policy of RedSync: the larger a layer, the cheaper its selection; the smallest go dense."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError
from sparsync.kernels import Found
from sparsync.selection.base import Selector, Watch
from sparsync.selection.binary_search import BinarySearch
from sparsync.selection.everything import Everything
from sparsync.selection.exact import Exact
from sparsync.selection.trimmed import Trimmed
from sparsync.sparse import Vector

__all__ = ["BySize"]


@final
class BySize(Selector):
    """Selects by the method that suits the bytes of the layer: one instance serves one layer.

    ============================  ===============  ===================================
    bytes                         method           entries
    ============================  ===============  ===================================
    below ``exact_from``          dense            all n, as a dense vector
    from ``exact_from``           exact            ``min(k, nnz)``
    from ``trimmed_from``         trimmed          ``min(k, nnz)``
    from ``search_from``          binary-search    k to 2k; any up to cap on reuse
    ============================  ===============  ===================================

    Args:
        exact_from: bytes (``compress_thd`` of Alg. 4; section 5.4: 128 KB at 3.5 GB/s).
        trimmed_from: bytes (``thsd1`` of Alg. 5); None: ``exact_from``, no exact tier (section 5.4).
        search_from: bytes (``thsd2`` of Alg. 5; section 5.4: 4 MB).
        reuse_period: of ``BinarySearch`` (section 5.4: 5).
        cap: of ``BinarySearch`` (ours; None: as published).

    Cost: that of the method.   State: that of ``BinarySearch``; the others have none.
    Differs from the paper: the counter of the reuse outlives the call (printed: it is set to 0 in every
    call); the exact tier selects without candidates of the pass that accumulates.

    Example:
        >>> policy = BySize()
        >>> [policy.method(size_bytes) for size_bytes in (1000, 200_000, 8_000_000)]
        ['dense', 'trimmed', 'binary-search']
        >>> policy = BySize(exact_from=0)
        >>> policy.select(torch.tensor([1.0, -4.0, 2.0]), k=1, step=0).indices.tolist()
        [1]

    References: Fang et al., RedSync, 2018, section 5.4 and Algorithms 4 and 5.
    """

    def __init__(
        self,
        exact_from: float = 128 * 1024,
        trimmed_from: float | None = None,
        search_from: float = 4 * 2**20,
        reuse_period: int = 5,
        cap: float | None = 2.0,
    ) -> None:
        trimmed_from = exact_from if trimmed_from is None else trimmed_from
        if not 0 <= exact_from <= trimmed_from <= search_from:
            raise ConfigurationError(
                f"BySize: exact_from, trimmed_from, search_from are {exact_from}, {trimmed_from}, "
                f"{search_from}; give bytes that do not descend, as 131072, 131072, 4194304"
            )
        self.exact_from, self.trimmed_from, self.search_from = exact_from, trimmed_from, search_from
        self._search = BinarySearch(reuse_period=reuse_period, cap=cap)
        self.reuses = self._search.reuses

    @property
    def state(self) -> Any:
        """The state of the binary search: no other method has one."""
        return self._search.state

    @state.setter
    def state(self, state: Any) -> None:
        self._search.state = state

    def method(self, size_bytes: int) -> str:
        """Return how a layer of so many bytes is selected from, for statistics."""
        if size_bytes < self.exact_from:
            return "dense"
        if size_bytes < self.trimmed_from:
            return "exact"
        return "trimmed" if size_bytes < self.search_from else "binary-search"

    def methods(self, sizes: Sequence[int]) -> list[str]:
        """Name the tier of every layer, whose elements have 4 bytes."""
        return [self.method(4 * size) for size in sizes]

    def watch(self, k: int, step: int, dtype: torch.dtype) -> Watch | None:
        """Watch what the binary search would: nothing unless it has searched."""
        return self._search.watch(k, step, dtype)

    def select(self, accumulated: Tensor, k: int, step: int, found: Found | None = None) -> Vector:
        """Return the choice of the method for the bytes of ``accumulated``."""
        method = self.method(accumulated.numel() * accumulated.element_size())
        if method == "binary-search":
            return self._search.select(accumulated, k, step, found)
        stateless: Selector = {"dense": Everything, "exact": Exact, "trimmed": Trimmed}[method]()
        return stateless.select(accumulated, k, step)
