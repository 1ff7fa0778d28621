"""Test that sites are found by the speed of links, from given and simulated times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsync.errors import ConfigurationError
from sparsync.gradients import sites
from sparsync.gradients.sites import sites_of, time_pairs
from sparsync.transports.sim import Links, Route, Topology, TwoLevel, simulate
from tests.tables import cases

NBYTES = 1 << 18


def pairs(ranks, seconds_of):
    return {(a, b): seconds_of(a, b) for b in range(ranks) for a in range(b)}


def between(*grid, near=2e-3, far=40e-3):
    """Return a function that gives the seconds between two ranks of these sites."""
    site_of = {rank: number for number, site in enumerate(grid) for rank in site}
    return lambda a, b: near if site_of[a] == site_of[b] else far


def noise(data, ranks):
    factors = st.lists(st.floats(0.7, 1.3), min_size=ranks**2, max_size=ranks**2)
    drawn = data.draw(factors)
    return lambda a, b: drawn[a * ranks + b]


@given(count=st.integers(2, 4), size=st.integers(2, 4), data=st.data())
def test_sites_are_found_in_any_order_of_ranks_and_with_noise(count, size, data):
    ranks = count * size
    order = data.draw(st.permutations(range(ranks)))
    wanted = sorted(sorted(order[i * size : (i + 1) * size]) for i in range(count))
    factor, seconds = noise(data, ranks), between(*wanted)
    times = pairs(ranks, lambda a, b: factor(a, b) * seconds(a, b))
    found = sites_of(times, [10 + place for place in range(ranks)], NBYTES)
    assert found == [[10 + place for place in site] for site in wanted]


@given(ranks=st.integers(2, 8), data=st.data())
def test_links_that_are_alike_make_no_sites_whatever_the_noise(ranks, data):
    factor = noise(data, ranks)
    times = pairs(ranks, lambda a, b: 0.04 * factor(a, b))
    with pytest.raises(ConfigurationError, match=r"the links are alike, .* omit hierarchy="):
        sites_of(times, range(ranks), NBYTES)


def test_links_that_take_next_to_nothing_are_alike():
    said = r"alike, 20 µs to 1 ms for 262 kB, .* above 500 µs"
    with pytest.raises(ConfigurationError, match=said):
        sites_of(pairs(4, between((0, 1), (2, 3), near=20e-6, far=1e-3)), range(4), NBYTES)


def test_the_larger_gap_decides():
    """Two sites have two machines each, and the sites are farther apart than the machines."""
    machines = between((0, 1), (2, 3), (4, 5), (6, 7), near=1e-3, far=5e-3)
    towns = between((0, 1, 2, 3), (4, 5, 6, 7), near=0, far=100e-3)
    times = pairs(8, lambda a, b: machines(a, b) + towns(a, b))
    assert sites_of(times, range(8), NBYTES) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@cases(
    (5, between((0, 1, 4), (2, 3)), r"unequal sizes, \[\[0, 1, 4\], \[2, 3\]\]; start as many"),
    (3, between((0,), (1, 2)), r"unequal sizes, \[\[0\], \[1, 2\]\]"),
    (
        4,
        lambda a, b: 2e-3 if b == a + 1 else 0.04,
        "rank 1 is near ranks 0 and 2, which",
    ),  # a chain
)
def test_what_cannot_be_divided_is_refused_in_one_line(ranks, seconds, said):
    with pytest.raises(ConfigurationError, match=said) as caught:
        sites_of(pairs(ranks, seconds), range(ranks), NBYTES)
    assert "\n" not in str(caught.value) and "give a mesh" in str(caught.value)


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8])
def test_every_pair_takes_its_turn_together(ranks):
    """A rank without a peer in a turn does not disturb the others' order."""
    left = {rank: list(sites._peers(rank, ranks)) for rank in range(ranks)}
    assert all(sorted([r, *peers]) == list(range(ranks)) for r, peers in left.items())
    while any(left.values()):  # as blocking calls would proceed
        ready = [r for r, peers in left.items() if peers and left[peers[0]][:1] == [r]]
        assert ready, "every rank waits for another"
        for rank in ready:
            left[rank].pop(0)


class Asymmetric(Topology):
    """A link between two ranks that is slow in one direction and fast in the other."""

    def route(self, source, dest):
        if source // 2 == dest // 2:
            return Route(1e-4, 8e-9, source, dest)
        return Route(1e-3, 8e-7 if source > dest else 8e-9, source, dest)


@cases(
    (TwoLevel(2, inner=Links(1e-4, 8e-9), outer=Links(40e-3, 8e-8)), 2),
    (TwoLevel(4, inner=Links(1e-4, 8e-9), outer=Links(1e-3, 8e-7)), 4),  # 10 Mbit/s
    (TwoLevel(2, inner=Links(1e-4, 8e-9), outer=Links(1e-3, 8e-5)), 2),  # 100 kbit/s
    (Asymmetric(), 2),
)
def test_sites_are_measured_within_seconds(topology, size):
    async def program(comm):
        return await time_pairs(comm)

    done = simulate(program, 2 * size, links=topology)
    assert all(found == done.results[0] for found in done.results) and done.seconds < 10
    wanted = [list(range(size)), list(range(size, 2 * size))]
    times, nbytes = done.results[0]
    assert sites_of(times, range(2 * size), nbytes) == wanted


def test_a_pair_takes_what_its_link_does():
    async def program(comm):
        return await time_pairs(comm)

    times, nbytes = simulate(program, 5, links=Links(1e-3, 8e-9)).results[0]
    assert nbytes == 1 << 18
    assert times == pairs(5, lambda a, b: pytest.approx(1e-3 + 8e-9 * nbytes))
