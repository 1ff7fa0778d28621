"""Gossip graphs: who sends to whom fits together on all ranks, and what mixing does to the models."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsync import ConfigurationError
from sparsync.averaging.gossip import Exponential, Graph, Ring
from tests.mixing import RandomPairs, mixing_matrix, spectral_gap

world_sizes = st.integers(1, 33)
steps = st.integers(0, 200)
graphs = st.one_of(
    st.just(Ring()),
    st.integers(1, 7).map(Exponential),
    st.integers(0, 2**40).map(RandomPairs),
)


class Star(Graph):
    """Rank 0 sends to all, all send to rank 0: not regular, so columns sum to 1 and rows do not."""

    def neighbours(self, rank, world_size, step):
        return list(range(1, world_size)) if rank == 0 else [0]


def product(graph, world_size, steps):
    result = torch.eye(world_size, dtype=torch.float64)
    for step in steps:
        result = mixing_matrix(graph, world_size, step) @ result
    return result


@given(graphs, world_sizes, steps)
def test_who_is_sent_to_expects_it(graph, world_size, step):
    to = [graph.neighbours(rank, world_size, step) for rank in range(world_size)]
    for rank in range(world_size):
        sources = graph.sources(rank, world_size, step)
        assert len(set(sources)) == len(sources)
        assert sorted(sources) == [r for r in range(world_size) if rank in to[r]]
        assert len(set(to[rank])) == len(to[rank])
        assert rank not in to[rank]


@given(graphs, world_sizes, steps)
def test_mixing_is_doubly_stochastic(graph, world_size, step):
    matrix = mixing_matrix(graph, world_size, step)
    ones = torch.ones(world_size, dtype=torch.float64)
    assert (matrix >= 0).all()
    torch.testing.assert_close(matrix.sum(0), ones)
    torch.testing.assert_close(matrix.sum(1), ones)
    assert -1e-12 <= spectral_gap(matrix) <= 1 + 1e-12


@pytest.mark.parametrize("world_size", [3, 4, 9])
def test_mixing_of_unequal_ranks_is_column_stochastic_only(world_size):
    matrix = mixing_matrix(Star(), world_size, step=0)
    torch.testing.assert_close(matrix.sum(0), torch.ones(world_size, dtype=torch.float64))
    assert abs(float(matrix[0].sum()) - 1) > 0.1


def test_mixing_matrix_by_hand():
    expected = [[2, 2, 0, 2], [2, 2, 2, 0], [0, 2, 2, 2], [2, 0, 2, 2]]
    assert (6 * mixing_matrix(Ring(), 4, 0)).round().int().tolist() == expected
    rows = (2 * mixing_matrix(Exponential(), 3, 0)).tolist()  # rank r sends to r + 1
    assert rows == [[1.0, 0.0, 1.0], [1.0, 1.0, 0.0], [0.0, 1.0, 1.0]]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8, 33])
def test_spectral_gap_of_the_ring(world_size):
    """Its eigenvalues are (1 + 2 cos(2 pi i / P)) / 3; of one or two ranks one step is the mean."""
    around = [2 * math.pi * i / world_size for i in range(1, world_size)]
    second = max([abs(1 + 2 * math.cos(angle)) / 3 for angle in around], default=0.0)
    expected = 1.0 if world_size <= 2 else 1 - second
    assert spectral_gap(mixing_matrix(Ring(), world_size, 0)) == pytest.approx(expected)


@pytest.mark.parametrize("power", range(7))
@pytest.mark.parametrize("start", [0, 1, 5])
def test_exponential_graph_gives_powers_of_two_the_mean_in_log_p_steps(power, start):
    world_size = 2**power
    mixed = product(Exponential(), world_size, range(start, start + power))
    torch.testing.assert_close(mixed, torch.full_like(mixed, 1 / world_size))
    if power:
        short = product(Exponential(), world_size, range(start, start + power - 1))
        assert (short == 0).any()


@given(world_sizes, st.integers(1, 7), steps)
def test_exponential_graph_reaches_all_from_all_in_log_p_steps(world_size, count, start):
    needed = (world_size - 1).bit_length()
    assert (product(Exponential(count), world_size, range(start, start + needed)) > 0).all()


def test_exponential_neighbours():
    graph = Exponential(2)
    assert [graph.neighbours(6, 8, step) for step in range(4)] == [[7, 0], [2, 7], [0, 2], [7, 0]]
    assert graph.neighbours(0, 3, 5) == [1, 2]
    assert Exponential(9).neighbours(0, 5, 0) == [1, 2, 4]
    assert graph.neighbours(1, 2, 7) == [0]
    assert graph.neighbours(0, 1, 0) == []


def test_exponential_needs_a_neighbour():
    with pytest.raises(ConfigurationError, match="0 neighbours per step; give at least 1"):
        Exponential(0)


@given(world_sizes, steps, st.integers(0, 99))
def test_random_pairs_are_a_perfect_matching(world_size, step, seed):
    partners = [RandomPairs(seed).neighbours(rank, world_size, step) for rank in range(world_size)]
    assert sum(not p for p in partners) == world_size % 2
    assert all(partners[p[0]] == [rank] for rank, p in enumerate(partners) if p)
