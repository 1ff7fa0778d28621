"""One-signed: positive entries on one step, negative ones on the next, so that one mean serves all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from torch import Tensor

from sparsync.errors import ConfigurationError
from sparsync.kernels import Found
from sparsync.selection.base import Selector
from sparsync.sparse import Vector

__all__ = ["OneSigned", "OneSignedState"]


@dataclass(frozen=True)
class OneSignedState:
    """What is carried from step to step.

    Attributes:
        bottom: the next call selects among the negative entries.
        selector: the state of the selector inside.
    """

    bottom: bool
    selector: Any


@final
class OneSigned(Selector):
    """Selects by another selector among the positive entries, then among the negative, by turns.

    The entries of the other sign are zero to it: they stay in the residual, and fewer than k entries
    come where fewer have the sign.  NaN and Inf are selected on every call, of either sign.

    Args:
        selector: what selects among them; not one that reuses thresholds between steps, since that of
            one sign says nothing about the other.

    Cost: a copy of n elements, and the selector's.   State: ``OneSignedState``.
    Differs from the paper: its "smallest k" take positive values where fewer than k are negative; here
    the signs never mix.  The sign alternates per call (a layer has a selector of its own).

    Example:
        >>> import torch
        >>> from sparsync.selection import Exact
        >>> selector, accumulated = OneSigned(Exact()), torch.tensor([1.0, -4.0, 0.0, 2.0])
        >>> [selector.select(accumulated, k=1, step=step).values.tolist() for step in range(3)]
        [[2.0], [-4.0], [2.0]]

    References: Fang et al., `RedSync <https://arxiv.org/abs/1808.04357>`_, 2018, section 5.2.3 and
    Algorithm 5.
    """

    def __init__(self, selector: Selector) -> None:
        if selector.reuses:
            raise ConfigurationError(
                f"OneSigned: {type(selector).__name__} reuses thresholds between steps, which select "
                "opposite signs; give a selector that does not, as Exact()"
            )
        self.selector, self._bottom = selector, False

    @property
    def state(self) -> OneSignedState:
        """The turn, and the state of the selector inside."""
        return OneSignedState(self._bottom, self.selector.state)

    @state.setter
    def state(self, state: OneSignedState) -> None:
        self._bottom, self.selector.state = state.bottom, state.selector

    def state_dict(self) -> dict[str, Any]:
        """Return the fields of the state, that of the selector inside as a dictionary."""
        return {**super().state_dict(), "selector": self.selector.state_dict()}

    def parsed_state(self, state: Mapping[str, Any]) -> OneSignedState:
        """Return the state object of a saved dictionary, without taking it over."""
        nested = isinstance(state, Mapping) and "selector" in state
        parsed: OneSignedState = super().parsed_state(
            {**state, "selector": None} if nested else state
        )
        return replace(parsed, selector=self.selector.parsed_state(state["selector"]))

    def for_layers(self, sizes: Sequence[int]) -> OneSigned:
        """Ask the selector inside."""
        return OneSigned(self.selector.for_layers(sizes))

    def methods(self, sizes: Sequence[int]) -> list[str]:
        """Name those of the selector inside."""
        return self.selector.methods(sizes)

    def select(self, accumulated: Tensor, k: int, step: int, found: Found | None = None) -> Vector:
        """Return what the selector takes of this call's sign."""
        other = accumulated > 0 if self._bottom else accumulated < 0
        # what is not finite is selected on every step, so that all ranks refuse it
        one_signed = accumulated.masked_fill(other & accumulated.isfinite(), 0)
        selected = self.selector.select(one_signed, k, step)
        self._bottom = not self._bottom
        return selected
