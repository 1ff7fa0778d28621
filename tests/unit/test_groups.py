from collections import Counter
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsync import ConfigurationError
from sparsync.averaging.groups import default_group_size, group_of, partition
from tests.mixing import butterfly_partners, mixing_steps
from tests.mixing import group_mixing_matrix as mixing_matrix


@st.composite
def group_steps(draw, most=130):
    """World size, group size, step."""
    world_size = draw(st.integers(1, most))
    return world_size, draw(st.integers(1, world_size)), draw(st.integers(0, 100_000))


def reached(world_size, group_size, start, steps):
    """The ranks that each rank has heard of, by the groups alone."""
    heard_of = [{rank} for rank in range(world_size)]
    for step in range(start, start + steps):
        for group in partition(world_size, group_size, step):
            union = set().union(*(heard_of[rank] for rank in group))
            for rank in group:
                heard_of[rank] = union
    return heard_of


@given(group_steps())
def test_everyone_is_in_one_group_of_nearly_equal_size(case):
    groups = partition(*case)
    sizes = {len(group) for group in groups}
    assert sorted(chain(*groups)) == list(range(case[0]))
    assert all(list(group) == sorted(group) for group in groups)
    assert max(sizes) - min(sizes) <= 1


@given(group_steps())
def test_group_sizes_are_the_one_asked_for_or_surround_it(case):
    world_size, group_size, _ = case
    groups = partition(*case)
    if world_size % group_size == 0:
        assert {len(group) for group in groups} == {group_size}
    # one group more or fewer would be no closer to P / S
    assert abs(len(groups) - world_size / group_size) <= 0.5
    if group_size > 1:
        assert min(len(group) for group in groups) > 1, "a rank is idle"


@given(group_steps(most=40))
def test_a_rank_finds_its_group_alone(case):
    assert {rank: group_of(rank, *case) for rank in range(case[0])} == {
        rank: group for group in partition(*case) for rank in group
    }


def test_a_rank_finds_its_group_without_listing_the_others():
    members = group_of(123_456_789, 10**9 + 7, 4, step=10**6)  # listing would take minutes
    assert 123_456_789 in members
    assert all(group_of(rank, 10**9 + 7, 4, step=10**6) == members for rank in members)


@given(group_steps())
def test_the_composition_changes_on_every_step(case):
    world_size, group_size, step = case
    now, then = partition(*case), partition(world_size, group_size, step + 1)
    assert (set(now) != set(then)) == (len(now) > 1 and group_size > 1)


@given(st.integers(0, 7), st.data())
def test_butterfly_phases_connect_exactly_the_group(global_phases, data):
    world_size = 1 << global_phases
    group_size = 1 << data.draw(st.integers(0, global_phases))
    step = data.draw(st.integers(0, 100_000))
    rank = data.draw(st.integers(0, world_size - 1))
    met = {rank}
    for phase in range(group_size.bit_length() - 1):
        met |= {butterfly_partners(r, world_size, group_size, step)[phase] for r in met}
    assert sorted(met) == list(group_of(rank, world_size, group_size, step))


@given(group_steps(most=40))
def test_the_mixing_matrix_averages_each_group(case):
    expected = torch.zeros(case[0], case[0], dtype=torch.float64)
    for group in partition(*case):
        expected[torch.tensor(group)[:, None], torch.tensor(group)] = 1 / len(group)
    torch.testing.assert_close(mixing_matrix(*case), expected)


def different_groups(world_size):
    """Group sizes > 1 that give different groups (20 and 21 give the same of 40 ranks)."""
    sizes = range(world_size, min(2, world_size) - 1, -1)
    return {len(partition(world_size, size, 0)): size for size in sizes}.values()


@pytest.mark.parametrize("world_size", range(1, 41))
def test_the_mixing_steps_are_enough_and_needed_from_every_start(world_size):
    for group_size in different_groups(world_size):
        steps = mixing_steps(world_size, group_size)
        for start in range(world_size):  # the powers of a stride repeat after fewer than P
            assert all(len(r) == world_size for r in reached(world_size, group_size, start, steps))
            if steps:
                before = reached(world_size, group_size, start, steps - 1)
                assert any(len(r) < world_size for r in before)


def test_the_mixing_steps_are_the_logarithm_or_one_more_for_a_few_uneven_groups():
    even, uneven = Counter(), Counter()
    for world_size in range(2, 131):
        for group_size in different_groups(world_size):
            sizes = {len(group) for group in partition(world_size, group_size, 0)}
            logarithm = next(m for m in range(world_size) if min(sizes) ** m >= world_size)
            excess = mixing_steps(world_size, group_size) - logarithm
            (even if len(sizes) == 1 else uneven)[excess] += 1
    assert even == {0: 527}
    assert uneven == {-1: 80, 0: 1109, 1: 8}


def test_the_default_group_size_by_table():
    table = {1: 1, 2: 2, 3: 3, 4: 2, 5: 2, 6: 2, 7: 3, 8: 2, 9: 3, 12: 3, 13: 4, 15: 3, 16: 4}
    table |= {20: 4, 30: 5, 32: 4, 64: 8, 101: 10, 128: 8, 256: 16, 1024: 32}
    assert {world_size: default_group_size(world_size) for world_size in table} == table


@given(st.integers(1, 400))
def test_the_default_group_mixes_and_is_a_divisor_unless_there_is_none(world_size):
    group_size = default_group_size(world_size)
    divisors = [d for d in range(2, world_size) if world_size % d == 0]
    assert not divisors or group_size in divisors
    assert mixing_steps(world_size, group_size) >= (world_size > 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: partition(0, 1, 0), "world_size is 0; give the number of ranks, at least 1"),
        (lambda: partition(8, 0, 0), "group_size is 0; give 1 to 8, the number of ranks"),
        (lambda: group_of(0, 8, 9, 0), "group_size is 9; give 1 to 8, the number of ranks"),
        (lambda: mixing_matrix(8, 4, -1), "step is -1; steps count from 0"),
        (lambda: group_of(8, 8, 4, 0), "rank is 8; with 8 ranks give 0 to 7"),
        (lambda: butterfly_partners(-1, 8, 4, 0), "rank is -1; with 8 ranks give 0 to 7"),
        (lambda: butterfly_partners(0, 12, 4, 0), "a butterfly of P = 12 .* powers of two"),
        (lambda: butterfly_partners(0, 8, 3, 0), "a butterfly of P = 8 in groups of S = 3"),
        (lambda: mixing_steps(8, 1), "groups of one never mix; give a group_size of at least 2"),
        (lambda: default_group_size(0), "world_size is 0"),
    ],
)
def test_a_wrong_number_is_one_clear_line(call, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
