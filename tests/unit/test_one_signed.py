import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsync import ConfigurationError, SparseVector
from sparsync.selection import (
    Blockwise,
    Everything,
    Exact,
    ExactState,
    GaussianK,
    Sampled,
    Selector,
)
from sparsync.selection.redsync import OneSigned, OneSignedState
from sparsync.testing import check_selector

from .strategies import dense_tensors, same_vector

NAN, INF = float("nan"), float("inf")


class Layers(Selector):
    """A selector that asks for the layers, and says their sizes."""

    def __init__(self, sizes=()):
        self.sizes = sizes

    def for_layers(self, sizes):
        return Layers(tuple(sizes))

    def methods(self, sizes):
        return [f"of {size}" for size in self.sizes]

    def select(self, accumulated, k, step, collected=None):
        return SparseVector.from_dense(accumulated)


class Reusing(Selector):
    """A selector that says of itself that it reuses thresholds."""

    reuses = True

    def select(self, accumulated, k, step, collected=None):
        raise AssertionError("never asked")


def of_sign(accumulated, sign) -> SparseVector:
    """The entries of one sign, and those that are not finite."""
    vector = SparseVector.from_dense(accumulated)
    return vector.keep((vector.values * sign > 0) | ~vector.values.isfinite())


@given(dense_tensors(max_size=60), st.integers(0, 70), st.integers(0, 9))
def test_both_turns_are_the_exact_top_of_their_sign(accumulated, k, step):
    before, selector = accumulated.clone(), OneSigned(Exact())
    for sign in (1, -1, 1, -1):
        selected = selector.select(accumulated, k, step).check()  # the step does not matter
        same_vector(selected, of_sign(before, sign).top(k))


@given(dense_tensors(max_size=60), st.integers(1, 70))
def test_the_bottom_is_the_top_of_the_negative(accumulated, k):
    one, other = OneSigned(Exact()), OneSigned(Exact())
    one.select(torch.ones(3), 1, 0)  # its turn is over
    bottom, top = one.select(accumulated, k, 0), other.select(-accumulated, k, 0)
    same_vector(bottom, SparseVector(top.indices, -top.values, top.size))


@given(dense_tensors(max_size=60), st.integers(1, 70))
@pytest.mark.parametrize(
    "inner", [lambda: Sampled(0.1, least=1), lambda: Blockwise(block=7), GaussianK]
)
def test_no_result_mixes_signs(inner, accumulated, k):
    selector = OneSigned(inner())
    for sign in (1, -1, 1):
        values = selector.select(accumulated, k, 0).check().values
        assert bool(((values * sign > 0) | ~values.isfinite()).all())


def test_fewer_than_k_come_where_fewer_have_the_sign():
    selector, accumulated = OneSigned(Exact()), torch.tensor([3.0, 1.0, 0.0, -2.0, 4.0])
    counts = [selector.select(accumulated, 2, step).nnz for step in range(4)]
    assert counts == [2, 1, 2, 1]
    selector = OneSigned(Exact())
    assert [selector.select(torch.full((9,), -2.0), 4, 0).nnz for _ in range(2)] == [0, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_nan_and_infinity_come_on_every_call(dtype):
    """One that stayed behind would be in the residual: every later step would be refused."""
    # 40 elements and one: both what a vector instruction takes and what is left over
    accumulated = torch.full((41,), -0.5, dtype=dtype)
    accumulated[[3, 40]] = NAN
    accumulated[[5, 20]] = torch.tensor([INF, -INF], dtype=dtype)
    selector = OneSigned(Exact())
    for _ in range(4):
        assert selector.select(accumulated, 4, 0).indices.tolist() == [3, 5, 20, 40]


def test_every_call_takes_its_turn_an_empty_one_too():
    selector, accumulated = OneSigned(Exact()), torch.tensor([1.0, -1.0])
    selector.select(accumulated, 0, 0)
    assert selector.select(accumulated, 1, 0).indices.tolist() == [1]
    selector.select(torch.zeros(0), 1, 0)
    assert selector.select(accumulated, 1, 0).indices.tolist() == [1]
    everything = OneSigned(Everything())
    assert [everything.select(accumulated, 1, 0).values.tolist() for _ in range(2)] == [
        [1.0, 0.0],
        [0.0, -1.0],
    ]


@pytest.mark.parametrize("inner", [Exact, Sampled, Blockwise])
def test_contract(inner):
    check_selector(lambda: OneSigned(inner()), exact=False)


def test_a_refused_step_gives_the_turn_back_and_the_inner_state():
    selector, accumulated = OneSigned(Exact()), torch.tensor([1.0, -1.0])
    before = selector.state
    selector.select(accumulated, 1, 0)
    assert selector.state.bottom and selector.state.selector != ExactState()
    selector.state = before
    assert selector.selector.state == ExactState()
    assert selector.select(accumulated, 1, 0).indices.tolist() == [0]


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_saved_state_goes_on_where_it_was(calls, tmp_path):
    accumulated = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    selector, other = OneSigned(Sampled(0.1, least=1)), OneSigned(Sampled(0.1, least=1))
    for _ in range(calls):
        selector.select(accumulated, 50, 0)
    torch.save(selector.state_dict(), tmp_path / "state")
    other.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert other.state == selector.state
    for _ in range(3):
        same_vector(other.select(accumulated, 50, 0), selector.select(accumulated, 50, 0))


BROKEN = {
    "nothing": None,
    "no dictionary": [1, 2],
    "no inner state": {"bottom": True},
    "another field": {"bottom": True, "selector": {"calls": 3}, "surprise": 1},
    "a flag that is no number": {"bottom": "x", "selector": {"calls": 3}},
    "an inner state of another selector": {"bottom": True, "selector": {"threshold_key": 3}},
    "an inner state that is none": {"bottom": True, "selector": None},
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(name):
    selector = OneSigned(Sampled())
    before = copy.deepcopy(selector.state)
    with pytest.raises(ConfigurationError) as caught:
        selector.load_state_dict(BROKEN[name])
    assert "\n" not in str(caught.value)
    assert selector.state == before == OneSignedState(False, Sampled().state)


def test_a_selector_that_reuses_thresholds_is_refused():
    with pytest.raises(ConfigurationError, match="Reusing reuses thresholds between steps"):
        OneSigned(Reusing())


def test_the_selector_inside_learns_of_the_layers():
    selector = OneSigned(Layers()).for_layers([3, 4])
    assert isinstance(selector, OneSigned) and selector.methods([3, 4]) == ["of 3", "of 4"]
    assert selector.select(torch.tensor([1.0, -1.0]), 1, 0).indices.tolist() == [0]
