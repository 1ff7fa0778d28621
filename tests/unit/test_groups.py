from collections import Counter
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsync import ConfigurationError
from sparsync.averaging.groups import default_group_size, group_of
from tests.mixing import mixing_steps, partition


@st.composite
def group_steps(draw, most=130):
    """World size, group size, step."""
    world_size = draw(st.integers(1, most))
    return world_size, draw(st.integers(1, world_size)), draw(st.integers(0, 100_000))


@given(group_steps())
def test_everyone_is_in_one_group_of_about_the_size_asked_for(case):
    world_size, group_size, _ = case
    groups = partition(*case)
    sizes = {len(group) for group in groups}
    assert sorted(chain(*groups)) == list(range(world_size))
    assert all(list(group) == sorted(group) for group in groups)
    assert max(sizes) - min(sizes) <= 1
    if world_size % group_size == 0:
        assert sizes == {group_size}
    # one group more or fewer would be no closer to P / S
    assert abs(len(groups) - world_size / group_size) <= 0.5
    assert min(sizes) > 1 or group_size == 1, "a rank is idle"


def test_a_rank_finds_its_group_without_listing_the_others():
    members = group_of(123_456_789, 10**9 + 7, 4, step=10**6)  # listing would take minutes
    assert 123_456_789 in members
    assert all(group_of(rank, 10**9 + 7, 4, step=10**6) == members for rank in members)


@given(group_steps())
def test_the_composition_changes_on_every_step(case):
    world_size, group_size, step = case
    now, then = partition(*case), partition(world_size, group_size, step + 1)
    assert (set(now) != set(then)) == (len(now) > 1 and group_size > 1)


def different_groups(world_size):
    """Group sizes > 1 that give different groups (20 and 21 give the same of 40 ranks)."""
    sizes = range(world_size, min(2, world_size) - 1, -1)
    return {len(partition(world_size, size, 0)): size for size in sizes}.values()


@pytest.mark.parametrize("world_size", [2, 5, 12, 13, 24, 40])
def test_the_mixing_steps_are_the_same_from_every_start(world_size):
    for group_size in different_groups(world_size):
        starts = range(world_size)  # the powers of a stride repeat after fewer than P
        assert len({mixing_steps(world_size, group_size, start) for start in starts}) == 1


def test_the_mixing_steps_are_the_logarithm_or_one_more_for_a_few_uneven_groups():
    even, uneven = Counter(), Counter()
    for world_size in range(2, 49):
        for group_size in different_groups(world_size):
            sizes = {len(group) for group in partition(world_size, group_size, 0)}
            logarithm = next(m for m in range(world_size) if min(sizes) ** m >= world_size)
            excess = mixing_steps(world_size, group_size) - logarithm
            (even if len(sizes) == 1 else uneven)[excess] += 1
    assert set(even) == {0}
    assert set(uneven) <= {-1, 0, 1} and uneven[1] < 0.02 * uneven[0]


def test_the_default_group_size_by_table():
    table = {1: 1, 2: 2, 3: 3, 4: 2, 5: 2, 6: 2, 7: 3, 8: 2, 9: 3, 12: 3, 13: 4, 15: 3, 16: 4}
    table |= {20: 4, 30: 5, 32: 4, 64: 8, 101: 10, 128: 8, 256: 16, 1024: 32}
    assert {world_size: default_group_size(world_size) for world_size in table} == table


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: group_of(0, 0, 1, 0), "world_size is 0; give the number of ranks, at least 1"),
        (lambda: group_of(0, 8, 0, 0), "group_size is 0; give 1 to 8, the number of ranks"),
        (lambda: group_of(0, 8, 9, 0), "group_size is 9; give 1 to 8, the number of ranks"),
        (lambda: group_of(0, 8, 4, -1), "step is -1; steps count from 0"),
        (lambda: group_of(8, 8, 4, 0), "rank is 8; with 8 ranks give 0 to 7"),
        (lambda: default_group_size(0), "world_size is 0"),
    ],
)
def test_a_wrong_number_is_one_clear_line(call, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
