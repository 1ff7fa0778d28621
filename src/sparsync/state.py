"""State: frozen dataclasses, replaced whole, so that keeping a reference is a snapshot."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

__all__ = ["NoState", "Stateful"]


@dataclass(frozen=True)
class NoState:
    """The state of what has none."""


class Stateful(ABC):  # noqa: B024 (what it asks for is a ``state``)
    """Something whose whole memory is ``self.state``, a frozen dataclass of plain numbers.

    A refused step restores the object that ``state`` was before it; nothing is copied.
    """

    state: Any = NoState()

    def state_dict(self) -> dict[str, Any]:
        """Return the fields of the state."""
        return {field.name: getattr(self.state, field.name) for field in fields(self.state)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the state by what ``state_dict`` returned."""
        self.state = type(self.state)(**state)
