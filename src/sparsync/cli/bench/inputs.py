"""Gradients for benches and claim tests, deterministic in (seed, step, rank).

The inputs differ in the positions of the ranks' large entries.  The volume of a sparse collective
depends on these positions, and on whether they coincide between ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError
from sparsync.sparse import even_boundaries

__all__ = ["INPUTS", "Draw", "Input", "gradient", "input_named"]

_CLUSTERS = 5  # number of clusters of large entries
_CLUSTER_FRACTION = 64  # each cluster is n / 64 wide: together 7.8 % of the vector
_OVERLAP = 1 / 64  # fraction of the elements that are large on all ranks
_NOISE = 1e-3  # magnitude outside the clusters, relative to the magnitude inside
_DOMINANCE = 100.0  # factor on the entries of the dominating rank


@dataclass(frozen=True)
class Draw:
    """The values that determine a gradient: n elements, P ranks, the rank, the 0-based step, the seed."""

    size: int
    world_size: int
    rank: int
    step: int
    seed: int  # seed of the whole run

    def normal(self, size: int) -> Tensor:
        """Return `[size]` standard normal numbers, different for every step and rank."""
        generator = _generator("values", self.seed, self.step, self.rank)
        return torch.randn(size, generator=generator)

    def within(self, owner: int) -> Tensor:
        """Return normal numbers in region ``owner`` (modulo P) of P equal regions, zeros elsewhere."""
        boundaries = even_boundaries(self.size, self.world_size)
        start, stop = boundaries[owner % self.world_size :][:2]
        values = torch.zeros(self.size)
        values[start:stop] = self.normal(stop - start)
        return values


@dataclass(frozen=True)
class Input:
    """A kind of gradient for benches: how to draw it, and a description."""

    meaning: str  # one line for tables
    make: Callable[[Draw], Tensor]
    # whether permuting the ranks leaves the joint distribution unchanged; if so, Ok-Topk's tighter bound
    # applies
    exchangeable: bool = True


def gradient(kind: str, draw: Draw) -> Tensor:
    """Return a gradient, `[size]` with ``torch.float32``.

    Example:
        >>> gradient("matching", Draw(size=4, world_size=2, rank=1, step=0, seed=0)).count_nonzero()
        tensor(2)
    """
    return input_named(kind).make(draw)


def input_named(kind: str) -> Input:
    """Return the input with this name.

    Raises:
        ConfigurationError: the name is unknown; the message lists the known ones.
    """
    if kind not in INPUTS:
        raise ConfigurationError(f"unknown input {kind!r}; choose one of {', '.join(INPUTS)}")
    return INPUTS[kind]


def _generator(*key: object) -> torch.Generator:
    """Return a generator for a key; different keys give independent streams."""
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))


def _heavy_tailed(draw: Draw) -> Tensor:
    """Scale each normal number by the exponential of a second, independent one."""
    scales = torch.randn(draw.size, generator=_generator("scales", draw.seed, draw.step, draw.rank))
    return draw.normal(draw.size) * scales.exp()


def _clustered(draw: Draw) -> Tensor:
    values = draw.normal(draw.size)
    width = max(draw.size // _CLUSTER_FRACTION, 1)
    places = _generator("places", draw.seed)  # the same for all ranks and steps
    scale = torch.full_like(values, _NOISE)
    for start in torch.randint(max(draw.size - width, 1), (_CLUSTERS,), generator=places).tolist():
        scale[start : start + width] = 1.0
    return values * scale


def _overlapping(draw: Draw) -> Tensor:
    """Draw large values at positions that all ranks share and that change on every step."""
    places = torch.rand(draw.size, generator=_generator("places", draw.seed, draw.step))
    return draw.normal(draw.size) * torch.where(places < _OVERLAP, 1.0, _NOISE)


def _dominated(draw: Draw) -> Tensor:
    factor = _DOMINANCE if draw.rank == 1 % draw.world_size else 1.0
    return draw.within(draw.rank + 1) * factor


INPUTS: MappingProxyType[str, Input] = MappingProxyType(
    {
        "uniform": Input(
            "normal values; supports independent: least overlap, most fill-in",
            lambda draw: draw.normal(draw.size),
        ),
        "heavy-tailed": Input(
            "log-normal scales: few very large values; supports independent", _heavy_tailed
        ),
        "clustered": Input(
            "large values in five places that all ranks share, noise elsewhere", _clustered
        ),
        "overlapping": Input(
            "large values in the same random places on all ranks: least fill-in", _overlapping
        ),
        "one-region": Input(
            "all ranks' values in the first n / P elements, zeros elsewhere",
            lambda draw: draw.within(0),
        ),
        "disjoint": Input(
            "each rank's values in its neighbour's n / P elements only",
            lambda draw: draw.within(draw.rank + 1),
            exchangeable=False,
        ),
        "dominated": Input(
            "disjoint, and the values of rank 1 are 100 times the others'",
            _dominated,
            exchangeable=False,
        ),
        "matching": Input(
            "each rank's values in its own n / P elements only (Theorem 3.1)",
            lambda draw: draw.within(draw.rank),
            exchangeable=False,
        ),
    }
)
