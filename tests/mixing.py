"""Measure how fast averaging mixes, by the matrices of graphs and groups and their spectral gaps."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsync.published.baselines.gossip import Graph
from sparsync.published.wagma.scheme import group_of

__all__ = ["group_mixing_matrix", "mixing_matrix", "mixing_steps", "partition", "spectral_gap"]


def partition(world_size: int, group_size: int, step: int) -> list[tuple[int, ...]]:
    """Return the groups of a step."""
    return sorted({group_of(rank, world_size, group_size, step) for rank in range(world_size)})


def mixing_matrix(graph: Graph, world_size: int, step: int) -> Tensor:
    """Return the matrix W, `[P, P]`, with which a step of gossip turns the models into ``W @ models``.

    Each rank keeps and sends equal shares: ``W[j, i] = 1 / (1 + neighbours of i)``. Columns
    therefore sum to 1, which preserves the sum of the models. Rows also sum to 1 if ranks that meet
    have equally many neighbours.
    """
    matrix = torch.eye(world_size, dtype=torch.float64)
    for rank in range(world_size):
        neighbours = graph.neighbours(rank, world_size, step)
        matrix[neighbours, rank] = 1.0
        matrix[:, rank] /= 1 + len(neighbours)
    return matrix


def group_mixing_matrix(world_size: int, group_size: int, step: int) -> Tensor:
    """Return the matrix for averaging within the groups of a step."""
    matrix = torch.zeros(world_size, world_size, dtype=torch.float64)
    for group in partition(world_size, group_size, step):
        members = torch.tensor(group)
        matrix[members[:, None], members] = 1 / len(group)
    return matrix


def spectral_gap(matrix: Tensor) -> float:
    """Return 1 - the second singular value of a (product of) doubly stochastic matrix.

    ``W`` shrinks the models' distance from their mean at least by the factor ``1 - gap``.
    """
    values = torch.linalg.svdvals(matrix)
    return 1.0 - float(values[1]) if len(values) > 1 else 1.0


def mixing_steps(world_size: int, group_size: int, start: int = 0) -> int:
    """Return the number of steps from ``start`` until every rank has information from all ranks."""
    everyone = (1 << world_size) - 1
    heard_of = [1 << rank for rank in range(world_size)]  # for each rank a set of ranks, as bits
    step = start
    while any(ranks != everyone for ranks in heard_of):
        for group in partition(world_size, group_size, step):
            union = 0
            for rank in group:
                union |= heard_of[rank]
            for rank in group:
                heard_of[rank] = union
        step += 1
    return step - start
