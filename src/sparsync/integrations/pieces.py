"""Which part of every parameter this rank holds: of a DTensor, or of a unit that a node divides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from sparsync.units import Slot, Unit

__all__ = ["Piece", "divide", "saved_pieces"]


@dataclass(frozen=True)
class Piece:
    """A box of a parameter.

    The piece is ``parameter.reshape(shape)[offset[0] : offset[0] + size[0], ...]``, flattened.

    Attributes:
        shape: how the whole parameter is looked at: its own shape, or one dimension.
        offset: where the box begins.
        size: its extents.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]


def saved_pieces(pieces: Mapping[str, Piece]) -> dict[str, dict[str, Any]]:
    """Return pieces as plain lists of numbers, for a saved state."""
    return {
        name: {what: list(numbers) for what, numbers in asdict(piece).items()}
        for name, piece in pieces.items()
    }


def divide(
    units: Sequence[Unit], index: int, parts: int
) -> tuple[list[Unit], dict[str, Piece], list[int]]:
    """Divide every unit into equal runs of elements; the last ones may be shorter or empty.

    Args:
        units: whole units.
        index: which run is this rank's.
        parts: number of runs.

    Returns:
        The units of this run, the pieces of their parameters, and the length of a run per unit.

    Example:
        >>> import torch
        >>> slots = Slot("a", 0, 3), Slot("b", 3, 2)
        >>> whole = Unit(slots, torch.float32, torch.device("cpu"))
        >>> (unit,), pieces, length = divide([whole], index=1, parts=2)
        >>> unit.slots, pieces["b"], length
        ((Slot(name='b', start=0, size=2),), Piece(shape=(2,), offset=(0,), size=(2,)), [3])
    """
    runs, pieces, lengths = [], {}, []
    for unit in units:
        length = -(-unit.size // parts)
        start, slots = index * length, []
        for slot in unit.slots:
            first = max(slot.start, start)
            last = min(slot.start + slot.size, start + length)
            if first < last:
                slots.append(Slot(slot.name, first - start, last - first))
                pieces[slot.name] = Piece((slot.size,), (first - slot.start,), (last - first,))
        runs.append(replace(unit, slots=tuple(slots)))
        lengths.append(length)
    return runs, pieces, lengths
