import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsync import ConfigurationError
from sparsync.units import plan_units


def names(units) -> list[list[str]]:
    return [[slot.name for slot in unit.slots] for unit in units]


@given(
    st.lists(st.integers(0, 30), max_size=10),
    st.one_of(st.none(), st.integers(1, 100)),
)
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
    parameters = [
        ("a", torch.zeros(2)),
        ("b", torch.zeros(2, dtype=torch.float16)),
        ("c", torch.zeros(2)),
    ]
    units = plan_units(parameters)
    assert names(units) == [["a", "c"], ["b"]]
    assert [unit.dtype for unit in units] == [torch.float32, torch.float16]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_every_element_knows_its_parameter(sizes):
    (unit,) = plan_units([(f"p{i}", torch.zeros(n)) for i, n in enumerate(sizes)])
    owners = [f"p{i}" for i, n in enumerate(sizes) for _ in range(n)]
    assert [unit.name_at(index) for index in range(unit.size)] == owners


@pytest.mark.parametrize(
    ("size", "density", "k"),
    [(0, 0.5, 0), (1, 1e-9, 1), (300, 0.01, 3), (1000, 0.0014, 1), (1000, 0.0016, 2), (7, 1.0, 7)],
)
def test_entries_are_at_least_one_and_at_most_all(size, density, k):
    (unit,) = plan_units([("w", torch.zeros(size))])
    assert unit.entries(density) == k


def test_unit_bytes_must_be_positive():
    with pytest.raises(
        ConfigurationError, match="unit_bytes is 0; give a whole number of at least 1"
    ):
        plan_units([("w", torch.zeros(1))], unit_bytes=0)
