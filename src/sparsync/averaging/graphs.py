"""Who sends to whom in gossip: pure planning, for any world size, without a network."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError

__all__ = ["Exponential", "Graph", "RandomPairs", "Ring", "mixing_matrix", "spectral_gap"]


class Graph(ABC):
    """A directed graph over the ranks, of its own at every step; every rank computes its part."""

    @abstractmethod
    def neighbours(self, rank: int, world_size: int, step: int) -> list[int]:
        """Return the ranks that ``rank`` sends to: distinct, without itself."""

    def sources(self, rank: int, world_size: int, step: int) -> list[int]:
        """Return the ranks that ``rank`` receives from.  Cost: asks all ranks, unless overridden."""
        return [r for r in range(world_size) if rank in self.neighbours(r, world_size, step)]


@final
class Ring(Graph):
    """Both neighbours on a ring, on every step; of two ranks the other one, once.

    Example:
        >>> Ring().neighbours(0, 5, step=0), Ring().neighbours(0, 2, step=0)
        ([1, 4], [1])
    """

    def neighbours(self, rank: int, world_size: int, step: int) -> list[int]:
        """Return ``rank + 1``, then ``rank - 1``: so no two send to one rank at the same time."""
        both = dict.fromkeys([(rank + 1) % world_size, (rank - 1) % world_size])
        return [neighbour for neighbour in both if neighbour != rank]

    def sources(self, rank: int, world_size: int, step: int) -> list[int]:
        """Return the neighbours: the ring is undirected."""
        return self.neighbours(rank, world_size, step)


@final
class Exponential(Graph):
    """The directed exponential graph: hops of 1, 2, 4, ... ranks, the next ``count`` on every step.

    After any ceil(log2 P) steps all have heard of all; with ``count=1`` and P a power of two
    everybody then has exactly the mean.

    Args:
        count: neighbours per step; all hops there are, if that is fewer.

    Raises:
        ConfigurationError: no neighbour.

    Example:
        >>> [Exponential().neighbours(0, 8, step) for step in range(4)]
        [[1], [2], [4], [1]]
        >>> Exponential(2).sources(0, 8, step=0)
        [7, 6]

    References: Assran et al., `Stochastic Gradient Push <https://arxiv.org/abs/1811.10792>`_,
    ICML 2019, appendix A.
    """

    def __init__(self, count: int = 1) -> None:
        if count < 1:
            raise ConfigurationError(
                f"Exponential: {count} neighbours per step; give at least 1, as SGP's default"
            )
        self.count = count

    def neighbours(self, rank: int, world_size: int, step: int) -> list[int]:
        """Return the ranks that this step's hops lead to."""
        return [(rank + hop) % world_size for hop in self._hops(world_size, step)]

    def sources(self, rank: int, world_size: int, step: int) -> list[int]:
        """Return the ranks that this step's hops lead here from."""
        return [(rank - hop) % world_size for hop in self._hops(world_size, step)]

    def _hops(self, world_size: int, step: int) -> list[int]:
        kinds = (world_size - 1).bit_length()  # 2^0, 2^1, ... below P
        count = min(self.count, kinds)
        return [1 << (step * count + i) % kinds for i in range(count)]


@final
class RandomPairs(Graph):
    """A random perfect matching per step, equal on all ranks; of an odd number one stays alone.

    Args:
        seed: of the whole sequence of matchings, >= 0.

    Example:
        >>> [RandomPairs().neighbours(rank, 2, step=0) for rank in range(2)]
        [[1], [0]]
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def neighbours(self, rank: int, world_size: int, step: int) -> list[int]:
        """Return the partner, if there is one."""
        # seed + step would make one sequence of all seeds, shifted
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        order = torch.randperm(world_size, generator=generator)
        place = int((order == rank).nonzero()) ^ 1  # 0 with 1, 2 with 3, ...
        return [int(order[place])] if place < world_size else []

    def sources(self, rank: int, world_size: int, step: int) -> list[int]:
        """Return the partner, if there is one."""
        return self.neighbours(rank, world_size, step)


def mixing_matrix(graph: Graph, world_size: int, step: int) -> Tensor:
    """Return what one step of gossip does: models become ``W @ models``.

    Each rank keeps and sends equal shares: ``W[j, i] = 1 / (1 + neighbours of i)``.  So columns sum
    to 1 (the sum of the models stays); rows do too when all that meet have equally many neighbours.

    Returns:
        `[P, P]`, float64.

    Example:
        >>> mixing_matrix(Ring(), world_size=2, step=0).tolist()
        [[0.5, 0.5], [0.5, 0.5]]
    """
    matrix = torch.eye(world_size, dtype=torch.float64)
    for rank in range(world_size):
        neighbours = graph.neighbours(rank, world_size, step)
        matrix[neighbours, rank] = 1.0
        matrix[:, rank] /= 1 + len(neighbours)
    return matrix


def spectral_gap(matrix: Tensor) -> float:
    """Return 1 - the second largest singular value of a doubly stochastic matrix, or product of such.

    ``W`` shrinks the distance of the models from their mean at least by the factor ``1 - gap``.

    Example:
        >>> steps = [mixing_matrix(Exponential(), 8, step) for step in range(3)]
        >>> round(spectral_gap(steps[2] @ steps[1] @ steps[0]), 6)  # all have the mean
        1.0
    """
    values = torch.linalg.svdvals(matrix)
    return 1.0 - float(values[1]) if len(values) > 1 else 1.0
