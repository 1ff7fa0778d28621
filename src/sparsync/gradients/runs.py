"""Runs: small parameters that are adjacent in a unit, accumulated and written together.

For a small parameter, starting a pass from Python takes longer than the pass itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from sparsync.sparse import DenseVector, Vector
from sparsync.units import Slot

__all__ = ["Place", "Run", "parts_of", "runs_of", "write_part"]

_SMALL: Final = 1 << 15  # elements; copying so few takes no longer than a call from Python
# A run of this many elements is not extended any further: its averages are written through a dense copy,
# which must be small compared with the unit.
_RUN: Final = 1 << 20

Place = tuple[int, Slot]  # the number of a unit, and a parameter's slot in it


@dataclass(frozen=True)
class Run:
    """Parameters, given by number, that fill a unit without gaps from element ``start`` on."""

    unit: int
    start: int
    members: list[int]
    sizes: list[int]

    @property
    def end(self) -> int:
        """The element of the unit at which the run ends (exclusive)."""
        return self.start + sum(self.sizes)


def runs_of(places: Sequence[Place], *, joined: bool) -> list[Run]:
    """Return the runs of parameters at these places, in the order of units; ``joined`` joins small ones.

    Example:
        >>> places = [(0, Slot("b", 3, 2)), (0, Slot("a", 0, 3)), (0, Slot("d", 9, 1))]
        >>> [(run.start, run.members) for run in runs_of(places, joined=True)]
        [(0, [1, 0]), (9, [2])]
    """
    runs: list[Run] = []
    end = 0
    # An empty parameter starts at the same element as the next parameter.  Sorting also by size puts the
    # empty one first, so that the run continues after it.
    keys = [(unit, slot.start, slot.size) for unit, slot in places]
    for number in sorted(range(len(places)), key=keys.__getitem__):
        unit, slot = places[number]
        if joined and runs and max(runs[-1].sizes[-1], slot.size) <= _SMALL:
            last = runs[-1]
            # there may be a gap, because a bucket may lack some parameters of a unit
            if (last.unit, end) == (unit, slot.start) and end - last.start < _RUN:
                last.members.append(number)
                last.sizes.append(slot.size)
                end += slot.size
                continue
        runs.append(Run(unit, slot.start, [number], [slot.size]))
        end = slot.start + slot.size
    return runs


def parts_of(average: Vector, runs: Sequence[Run]) -> Iterator[tuple[Run, Vector]]:
    """Yield the runs of a unit, in order, each with its part of the unit's average."""
    if isinstance(average, DenseVector):
        for run in runs:
            yield run, DenseVector(average.values[run.start : run.end])
    else:
        # a single search finds all runs; every second part is the gap between two runs
        cuts = [cut for run in runs for cut in (run.start, run.end)]
        yield from zip(runs, average.split(cuts)[::2], strict=True)


def write_part(part: Vector, run: Run, tensors: Sequence[Tensor]) -> None:
    """Write a run's part of an average to the gradients of its parameters, flat or in their shapes."""
    # a single large parameter is written directly, without a dense copy
    if len(tensors) == 1 and tensors[0].is_contiguous():
        part.write_to_(tensors[0].view(-1))
        return
    pieces = torch.split(part.to_dense(), run.sizes)
    pairs = zip(pieces, tensors, strict=True)
    torch._foreach_copy_(list(tensors), [p if t.dim() == 1 else p.view(t.shape) for p, t in pairs])
