"""Layer by layer: every parameter of a unit has a selector, and its part of k, of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, final

from torch import Tensor

from sparsync.errors import ConfigurationError
from sparsync.kernels import Found
from sparsync.selection.base import Selector
from sparsync.sparse import DenseVector, SparseVector
from sparsync.state import parse_parts

__all__ = ["Layered", "LayeredState"]


@dataclass(frozen=True)
class LayeredState:
    """What is carried from step to step: the state of every layer's selector."""

    layers: tuple[Any, ...]


@final
class Layered(Selector):
    """Selects from every layer of a unit by itself: one message, but no layer outbids another.

    A layer of n' of the unit's n elements is asked for ``k n' / n`` entries, at least one.

    Args:
        make_selector: builds the selector of one layer.
        sizes: of the layers; default: one layer, of any size (``for_layers`` tells the unit's).

    Cost: that of the layers' selectors.   State: ``LayeredState``.
    Differs from the paper: none.

    Example:
        >>> import torch
        >>> from sparsync.selection import Exact
        >>> selector = Layered(Exact).for_layers([3, 3])
        >>> values = torch.tensor([1.0, 2.0, 3.0, 40.0, 50.0, 60.0])
        >>> selector.select(values, k=2, step=0).indices.tolist()
        [2, 5]

    References: Fang et al., RedSync, Algorithm 4 (layer j) and section 5.3 (tensor fusion).
    """

    def __init__(
        self, make_selector: Callable[[], Selector], sizes: Sequence[int] | None = None
    ) -> None:
        self.make_selector, self.sizes = make_selector, sizes
        self._layers = [make_selector() for _ in sizes or (0,)]

    def for_layers(self, sizes: Sequence[int]) -> Layered:
        """Return the selector for layers of these sizes."""
        return Layered(self.make_selector, tuple(sizes))

    def methods(self, sizes: Sequence[int]) -> list[str]:
        """Ask every layer's selector."""
        pairs = zip(self._layers, sizes, strict=True)
        return [layer.methods([size])[0] for layer, size in pairs]

    def select(
        self, accumulated: Tensor, k: int, step: int, found: Found | None = None
    ) -> SparseVector:
        """Return the entries of all layers."""
        size = accumulated.numel()
        sizes = self.sizes if self.sizes is not None else (size,)
        if sum(sizes) != size:
            raise ConfigurationError(
                f"Layered: layers of {sum(sizes)} elements in all, but {size} came; was for_layers "
                "told the sizes of another unit?"
            )
        selected = []
        for layer, (start, stop) in zip(self._layers, self._spans(sizes), strict=True):
            quota = 0 if k <= 0 or start == stop else max(round(k * (stop - start) / size), 1)
            chosen = layer.select(accumulated[start:stop], min(quota, stop - start), step)
            if isinstance(chosen, DenseVector):
                chosen = SparseVector.from_dense(chosen.values)
            selected.append(chosen.embed(start, size))
        return SparseVector.join(selected) if selected else SparseVector.empty(size, accumulated)

    @staticmethod
    def _spans(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
        return pairwise(accumulate(sizes, initial=0))

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
        """Return the state object of a saved dictionary."""
        saved = state.get("layers") if isinstance(state, Mapping) else None
        return LayeredState(parse_parts(self, self._layers, saved))
