"""Gradients for virtual ranks: recorded, generated dense, or generated sparse.

The generated sparse ones never allocate all n elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.algorithm import Algorithm
from sparsync.cli.bench.inputs import Draw, gradient
from sparsync.cli.simulate.settings import SPREAD, Contender, SimulationSettings
from sparsync.collectives.collective import Collective, Reduced
from sparsync.errors import ConfigurationError
from sparsync.sparse import SparseVector, Vector, even_boundaries
from sparsync.state import load_plainly
from sparsync.transports.communicator import Communicator

__all__ = ["Gradients", "gradients", "load_gradients", "placed"]

_CELLS = 2  # held elements per requested entry, because elements below the top 2 k are seldom sent


@dataclass(frozen=True)
class Gradients:
    """The gradients for one row."""

    sizes: Sequence[int]  # number of elements of every unit; their sum is n / C
    held: Sequence[int]  # number of elements of every unit that a rank holds
    density: float  # k / held
    draw: Callable[[int, int], Sequence[Tensor]]  # fresh `[held]` per unit, for a rank and step
    # maps a rank and unit to the held elements' ascending positions; None if all elements are held
    places: Callable[[int, int], Tensor] | None = None


def gradients(contender: Contender, settings: SimulationSettings, scale: float) -> Gradients:
    """Return the gradients that a row exchanges."""
    recorded = load_gradients(Path(settings.inputs)) if Path(settings.inputs).is_file() else None
    if recorded is not None:
        recorded = recorded[:, :: max(round(scale), 1)]
    size = max(round(settings.model_size / scale), 1) if recorded is None else recorded.shape[1]
    sizes = [stop - start for start, stop in pairwise(even_boundaries(size, contender.buckets))]
    spread = settings.inputs == SPREAD
    if spread:
        sizes = [max(n, 1) for n in sizes]
        if contender.selects and _CELLS * settings.density < 1:
            return _spread(sizes, settings)

    def draw(rank: int, step: int) -> Sequence[Tensor]:
        if spread and not contender.selects:
            whole = torch.zeros(sum(sizes))
        elif recorded is not None:
            whole = recorded[(rank + step * settings.ranks) % len(recorded)]
        else:
            drawn = Draw(size, settings.ranks, rank, step, settings.seed)
            whole = gradient("uniform" if spread else settings.inputs, drawn)
        return [part.clone() for part in torch.split(whole, sizes)]

    return Gradients(sizes, sizes, settings.density if contender.selects else 1.0, draw)


def load_gradients(path: Path) -> Tensor:
    """Read recorded gradients, `[rows, n]` or `[n]`, from an .npy or ``torch.save`` file.

    Raises:
        ConfigurationError: the file has neither format, or no such tensor.
    """
    try:
        if path.suffix == ".npy":
            import numpy as np

            loaded: Any = torch.from_numpy(np.load(path, allow_pickle=False))
        else:
            loaded = load_plainly(path, map_location="cpu")
    except Exception as error:  # a damaged file may raise any exception
        raise ConfigurationError(
            f"cannot read gradients from '{path}' ({str(error).partition(chr(10))[0]}); "
            "give a .npy file or a tensor that torch.save wrote"
        ) from error
    if not isinstance(loaded, Tensor) or loaded.dim() not in (1, 2) or not loaded.numel():
        what = tuple(loaded.shape) if isinstance(loaded, Tensor) else type(loaded).__name__
        raise ConfigurationError(
            f"'{path}' holds {what}; give a tensor [n], or [rows, n] with a row per rank and step"
        )
    return loaded.reshape(-1, loaded.shape[-1]).float()


def _spread(sizes: Sequence[int], settings: SimulationSettings) -> Gradients:
    """Return normal values at 2 k positions of a unit, one in each of 2 k cells of equal width.

    In a fraction of the cells (``shared``), all ranks have the same position and value; in all other
    cells, they draw independently.  Positions stay the same from step to step; values are fresh.
    """
    held = [min(_CELLS * max(round(settings.density * size), 1), size) for size in sizes]

    def generator(rank: int, unit: int, step: int) -> torch.Generator:
        # hashes of integers are the same in every process
        key = hash((settings.seed, rank, unit, step + 2))
        return torch.Generator().manual_seed(key & (2**63 - 1))

    def mixed(draw: Callable[..., Tensor], rank: int, unit: int, step: int) -> Tensor:
        """Draw a rank's own numbers, but in shared cells the numbers that all ranks get."""
        own = draw(held[unit], generator=generator(rank, unit, step))
        if not settings.shared:
            return own
        common = torch.rand(held[unit], generator=generator(settings.ranks, unit, -2))
        shared = draw(held[unit], generator=generator(settings.ranks, unit, step))
        return torch.where(common < settings.shared, shared, own)

    def values(rank: int, step: int) -> list[Tensor]:
        return [mixed(torch.randn, rank, unit, step) for unit in range(len(sizes))]

    def places(rank: int, unit: int) -> Tensor:
        # draw positions again on every request, because keeping them would dominate the memory
        edges = torch.arange(held[unit] + 1) * sizes[unit] // held[unit]
        within = mixed(torch.rand, rank, unit, -1)
        return edges[:-1] + (within * edges.diff()).long().clamp(max=edges.diff() - 1)

    return Gradients(sizes, held, 1 / _CELLS, values, places)


def placed(algorithm: Algorithm, source: Gradients) -> Algorithm:
    """Return an algorithm whose collectives see whole units, though ranks hold only a few elements."""
    units = iter(range(len(source.sizes)))  # collectives are created in the order of units
    return replace(
        algorithm,
        make_collective=lambda: _Placed(algorithm.make_collective(), source, next(units)),
    )


@final
class _Placed(Collective):
    """A collective that maps between the held elements of a unit and all of its elements."""

    def __init__(self, inner: Collective, source: Gradients, unit: int) -> None:
        self.inner, self.source, self.unit = inner, source, unit

    @property
    def state(self) -> Any:
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self.inner.state = state

    def for_layers(self, sizes: Sequence[int]) -> Collective:
        self.inner = self.inner.for_layers([self.source.sizes[self.unit]])
        return self

    async def reduce(self, comm: Communicator, selected: Vector, k: int, step: int) -> Reduced:
        """Map selected entries to their positions in the unit, and delivered ones to held elements."""
        find = self.source.places
        if find is None or not isinstance(selected, SparseVector):
            return await self.inner.reduce(comm, selected, k, step)
        places = find(comm.rank, self.unit)[selected.indices]
        whole = SparseVector(places, selected.values, self.source.sizes[self.unit])
        reduced = await self.inner.reduce(comm, whole, k, step)
        places = find(comm.rank, self.unit)
        assert isinstance(reduced.delivered, SparseVector)
        # an owner may keep other ranks' undelivered entries, at positions that this rank does not hold;
        # times do not depend on these entries, so drop them
        mine = reduced.delivered.restrict(places)
        back = SparseVector(kernels.restrict(places, mine.indices), mine.values, places.numel())
        return Reduced(reduced.total, back)
