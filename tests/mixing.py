"""Analyse how fast averaging mixes: matrices of graphs and groups, spectral gaps, butterflies."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from sparsync.averaging.gossip import Graph
from sparsync.averaging.groups import group_of, partition
from sparsync.errors import ConfigurationError

__all__ = [
    "RandomPairs",
    "butterfly_partners",
    "group_mixing_matrix",
    "mixing_matrix",
    "mixing_steps",
    "spectral_gap",
]


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
        >>> from sparsync.averaging.gossip import Ring
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
        >>> from sparsync.averaging.gossip import Exponential
        >>> steps = [mixing_matrix(Exponential(), 8, step) for step in range(3)]
        >>> round(spectral_gap(steps[2] @ steps[1] @ steps[0]), 6)  # all have the mean
        1.0
    """
    values = torch.linalg.svdvals(matrix)
    return 1.0 - float(values[1]) if len(values) > 1 else 1.0


def butterfly_partners(rank: int, world_size: int, group_size: int, step: int) -> list[int]:
    """Return with whom a rank exchanges in each of the step's ``log2 S`` butterfly phases.

    Raises:
        ConfigurationError: P or S is not a power of two; there is no butterfly then.

    Example:
        >>> butterfly_partners(0, 8, 4, step=0), butterfly_partners(0, 8, 4, step=1)
        ([1, 2], [4, 1])
    """
    group_of(rank, world_size, group_size, step)  # refuses numbers out of their range
    if world_size & (world_size - 1) or group_size & (group_size - 1):
        raise ConfigurationError(
            f"a butterfly of P = {world_size} in groups of S = {group_size}: both must be powers of "
            "two; take the members from group_of()"
        )
    global_phases, group_phases = world_size.bit_length() - 1, group_size.bit_length() - 1
    first = step * group_phases
    return [rank ^ 1 << (first + phase) % global_phases for phase in range(group_phases)]


def mixing_steps(world_size: int, group_size: int) -> int:
    """Return the number of averaging steps after which, from *any* step on, all ranks have heard of all.

    Exact, by following all updates: from every start the steps are the same but for the ranks'
    names, as the shuffle is always the same.

    ``ceil(log_S P)`` if S divides P, powers of two or not; with groups of s and s + 1 at most
    ``ceil(log_s P) + 1``, the + 1 in 8 of 1,197 cases (checked, not proven: all P <= 130).

    Cost: P² / 8 bytes of masks per step, here and not in training: 10 ms at P = 1,024.

    Raises:
        ConfigurationError: groups of one among several ranks never mix.

    Example:
        >>> mixing_steps(64, 8), mixing_steps(12, 3), mixing_steps(13, 3), mixing_steps(1, 1)
        (2, 3, 3, 0)
    """
    partition(world_size, group_size, step=0)  # refuses numbers out of their range
    if group_size == 1 < world_size:
        raise ConfigurationError("groups of one never mix; give a group_size of at least 2")
    everyone = (1 << world_size) - 1
    heard_of = [1 << rank for rank in range(world_size)]  # a set of ranks per rank, as bits
    step = 0
    while any(ranks != everyone for ranks in heard_of):
        for group in partition(world_size, group_size, step):
            union = 0
            for rank in group:
                union |= heard_of[rank]
            for rank in group:
                heard_of[rank] = union
        step += 1
    return step


def group_mixing_matrix(world_size: int, group_size: int, step: int) -> Tensor:
    """Return what averaging within the groups of a step does: models become ``W @ models``.

    `[P, P]`, float64; symmetric and doubly stochastic, so the mean of the models stays.

    Example:
        >>> group_mixing_matrix(3, 3, step=0) * 3
        tensor([[1., 1., 1.],
                [1., 1., 1.],
                [1., 1., 1.]], dtype=torch.float64)
    """
    matrix = torch.zeros(world_size, world_size, dtype=torch.float64)
    for group in partition(world_size, group_size, step):
        members = torch.tensor(group)
        matrix[members[:, None], members] = 1 / len(group)
    return matrix
