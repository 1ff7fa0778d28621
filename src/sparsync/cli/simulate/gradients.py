"""Gradients of virtual ranks: sparse ones that cost no n elements per rank, dense ones, recorded ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.cli.bench.inputs import Draw, gradient
from sparsync.cli.simulate.settings import SPREAD, Contender, SimulationSettings
from sparsync.collectives.base import Collective, Reduced
from sparsync.collectives.oktopk.regions import even_boundaries
from sparsync.errors import ConfigurationError
from sparsync.presets import Algorithm
from sparsync.sparse import SparseVector, Vector
from sparsync.transports.communicator import Communicator

__all__ = ["Gradients", "gradients", "load_gradients", "placed"]

_CELLS = 2  # per entry wanted: the smaller half of the elements is seldom sent


class Gradients(ABC):
    """The gradients of one row.

    Attributes:
        sizes: elements of every unit, of n / C.
        held: elements of every unit that a rank holds.
        density: k / held.
    """

    sizes: tuple[int, ...]
    held: tuple[int, ...]
    density: float

    @abstractmethod
    def draw(self, rank: int, step: int) -> list[Tensor]:
        """Return `[held]` per unit, fresh."""

    def places(self, rank: int, unit: int) -> Tensor | None:
        """Return where in the unit the held elements lie, ascending; None: they are all."""
        return None


def gradients(contender: Contender, settings: SimulationSettings, scale: float) -> Gradients:
    """Return what a row is fed with."""
    recorded = load_gradients(Path(settings.inputs)) if Path(settings.inputs).is_file() else None
    if recorded is not None:
        recorded = recorded[:, :: max(round(scale), 1)]
    size = max(round(settings.model_size / scale), 1) if recorded is None else recorded.shape[1]
    sizes = [stop - start for start, stop in pairwise(even_boundaries(size, contender.buckets))]
    spread = settings.inputs == SPREAD
    if spread:
        sizes = [max(n, 1) for n in sizes]
        if contender.selects and _CELLS * settings.density < 1:
            return _Spread(sizes, settings)

    def whole(rank: int, step: int) -> Tensor:
        if spread and not contender.selects:
            return torch.zeros(sum(sizes))
        if recorded is not None:
            return recorded[(rank + step * settings.ranks) % len(recorded)].clone()
        draw = Draw(size, settings.ranks, rank, step, settings.seed)
        return gradient("uniform" if spread else settings.inputs, draw)

    return _Whole(sizes, settings.density if contender.selects else 1.0, whole)


def load_gradients(path: Path) -> Tensor:
    """Read recorded gradients: `[rows, n]` or `[n]`, from .npy or what ``torch.save`` wrote.

    Raises:
        ConfigurationError: it is neither, or holds no such tensor.
    """
    try:
        if path.suffix == ".npy":
            import numpy as np

            loaded: Any = torch.from_numpy(np.load(path, allow_pickle=False))
        else:
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a damaged file makes them raise
        raise ConfigurationError(
            f"cannot read gradients from '{path}' ({str(error).splitlines()[0]}); "
            "give a .npy file or a tensor that torch.save wrote"
        ) from error
    if not isinstance(loaded, Tensor) or loaded.dim() not in (1, 2) or not loaded.numel():
        what = tuple(loaded.shape) if isinstance(loaded, Tensor) else type(loaded).__name__
        raise ConfigurationError(
            f"'{path}' holds {what}; give a tensor [n], or [rows, n] with a row per rank and step"
        )
    return loaded.reshape(-1, loaded.shape[-1]).float()


@final
class _Whole(Gradients):
    """Gradients whose elements are all held."""

    def __init__(
        self, sizes: Sequence[int], density: float, whole: Callable[[int, int], Tensor]
    ) -> None:
        self.sizes = self.held = tuple(sizes)
        self.density, self._whole = density, whole

    def draw(self, rank: int, step: int) -> list[Tensor]:
        whole = self._whole(rank, step)
        return [part.clone() for part in torch.split(whole, list(self.sizes))]


@final
class _Spread(Gradients):
    """Normal values at 2 k places of a unit, one in each of as many cells of equal width.

    A part of the cells (``shared``) has its place and its value from all ranks together, the others
    from each rank alone; places stay from step to step, values are fresh.
    """

    def __init__(self, sizes: Sequence[int], settings: SimulationSettings) -> None:
        self.sizes, self._settings = tuple(sizes), settings
        entries = [max(round(settings.density * size), 1) for size in sizes]
        self.held = tuple(min(_CELLS * k, n) for k, n in zip(entries, sizes, strict=True))
        self.density = 1 / _CELLS

    def draw(self, rank: int, step: int) -> list[Tensor]:
        return [self._mixed(torch.randn, rank, unit, step) for unit in range(len(self.sizes))]

    def places(self, rank: int, unit: int) -> Tensor:
        # drawn again when they are asked for: kept, they would take more memory than all else
        size, cells = self.sizes[unit], self.held[unit]
        edges = torch.arange(cells + 1) * size // cells
        within = self._mixed(torch.rand, rank, unit, -1)
        return edges[:-1] + (within * edges.diff()).long().clamp(max=edges.diff() - 1)

    def _mixed(self, draw: Callable[..., Tensor], rank: int, unit: int, step: int) -> Tensor:
        """Draw numbers of one's own, but in the shared cells those of all."""
        cells, everyone = self.held[unit], self._settings.ranks
        own = draw(cells, generator=self._generator(rank, unit, step))
        if not self._settings.shared:
            return own
        common = torch.rand(cells, generator=self._generator(everyone, unit, -2))
        shared = draw(cells, generator=self._generator(everyone, unit, step))
        return torch.where(common < self._settings.shared, shared, own)

    def _generator(self, rank: int, unit: int, step: int) -> torch.Generator:
        # hashes of whole numbers are the same in every process
        key = hash((self._settings.seed, rank, unit, step + 2))
        return torch.Generator().manual_seed(key & (2**63 - 1))


def placed(algorithm: Algorithm, source: Gradients) -> Algorithm:
    """Return an algorithm whose collectives see whole units, where ranks hold parts of them."""
    units = iter(range(len(source.sizes)))  # collectives are made unit by unit

    def make() -> Collective:
        return _Placed(algorithm.make_collective(), source, next(units))

    return Algorithm(
        algorithm.name,
        algorithm.make_selector,
        make,
        average=algorithm.average,
        shared=algorithm.shared,
    )


@final
class _Placed(Collective):
    """A collective between the held elements of a unit and all of its elements."""

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
        """Put the selected entries in their places; take back what was delivered of them."""
        places = self.source.places(comm.rank, self.unit)
        if places is None or not isinstance(selected, SparseVector):
            return await self.inner.reduce(comm, selected, k, step)
        held, size = places.numel(), self.source.sizes[self.unit]
        whole = SparseVector(places[selected.indices], selected.values, size)
        del places
        reduced = await self.inner.reduce(comm, whole, k, step)
        places = self.source.places(comm.rank, self.unit)
        assert places is not None and isinstance(reduced.delivered, SparseVector)
        # what this rank keeps of other ranks' entries has no place here; it changes no time
        mine = reduced.delivered.restrict(places)
        back = SparseVector(kernels.restrict(places, mine.indices), mine.values, held)
        return Reduced(reduced.total, back)
