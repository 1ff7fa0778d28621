"""RedSync's selectors: trimmed top-k, binary search for a threshold, one-signed, by size, by layer.

Reference for all of them: Fang et al., `RedSync <https://arxiv.org/abs/1808.04357>`_, 2018.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, final

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.errors import require
from sparsync.selection.selector import Everything, Exact, Selector, largest, reaching, smallest_key
from sparsync.sparse import DenseVector, SparseVector, Vector
from sparsync.state import parse_parts

__all__ = [
    "BinarySearch",
    "BinarySearchState",
    "BySize",
    "Layered",
    "LayeredState",
    "OneSigned",
    "OneSignedState",
    "Trimmed",
    "mean_and_max",
]

# elements per pass: their magnitudes stay in a CPU's cache, so it is three times as fast as a full copy
_BLOCK = 1 << 18


@final
class Trimmed(Selector):
    """Selects the ``min(k, nnz)`` largest entries, like ``Exact``, but first applies a threshold.

    The threshold is ``mean + ratio (max - mean)`` of the magnitudes.  The ratio is the first of 1 - eps,
    1 - 2 eps, ..., 0 (Alg. 2: eps 0.2) for which at least k entries reach the threshold; the k largest of
    these are selected.  If fewer than k entries reach the mean, or NaN or Inf make it undefined, the k
    largest of all n are selected.  Of equal magnitudes, the one with the lower index is selected.

    Cost: mean and maximum of n elements, one pass that counts for all thresholds, one pass that collects
    entries, and a selection among these.   State: none.
    Differs from the paper: the loop ends when at least k entries reach the threshold (as printed, it
    continues while more than k exceed it, which contradicts the text).  One pass counts for all
    thresholds.  The lowest threshold is the mean.

    Example:
        >>> accumulated = torch.tensor([1.0, -4.0, 0.0, 2.0])
        >>> Trimmed().select(accumulated, k=2, step=0).to_dense().tolist()
        [0.0, -4.0, 0.0, 2.0]

    References: section 5.2.1 and Algorithm 2.
    """

    def __init__(self, eps: float = 0.2) -> None:
        require(0.001 <= eps <= 1, f"Trimmed: eps is {eps}; give a step in [0.001, 1], e.g. 0.2")
        self.eps = eps

    def select(
        self, accumulated: Tensor, k: int, step: int, collected: SparseVector | None = None
    ) -> SparseVector:
        """Return the k largest entries."""
        if k <= 0 or accumulated.numel() == 0:
            return SparseVector.empty(accumulated.numel(), accumulated)
        mean, peak = mean_and_max(accumulated)
        # The paper walks through the thresholds and counts once for each.  A pass over n elements costs
        # about as much for one threshold as for all, so all counts are made in one pass before the walk.
        ratios = [max(1 - i * self.eps, 0.0) for i in range(math.ceil(1 / self.eps), 0, -1)]
        keys = [_key_at(ratio, mean, peak, accumulated.dtype) for ratio in ratios]
        counts = kernels.count_from(accumulated, torch.tensor(keys, device=accumulated.device))
        enough = [(key, n) for key, n in zip(keys, counts.tolist(), strict=True) if n >= k]
        # Algorithm 2 walks down from the largest key to the first that k entries reach: the last one here
        survivors = reaching(accumulated, *enough[-1]) if enough else None
        return largest(accumulated, k) if survivors is None else survivors.top(k)


@dataclass(frozen=True)
class BinarySearchState:
    """The state that is kept from step to step."""

    threshold_key: int | None = None  # result of the last search; None if all elements were zero
    served: int = 0  # number of calls that used this threshold, including the search itself


@final
class BinarySearch(Selector):
    """Selects the entries that reach a threshold, found by bisection so that k to 2k entries reach it.

    The threshold is ``mean + ratio (max - mean)`` of the magnitudes; the ratio is bisected in [0, 1].
    **A search returns k to 2k entries, or all nonzero entries if there are fewer than k.**  If the
    bracket shrinks to ``eps`` without finding a threshold (because of ties or a few huge entries), the k
    largest are selected.

    With ``reuse_period`` p (section 5.2.2: 5), the threshold is also used for the next p - 1 calls (the
    paper's "sampled threshold binary search").  In these calls, any number of entries may reach it; the
    largest ``cap * k`` are selected (all of them with None, as published).  If no entry reaches it, a
    new search begins.

    Args:
        eps: width of the bracket of ratios at which a search gives up (the paper gives no value; 0.001
            means at most 10 trials).
        reuse_period: number of calls per search.
        cap: largest number of entries, as a multiple of k, in calls that reuse a threshold.

    Cost: mean and maximum of n elements, and at most n comparisons in each of ``ceil(log2(1 / eps))``
    trials; n comparisons in a call that reuses a threshold.   State: ``BinarySearchState``.
    Differs from the paper: the bounds are always ratios; as printed, thresholds are assigned to them.
    The upper bound is lowered if fewer than k entries reach the threshold; as printed, only if fewer
    than k / 2 do, so for counts between k / 2 and k the search moves away from the goal.  Exactly k or
    2k entries are accepted; as printed, only numbers in between.  If ``eps`` ends the search, selection
    is exact.  There is a cap.

    Example:
        >>> selector = BinarySearch(reuse_period=5)
        >>> selector.select(torch.tensor([3.0, 2.9, 0.1, 0.0]), k=1, step=0).indices.tolist()
        [0, 1]
        >>> selector.select(torch.tensor([0.1, 0.2, 0.3, 9.0]), k=1, step=1).indices.tolist()
        [3]

    References: section 5.2.2 and Algorithm 3.
    """

    def __init__(self, eps: float = 1e-3, reuse_period: int = 1, cap: float | None = 2.0) -> None:
        who, fits = "BinarySearch", cap is None or 1 <= cap < math.inf
        require(1e-9 <= eps < 1, f"{who}: eps is {eps}; give a width in [1e-9, 1), e.g. 0.001")
        require(reuse_period >= 1, f"{who}: reuse_period is {reuse_period}; give at least 1 call")
        require(fits, f"{who}: cap is {cap}; give a factor >= 1 of k, or None")
        self.eps, self.reuse_period, self.cap = eps, reuse_period, cap
        self.reuses = reuse_period > 1
        self.state = BinarySearchState()

    def select(
        self, accumulated: Tensor, k: int, step: int, collected: SparseVector | None = None
    ) -> SparseVector:
        """Return the entries that reach the threshold; search for it once per period."""
        if k <= 0 or accumulated.numel() == 0:
            return SparseVector.empty(accumulated.numel(), accumulated)
        known, served = self.state.threshold_key, self.state.served
        if known is not None and served < self.reuse_period:
            limit = None if self.cap is None else math.floor(self.cap * k)
            selected = reaching(accumulated, known, limit)
            if selected is None:  # more than the limit: gradients have grown since the search
                selected = largest(accumulated, limit or 0)
            # if gradients have become so small that no entry reaches the threshold, search again;
            # otherwise nothing would be sent for the rest of the period
            if selected.nnz:
                self.state = BinarySearchState(known, served + 1)
                return selected
        threshold_key, selected = self._search(accumulated, k)
        self.state = BinarySearchState(threshold_key, 1)
        return selected

    def _search(self, accumulated: Tensor, k: int) -> tuple[int | None, SparseVector]:
        """Return the threshold, or None if all elements are zero, and the entries that reach it."""
        mean, peak = mean_and_max(accumulated)
        # invariant: more than 2k entries reach ``low``, and fewer than k reach ``high``
        low, high = 0.0, 1.0
        while high - low > self.eps:
            ratio = (low + high) / 2
            key = _key_at(ratio, mean, peak, accumulated.dtype)
            reached = reaching(accumulated, key, 2 * k)
            if reached is None:
                low = ratio
            elif reached.nnz < k:
                high = ratio
            else:
                return key, reached
        # no ratio in [0, 1] gives k to 2k entries: there are ties or a few huge entries
        selected = largest(accumulated, k)
        return smallest_key(selected), selected


@final
class BySize(Selector):
    """Selects with a method chosen by the layer's size in bytes; one instance serves one layer.

    ======================  =============  ====================================
    bytes                   method         entries
    ======================  =============  ====================================
    below ``compress_thd``  dense          all n, as a dense vector
    from ``compress_thd``   exact          ``min(k, nnz)``
    from ``thsd1``          trimmed        ``min(k, nnz)``
    from ``thsd2``          binary-search  k to 2k; any up to cap on reuse
    ======================  =============  ====================================

    ``cost_model.size_thresholds`` computes the thresholds for a network; the defaults are the paper's.

    Args:
        compress_thd: layers with fewer bytes are dense (Algorithm 4; section 5.4: 128 KB at 3.5 GB/s).
        thsd1: size in bytes from which trimmed top-k is used (Algorithm 5).  With None, it is
            ``compress_thd``, so exact selection is never used (section 5.4).
        thsd2: size in bytes from which a binary search is used (Algorithm 5; section 5.4: 4 MB).
        reuse_period: passed to ``BinarySearch`` (section 5.4: 5).
        cap: passed to ``BinarySearch``; None sets no limit, as published.

    Cost: the cost of the method.   State: the state of the search; the other methods have none.
    Differs from the paper: the reuse counter survives between calls (Algorithm 5, line 2, resets it to 0,
    so every call searches).

    Example:
        >>> policy = BySize()
        >>> [policy.method(size_bytes) for size_bytes in (1000, 200_000, 8_000_000)]
        ['dense', 'trimmed', 'binary-search']
        >>> policy = BySize(compress_thd=0)
        >>> policy.select(torch.tensor([1.0, -4.0, 2.0]), k=1, step=0).indices.tolist()
        [1]

    References: section 5.4 and Algorithms 4 and 5.
    """

    def __init__(
        self,
        compress_thd: float = 128 * 1024,
        thsd1: float | None = None,
        thsd2: float = 4 * 2**20,
        reuse_period: int = 5,
        cap: float | None = 2.0,
    ) -> None:
        thsd1 = compress_thd if thsd1 is None else thsd1
        require(
            0 <= compress_thd <= thsd1 <= thsd2,
            f"BySize: compress_thd, thsd1, thsd2 are {compress_thd}, {thsd1}, "
            f"{thsd2}; give bytes that do not descend, e.g. 131072, 131072, 4194304",
        )
        self._search = BinarySearch(reuse_period=reuse_period, cap=cap)
        self.reuses = self._search.reuses
        self.compress_thd, self.thsd1, self.thsd2 = compress_thd, thsd1, thsd2

    @property
    def state(self) -> Any:
        """The state of the binary search; the other methods have no state."""
        return self._search.state

    @state.setter
    def state(self, state: Any) -> None:
        self._search.state = state

    def method(self, size_bytes: int) -> str:
        """Return the name of the method for a layer of this many bytes."""
        if size_bytes < self.compress_thd:
            return "dense"
        if size_bytes < self.thsd1:
            return "exact"
        return "trimmed" if size_bytes < self.thsd2 else "binary-search"

    def select(
        self, accumulated: Tensor, k: int, step: int, collected: SparseVector | None = None
    ) -> Vector:
        """Select with the method for the size of ``accumulated``."""
        method = self.method(accumulated.numel() * accumulated.element_size())
        if method == "binary-search":
            return self._search.select(accumulated, k, step)
        stateless: Selector = {"dense": Everything, "exact": Exact, "trimmed": Trimmed}[method]()
        return stateless.select(accumulated, k, step)


@dataclass(frozen=True)
class OneSignedState:
    """The sign of the next call, and the state of the wrapped selector."""

    bottom: bool  # whether the next call selects among the negative entries
    selector: Any


@final
class OneSigned(Selector):
    """Wraps a selector, and shows it positive and negative entries in alternate calls.

    All selected values then have one sign, so that one mean can represent them.  Entries with the
    opposite sign look like zeros to the selector and stay in the residual.  If fewer than k entries have
    the sign of the call, fewer are selected.  NaN and Inf are selected in every call.

    Cost: a copy of n elements, plus the cost of the selector.   State: ``OneSignedState``.
    Differs from the paper: the signs never mix, whereas the paper's "smallest k elements" include
    positive ones if fewer than k are negative.  The sign alternates from call to call, and each layer
    has its own selector (Algorithm 5, line 3, sets its flag in every call, so the sign would never
    alternate).

    Example:
        >>> selector, accumulated = OneSigned(Exact()), torch.tensor([1.0, -4.0, 0.0, 2.0])
        >>> [selector.select(accumulated, k=1, step=step).values.tolist() for step in range(3)]
        [[2.0], [-4.0], [2.0]]

    References: section 5.2.3 and Algorithm 5.
    """

    def __init__(self, selector: Selector) -> None:
        require(
            not selector.reuses,
            f"OneSigned: {type(selector).__name__} reuses thresholds between steps, which select "
            "opposite signs; give a selector that does not, e.g. Exact()",
        )
        self.selector, self._bottom = selector, False

    @property
    def state(self) -> OneSignedState:
        """The sign of the next call, and the state of the wrapped selector."""
        return OneSignedState(self._bottom, self.selector.state)

    @state.setter
    def state(self, state: OneSignedState) -> None:
        self._bottom, self.selector.state = state.bottom, state.selector

    def state_dict(self) -> dict[str, Any]:
        """Return the state's fields, with the wrapped selector's state as a dictionary."""
        return {**super().state_dict(), "selector": self.selector.state_dict()}

    def parsed_state(self, state: Mapping[str, Any]) -> OneSignedState:
        """Return the state object for a saved dictionary, without changing this selector."""
        parsed: OneSignedState = super().parsed_state(state)
        return replace(parsed, selector=self.selector.parsed_state(parsed.selector))

    def for_layers(self, sizes: Sequence[int]) -> OneSigned:
        """Return a copy whose wrapped selector knows the sizes of the layers."""
        return OneSigned(self.selector.for_layers(sizes))

    def method(self, size_bytes: int) -> str:
        """Return the name of the wrapped selector's method."""
        return self.selector.method(size_bytes)

    def select(
        self, accumulated: Tensor, k: int, step: int, collected: SparseVector | None = None
    ) -> Vector:
        """Return the selector's choice among the entries with the sign of this call."""
        other = accumulated > 0 if self._bottom else accumulated < 0
        # never mask NaN and Inf: they must be selected in every call, so that all ranks refuse the step
        one_signed = accumulated.masked_fill(other & accumulated.isfinite(), 0)
        self._bottom = not self._bottom
        return self.selector.select(one_signed, k, step)


@dataclass(frozen=True)
class LayeredState:
    """The states of all layers' selectors."""

    layers: tuple[Any, ...]


@final
class Layered(Selector):
    """Selects from each layer of a unit separately; layers share a message but do not compete.

    A unit is a group of layers that are exchanged together.  A layer with n' of the unit's n elements
    contributes ``k n' / n`` entries, at least one.  Without ``sizes``, there is a single layer of any
    size; ``for_layers`` sets the unit's layers.

    Cost: the sum of the layers' costs.   State: ``LayeredState``.
    Differs from the paper: nothing.

    Example:
        >>> selector = Layered(Exact).for_layers([3, 3])
        >>> values = torch.tensor([1.0, 2.0, 3.0, 40.0, 50.0, 60.0])
        >>> selector.select(values, k=2, step=0).indices.tolist()
        [2, 5]

    References: Algorithm 4 (layer j) and section 5.3 (tensor fusion).
    """

    def __init__(
        self, make_selector: Callable[[], Selector], sizes: Sequence[int] | None = None
    ) -> None:
        self.make_selector, self.sizes = make_selector, sizes
        self._layers = [make_selector() for _ in sizes or (0,)]

    def for_layers(self, sizes: Sequence[int]) -> Layered:
        """Return the selector for layers of these sizes."""
        return Layered(self.make_selector, sizes)

    def method(self, size_bytes: int) -> str:
        """Return the name of the method for a layer; all layers have the same kind of selector."""
        return self._layers[0].method(size_bytes)

    def select(
        self, accumulated: Tensor, k: int, step: int, collected: SparseVector | None = None
    ) -> SparseVector:
        """Return the entries of all layers."""
        size = accumulated.numel()
        sizes = (size,) if self.sizes is None else self.sizes
        whole = f"Layered: layers of {sum(sizes)} elements in all, the unit has {size}"
        require(sum(sizes) == size, f"{whole}; were for_layers given the sizes of another unit?")
        selected = []
        spans = pairwise(accumulate(sizes, initial=0))
        for layer, (start, stop) in zip(self._layers, spans, strict=True):
            quota = 0 if k <= 0 or start == stop else max(round(k * (stop - start) / size), 1)
            chosen = layer.select(accumulated[start:stop], min(quota, stop - start), step)
            if isinstance(chosen, DenseVector):
                # a layer below ``compress_thd`` shares its message with sparse layers
                chosen = SparseVector.from_dense(chosen.values)
            selected.append(chosen.embed(start, size))
        return SparseVector.join(selected) if selected else SparseVector.empty(size, accumulated)

    @property
    def state(self) -> LayeredState:
        """The states of all layers."""
        return LayeredState(tuple(layer.state for layer in self._layers))

    @state.setter
    def state(self, state: LayeredState) -> None:
        for layer, its in zip(self._layers, state.layers, strict=True):
            layer.state = its

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all layers."""
        return {"layers": [layer.state_dict() for layer in self._layers]}

    def parsed_state(self, state: Mapping[str, Any]) -> LayeredState:
        """Return the state object for a dictionary returned by ``state_dict``."""
        saved = state.get("layers") if isinstance(state, Mapping) else None
        return LayeredState(parse_parts(self, self._layers, saved))


def mean_and_max(accumulated: Tensor) -> tuple[float, float]:
    """Return the mean and maximum of ``|accumulated|``, which must not be empty; NaN gives mean NaN."""
    on_cpu = accumulated.device.type == "cpu"
    wide = torch.promote_types(accumulated.dtype, torch.float32)  # 16 bits are too few for the mean
    parts = []
    for block in torch.split(accumulated, _BLOCK) if on_cpu else [accumulated]:
        magnitudes = block.abs()
        parts.append(torch.stack([magnitudes.sum(dtype=wide), magnitudes.max().to(wide)]))
    sums, maxima = zip(*torch.stack(parts).tolist(), strict=True)
    mean, peak = sum(sums) / accumulated.numel(), max(maxima)
    return min(mean, peak), peak  # rounding may raise the mean of equal numbers above them


def _key_at(ratio: float, mean: float, peak: float, dtype: torch.dtype) -> int:
    """Return the threshold ``mean + ratio (peak - mean)`` as a magnitude key of ``dtype``."""
    # comparisons with an integer key have the same results on every device; the key is computed on the
    # CPU, so that nothing waits for a GPU
    threshold = torch.tensor([mean + ratio * (peak - mean)], dtype=dtype, device="cpu")
    return int(kernels.magnitude_keys(threshold))
