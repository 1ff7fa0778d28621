"""Test units of parameters, and their shares of k."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsync import SparseVector
from sparsync.feedback import shares
from sparsync.feedback.shares import SharesState
from sparsync.kernels import magnitude_keys
from sparsync.units import plan_units
from tests.tables import cases, refused


def names(units) -> list[list[str]]:
    return [[slot.name for slot in unit.slots] for unit in units]


@given(st.lists(st.integers(0, 30), max_size=10), st.one_of(st.none(), st.integers(1, 100)))
def test_units_hold_every_parameter_once_in_order_and_without_gaps(sizes, unit_bytes):
    units = plan_units([(f"p{i}", torch.zeros(n)) for i, n in enumerate(sizes)], unit_bytes)
    slots = [slot for unit in units for slot in unit.slots]
    assert [(s.name, s.size) for s in slots] == [(f"p{i}", n) for i, n in enumerate(sizes)]
    for unit in units:
        starts = [slot.start for slot in unit.slots]
        assert starts == [sum(s.size for s in unit.slots[:i]) for i in range(len(starts))]
        assert unit.size == sum(slot.size for slot in unit.slots)
    if unit_bytes is not None:  # closed as soon as it is large enough, and not before
        for unit in units[:-1]:
            assert unit.size * 4 >= unit_bytes > (unit.size - unit.slots[-1].size) * 4


def test_dtypes_are_kept_apart():
    dtypes = {"a": torch.float32, "b": torch.float16, "c": torch.float32}
    parameters = [(name, torch.zeros(2, dtype=dtype)) for name, dtype in dtypes.items()]
    units = plan_units(parameters)
    assert names(units) == [["a", "c"], ["b"]]
    assert [unit.dtype for unit in units] == [torch.float32, torch.float16]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_every_element_knows_its_parameter(sizes):
    (unit,) = plan_units([(f"p{i}", torch.zeros(n)) for i, n in enumerate(sizes)])
    owners = [f"p{i}" for i, n in enumerate(sizes) for _ in range(n)]
    assert [unit.name_at(index) for index in range(unit.size)] == owners


@cases((0, 0.5, 0), (1, 1e-9, 1), (300, 0.01, 3), (1000, 0.0014, 1), (1000, 0.0016, 2), (7, 1.0, 7))
def test_entries_are_at_least_one_and_at_most_all(size, density, k):
    (unit,) = plan_units([("w", torch.zeros(size))])
    assert unit.entries(density) == k


def test_unit_bytes_must_be_positive():
    with refused("unit_bytes is 0; give a whole number of at least 1"):
        plan_units([("w", torch.zeros(1))], unit_bytes=0)


four = st.lists(st.integers(0, 1000), min_size=4, max_size=4)
counts = four.map(lambda xs: sorted(xs, reverse=True))
AT = [1, 10, 100, 1000]


def filled(k, sizes):
    """Give one entry to every unit, and the rest to the first units that have room."""
    quotas = [1] * len(sizes)
    for i, size in enumerate(sizes):
        quotas[i] += min(size - 1, k - sum(quotas))
    return quotas


@given(st.lists(st.tuples(counts, st.integers(1, 400)), min_size=1, max_size=6), st.data())
def test_shares_sum_to_k_within_their_limits(units, data):
    sizes = [size for _, size in units]
    k = data.draw(st.integers(1, sum(sizes)))
    k = max(k, len(sizes))
    state = SharesState(tuple(filled(k, sizes)), 50)
    found = shares.next_shares(state, AT, [c for c, _ in units], k, sizes, world_size=1)
    assert sum(found.quotas) == k
    assert all(1 <= quota <= size for quota, size in zip(found.quotas, sizes, strict=True))


@given(st.lists(counts, min_size=2, max_size=5), st.integers(1, 4))
def test_more_ranks_with_equal_counts_change_nothing(units, world_size):
    state, sizes = SharesState((5,) * len(units), None), [500] * len(units)
    one = shares.next_shares(state, AT, units, 100, sizes, 1)
    many = [[world_size * c for c in unit] for unit in units]
    assert shares.next_shares(state, AT, many, 100, sizes, world_size) == one


def test_a_unit_that_shows_all_it_has_may_double():
    state = SharesState((10, 90), key=100)
    found = shares.next_shares(state, AT, [[10, 10, 10, 10], [500, 400, 80, 0]], 100, [900, 900], 1)
    assert 15 <= found.quotas[0] <= 20


def test_edges_ascend_around_the_last_magnitude():
    key = int(magnitude_keys(torch.tensor([0.25])))
    at = shares.edges(key, torch.float32)
    assert key in at and at[0] == 1 and at == sorted(at)
    extreme = shares.edges(3, torch.float32)
    assert extreme == sorted(extreme) and min(extreme) == 1


def test_the_first_step_counts_from_an_octave_below_and_later_ones_what_was_collected():
    accumulated = torch.tensor([1.0, 4.0, 2.5, 1.5])
    selected = SparseVector(torch.tensor([1, 2]), torch.tensor([4.0, 2.5]), 4)
    units = plan_units([("a", accumulated), ("b", accumulated)], 4)
    sharing = shares.Sharing.among(units)
    sharing.count(SharesState((2, 2)), 0, accumulated, None, selected)
    assert sharing._histograms[0][0] == 3
    key = int(magnitude_keys(torch.tensor([2.5])))
    for collected, counted in ((SparseVector.from_dense(accumulated), 4), (None, 2)):
        sharing.count(SharesState((2, 2), key), 0, accumulated, collected, selected)
        assert sharing._histograms[0][0] == counted


def test_after_silence_magnitudes_are_looked_for_afresh():
    """A step of zeros leaves shares unchanged and forgets the magnitude."""
    state = SharesState((30, 70), key=100)
    found = shares.next_shares(state, AT, [[0, 0, 0, 0], [9, 0, 0, 0]], 100, [900, 900], 1)
    assert found == SharesState((30, 70), None)
