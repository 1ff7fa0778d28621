import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsync import ConfigurationError, DenseVector, SparseVector
from sparsync.kernels import magnitude_keys
from sparsync.selection import Everything, Exact, ExactState, Reused, ReusedState

from .strategies import dense_tensors, same_vector


def key(value: float) -> int:
    return int(magnitude_keys(torch.tensor([value])))


def test_everything_is_the_tensor_itself():
    accumulated = torch.tensor([0.0, 1.0])
    selected = Everything().select(accumulated, k=1, step=0)
    assert isinstance(selected, DenseVector) and selected.values is accumulated


@given(dense_tensors(), st.integers(0, 40), st.integers(0, 9))
def test_exact_is_the_top_of_the_whole_vector(accumulated, k, step):
    before = accumulated.clone()
    selected = Exact().select(accumulated, k, step).check()
    same_vector(selected, SparseVector.from_dense(before).top(k))


@given(dense_tensors(dtype=torch.float32), st.integers(1, 40), st.sampled_from([1.0, None]))
def test_reused_is_exact_when_a_period_opens(accumulated, k, cap):
    selector = Reused(threshold_period=3, cap=cap)
    for step in (0, 3):
        selector.select(torch.ones(5), k, step + 1)  # another threshold in between
        expected = SparseVector.from_dense(accumulated).top(k)
        same_vector(selector.select(accumulated, k, step), expected)


def test_reused_takes_what_reaches_the_last_exact_threshold():
    selector = Reused(threshold_period=4, cap=None)
    selector.select(torch.tensor([1.0, 2.0, 3.0, 0.5]), k=2, step=0)
    assert selector.state == ReusedState(key(2.0))
    for step in (1, 2, 3):
        selected = selector.select(torch.tensor([2.0, -9.0, 1.9, 5.0]), k=2, step=step)
        assert selected.indices.tolist() == [0, 1, 3]
        assert selected.values.tolist() == [2.0, -9.0, 5.0]
    assert selector.state == ReusedState(key(2.0))  # selecting in between leaves it
    selector.select(torch.tensor([2.0, -9.0, 1.9, 5.0]), k=2, step=4)
    assert selector.state == ReusedState(key(5.0))


@pytest.mark.parametrize(
    ("cap", "expected"), [(1.0, [1, 3]), (1.5, [0, 1, 3]), (None, [0, 1, 3, 4]), (0.4, [1])]
)
def test_reused_takes_at_most_cap_times_k_the_largest_first(cap, expected):
    selector = Reused(threshold_period=32, cap=cap)
    selector.select(torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0]), k=2, step=0)
    selected = selector.select(torch.tensor([2.0, 9.0, 0.9, -8.0, 2.0]), k=2, step=1)
    assert selected.indices.tolist() == expected


@pytest.mark.parametrize(
    ("floor", "values", "expected", "threshold"),
    [
        (0.5, [1.0, 0.5, 0.2, 0.1], [0, 1], 0.5),  # none of 2 reach 3: exact again
        (0.5, [3.0, 0.5, 0.2, 0.1], [0], 3.0),  # 1 of 2 is not below the floor
        (1.0, [3.0, 0.5, 0.2, 0.1], [0, 1], 0.5),
        (None, [1.0, 0.5, 0.2, 0.1], [], 3.0),  # as published
    ],
)
def test_reused_is_exact_where_too_few_reach_the_threshold(floor, values, expected, threshold):
    selector = Reused(threshold_period=32, floor=floor)
    selector.select(torch.tensor([4.0, 3.0, 2.0, 1.0]), k=2, step=0)
    assert selector.select(torch.tensor(values), k=2, step=1).indices.tolist() == expected
    assert selector.state == ReusedState(key(threshold))


def test_reused_waits_for_the_first_entry_that_is_not_zero():
    selector = Reused(threshold_period=32)
    for step in range(3):
        assert selector.select(torch.zeros(4), k=2, step=step).nnz == 0
        assert selector.state == ReusedState(None)
    selected = selector.select(torch.tensor([0.0, 3.0, 4.0, 1.0]), k=2, step=3)
    assert selected.indices.tolist() == [1, 2]
    assert selector.state == ReusedState(key(3.0))


def test_reused_never_selects_zeros_under_any_threshold():
    selector = Reused(cap=None)
    selector.load_state_dict({"threshold_key": 0})
    assert selector.select(torch.tensor([0.0, -0.0, 1.0]), k=1, step=1).indices.tolist() == [2]


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("selector", [Exact(), Reused(), Reused(cap=None)])
def test_nothing_is_asked_or_there_is_nothing(selector, step):
    assert selector.select(torch.ones(3), k=0, step=step).nnz == 0
    assert selector.select(torch.ones(0), k=5, step=step).size == 0


@pytest.mark.parametrize("step", [0, 1])
def test_nan_is_selected_on_every_step(step):
    selector = Reused(threshold_period=32)
    selector.select(torch.tensor([5.0, 5.0, 5.0]), k=1, step=0)
    assert selector.select(torch.tensor([9.0, float("nan"), 9.0]), k=1, step=step).values.isnan()


def test_state_survives_a_round_trip():
    selector, other = Reused(), Reused()
    selector.select(torch.tensor([1.0, 2.0]), k=1, step=0)
    other.load_state_dict(selector.state_dict())
    assert other.state == selector.state == ReusedState(key(2.0))
    exact, again = Exact(), Exact()
    exact.select(torch.tensor([1.0, 2.0]), k=1, step=0)
    again.load_state_dict(exact.state_dict())
    assert again.state == exact.state != ExactState()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"threshold_period": 0}, "threshold_period is 0; give at least 1 step"),
        ({"cap": 0.0}, "cap is 0.0; give a factor > 0"),
        ({"cap": float("nan")}, "cap is nan"),
        ({"floor": 1.5}, "floor is 1.5; give a factor of k"),
    ],
)
def test_bad_constants_are_refused(arguments, says):
    with pytest.raises(ConfigurationError, match=says):
        Reused(**arguments)
