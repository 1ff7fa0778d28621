"""WAGMA-SGD, section 3.2: dynamic grouping."""

import pytest
import torch

from sparsync.published.wagma.scheme import group_of
from tests.mixing import group_mixing_matrix as mixing_matrix
from tests.mixing import mixing_steps, partition

POWERS = [
    (1 << global_phases, 1 << group_phases)
    for global_phases in range(7)
    for group_phases in range(min(1, global_phases), global_phases + 1)
]


def algorithm_1(world_size, group_size, step):
    """Line by line, except ``mask = 1 << shift``."""
    global_phases = world_size.bit_length() - 1
    group_phases = group_size.bit_length() - 1
    shift = step * group_phases % max(global_phases, 1)
    groups = [{rank} for rank in range(world_size)]
    for _ in range(group_phases):
        mask = 1 << shift
        for p in range(world_size):
            q = p ^ mask
            group_p = next(group for group in groups if p in group)
            group_q = next(group for group in groups if q in group)
            if group_p is not group_q:
                groups.remove(group_q)
                group_p |= group_q
        shift = (shift + 1) % global_phases
    return {tuple(sorted(group)) for group in groups}


def test_iteration_0_of_8_processes_in_groups_of_4():
    assert partition(8, 4, step=0) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    for partners in ([1, 0, 3, 2, 5, 4, 7, 6], [2, 3, 0, 1, 6, 7, 4, 5]):  # of the two phases
        assert all(partners[rank] in group_of(rank, 8, 4, step=0) for rank in range(8))


def test_iteration_1_of_8_processes_in_groups_of_4():
    assert partition(8, 4, step=1) == [(0, 1, 4, 5), (2, 3, 6, 7)]


def test_figure_2_repeats_after_as_many_iterations_as_the_butterfly_has_phases():
    assert sorted(partition(8, 4, step=2)) == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert partition(8, 4, step=3) == partition(8, 4, step=0)


def test_snapshot_of_4_processes_in_groups_of_2():
    """Figure 3: P1 meets P0, then P3."""
    assert partition(4, 2, step=0) == [(0, 1), (2, 3)]
    assert sorted(partition(4, 2, step=1)) == [(0, 2), (1, 3)]


@pytest.mark.parametrize(("world_size", "group_size"), POWERS)
def test_groups_of_powers_of_two_are_algorithm_1(world_size, group_size):
    for step in range(13):
        expected = algorithm_1(world_size, group_size, step)
        assert set(partition(world_size, group_size, step)) == expected


@pytest.mark.parametrize(("world_size", "group_size"), POWERS)
def test_an_update_reaches_everyone_within_log_s_p_iterations(world_size, group_size):
    """Whatever the start, all ranks then have exactly the mean (powers of two cause no rounding)."""
    steps = mixing_steps(world_size, group_size)
    assert group_size**steps >= world_size
    assert steps == 0 or group_size ** (steps - 1) < world_size
    everywhere = torch.full((world_size, world_size), 1 / world_size, dtype=torch.float64)
    for start in range(world_size.bit_length()):
        product = torch.eye(world_size, dtype=torch.float64)
        for step in range(start, start + steps):
            product = mixing_matrix(world_size, group_size, step) @ product
        assert torch.equal(product, everywhere)


def test_larger_groups_propagate_faster():
    assert [mixing_steps(64, 1 << phases) for phases in range(1, 7)] == [6, 3, 2, 2, 2, 1]
