"""State: frozen dataclasses, replaced whole, so that keeping a reference is a snapshot."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from sparsync.errors import ConfigurationError

__all__ = ["NoState", "Stateful", "parse_parts"]


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
        self.state = self.parsed_state(state)

    def parsed_state(self, state: Mapping[str, Any]) -> Any:
        """Return the state object of a saved dictionary, without taking it over.

        Raises:
            ConfigurationError: other fields than this state has, or what is not plain numbers.
        """
        names = sorted(field.name for field in fields(self.state))
        if not isinstance(state, Mapping) or sorted(state) != names:
            raise ConfigurationError(
                f"the saved state of {type(self).__name__} has "
                f"{sorted(state) if isinstance(state, Mapping) else type(state).__name__}, expected "
                f"{names}; load a state that state_dict() returned"
            )
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in state.items()}
        for name, value in values.items():
            plain = value if isinstance(value, tuple) else (value,)
            if not all(v is None or isinstance(v, int | float) for v in plain):
                raise ConfigurationError(
                    f"the saved {name} of {type(self).__name__} is {value!r}, expected numbers"
                )
        return type(self.state)(**values)


def parse_parts(owner: Stateful, parts: Sequence[Stateful], saved: object) -> tuple[Any, ...]:
    """Return the state objects of what consists of parts, from their saved dictionaries.

    Raises:
        ConfigurationError: another number of them, or one that does not fit.
    """
    if not isinstance(saved, list) or len(saved) != len(parts):
        raise ConfigurationError(
            f"the saved state of {type(owner).__name__} has "
            f"{len(saved) if isinstance(saved, list) else 'no'} parts, expected {len(parts)}; load a "
            "state that state_dict() returned"
        )
    return tuple(part.parsed_state(its) for part, its in zip(parts, saved, strict=True))
