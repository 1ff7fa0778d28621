"""Test RedSync's selectors beyond the contracts."""

import copy
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparsync import ConfigurationError, DenseVector, SparseVector, kernels
from sparsync.published.baselines import GaussianK
from sparsync.published.oktopk import Reused
from sparsync.published.redsync import Layered
from sparsync.published.redsync import selectors as redsync
from sparsync.published.redsync.selectors import (
    BinarySearch,
    BinarySearchState,
    BySize,
    OneSigned,
    OneSignedState,
    Trimmed,
    mean_and_max,
)
from sparsync.selection import Blockwise, Exact, Sampled
from tests.tables import cases, refused, refuses

from .selection_inputs import INF, NAMES, NAN, SIZE, SOME_K, inputs, noise
from .strategies import FLOATS, dense_tensors, same_vector

KIB, MIB = 2**10, 2**20


def largest(accumulated: Tensor, k: int) -> SparseVector:
    positions = kernels.top(accumulated, k)
    return SparseVector(positions, accumulated[positions], accumulated.numel())


def check_promise(accumulated: Tensor, k: int, selected: SparseVector) -> None:
    """Check that the k to 2k largest entries were selected, or all nonzero ones if fewer than k exist."""
    selected.check()
    nnz = int((accumulated != 0).sum())
    assert min(k, nnz) <= selected.nnz <= 2 * max(k, 0)
    same_vector(selected, largest(accumulated, selected.nnz))


# ---- trimmed --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", NAMES)
def test_selectors_keep_their_promise_on_awkward_inputs(name, dtype):
    accumulated = inputs(dtype)[name]
    for k in SOME_K:
        same_vector(Trimmed().select(accumulated, k, 0), largest(accumulated, k))
        check_promise(accumulated, k, BinarySearch().select(accumulated, k, 0))


@given(dense_tensors(max_size=60), st.integers(0, 80), st.sampled_from([0.001, 0.2, 0.3, 1.0]))
def test_trimmed_is_the_top_of_the_whole_vector(accumulated, k, eps):
    before = accumulated.clone()
    same_vector(Trimmed(eps).select(accumulated, k, 3).check(), largest(before, k))


def test_equal_numbers_have_no_mean_above_them():
    """A rounded mean may exceed equal numbers; the walk's thresholds would then not descend."""
    for value in torch.rand(50, generator=torch.Generator().manual_seed(2)).tolist():
        accumulated = torch.full((SIZE,), value)
        assert Trimmed().select(accumulated, 10, 0).indices.tolist() == list(range(10))


@pytest.mark.parametrize("dtype", FLOATS)
def test_mean_and_maximum_of_several_blocks(dtype):
    accumulated = torch.arange(-100_000, 600_000).double().div(1000).to(dtype)
    mean, most = mean_and_max(accumulated)
    assert mean == pytest.approx(float(accumulated.double().abs().mean()), rel=1e-6)
    assert most == float(accumulated.abs().max())


def walked(accumulated: Tensor, k: int, eps: float) -> int:
    """Follow Algorithm 2; return how many entries reach the first threshold that at least k reach."""
    magnitudes = accumulated.abs()
    mean, most = magnitudes.double().mean(), magnitudes.max().double()
    ratio, nnz = 1 - eps, 0
    while nnz < k:
        nnz = int((magnitudes >= mean + ratio * (most - mean)).sum())
        ratio -= eps
    return nnz


@pytest.mark.parametrize("eps", [0.1, 0.2])
@pytest.mark.parametrize("k", [1, 10, 100])
@pytest.mark.parametrize("name", ["normal", "uniform", "two modes"])
def test_trimmed_sorts_no_more_than_the_survivors_of_the_published_walk(name, k, eps, monkeypatch):
    sorted_among, top = [], kernels.top
    monkeypatch.setattr(kernels, "top", lambda x, k: sorted_among.append(x.numel()) or top(x, k))
    accumulated = inputs(torch.float32)[name]
    survivors = walked(accumulated, k, eps)
    assert Trimmed(eps).select(accumulated, k, 0).nnz == k
    assert sorted_among == ([] if survivors == k else [survivors])  # k of k need no sorting


# ---- by size --------------------------------------------------------------------------------------


@cases(("dense", ()), ("exact", (0, MIB)), ("trimmed", (0, 0)), ("binary-search", (0, 0, 0)))
def test_the_method_selects(name, start):
    policy, accumulated = BySize(*start), noise()
    assert policy.method(4 * SIZE) == name
    selected = policy.select(accumulated, 10, 0)
    if name == "dense":
        assert isinstance(selected, DenseVector) and selected.values is accumulated
    elif name == "binary-search":
        same_vector(selected, BinarySearch().select(accumulated, 10, 0))
    else:
        same_vector(selected, largest(accumulated, 10))


@refuses(
    (partial(Trimmed, 0.0), "eps is 0.0; give a step"),
    (partial(Trimmed, NAN), "eps is nan"),
    (partial(BinarySearch, 0.0), "eps is 0.0; give a width"),
    (partial(BinarySearch, NAN), "eps is nan"),
    (partial(BinarySearch, reuse_period=0), "reuse_period is 0; give at least 1"),
    (partial(BinarySearch, cap=0.5), "cap is 0.5; give a factor >= 1"),
    (partial(BinarySearch, cap=INF), "cap is inf"),
    (partial(BySize, -1), "are -1, -1, 4194304; give bytes that do not descend"),
    (partial(BySize, 10, 5), "are 10, 5, 4194304"),
    (partial(BySize, 10, 20, 15), "are 10, 20, 15"),
)
def test_bad_constants_are_refused(make):
    make()


# ---- binary search ------------------------------------------------------------------------------


@given(dense_tensors(max_size=60), st.integers(0, 80), st.sampled_from([1e-9, 1e-3, 0.5]))
def test_search_keeps_its_promise(accumulated, k, eps):
    before = accumulated.clone()
    check_promise(before, k, BinarySearch(eps).select(accumulated, k, 0))


def bisected(accumulated: Tensor, k: int, eps: float) -> float | None:
    """Follow Algorithm 3; return the threshold, or None if eps ended the search."""
    magnitudes = accumulated.abs()
    mean, most = float(magnitudes.double().mean()), float(magnitudes.max())
    left, right = 0.0, 1.0
    while right - left > eps:
        ratio = left + (right - left) / 2
        threshold = mean + ratio * (most - mean)
        nnz = int((magnitudes >= threshold).sum())
        if k <= nnz <= 2 * k:
            return threshold
        left, right = (left, ratio) if nnz < k else (ratio, right)
    return None


@pytest.mark.parametrize("k", [1, 10, 100])
@pytest.mark.parametrize("name", ["normal", "uniform", "two modes", "halving"])
def test_search_ends_where_the_published_walk_does(name, k):
    accumulated = inputs(torch.float64)[name]
    threshold = bisected(accumulated, k, 1e-3)
    selector = BinarySearch()
    selected = selector.select(accumulated, k, 0)
    if threshold is None:
        assert selected.nnz == k
        return
    key = int(kernels.magnitude_keys(torch.tensor([threshold], dtype=torch.float64)))
    assert abs(selector.state.threshold_key - key) <= 4  # units in the last place of the mean
    expected = (accumulated.abs() >= threshold).nonzero().flatten()
    assert selected.indices.tolist() == expected.tolist()


def test_the_published_walk_ends_regularly_on_ordinary_inputs():
    """Otherwise, the test above would compare only few thresholds."""
    ended = [bisected(inputs(torch.float64)["normal"], k, 1e-3) for k in (1, 10, 100)]
    assert None not in ended
    assert bisected(inputs(torch.float64)["halving"], 100, 1e-3) is None


# ---- its reuse ------------------------------------------------------------------------------------


@pytest.fixture
def searches(monkeypatch):
    """Record every search in a test; each computes the mean and the maximum once."""
    made = []
    monkeypatch.setattr(redsync, "mean_and_max", lambda x: made.append(x) or mean_and_max(x))
    return made


@pytest.mark.parametrize("period", [1, 2, 5])
def test_it_searches_on_one_call_of_a_period(period, searches):
    selector, steps = BinarySearch(reuse_period=period), []
    for step in range(7, 22):  # calls count, not steps
        before = len(searches)
        selector.select(noise(step), 40, step)
        if len(searches) > before:
            steps.append(step - 7)
    assert steps == list(range(0, 15, period))


def settled(threshold: float, served: int = 1, **arguments) -> BinarySearch:
    """Return a selector whose search has found a threshold."""
    selector = BinarySearch(reuse_period=5, **arguments)
    key = int(kernels.magnitude_keys(torch.tensor([threshold])))
    selector.state = BinarySearchState(key, served)
    return selector


@cases((1.0, [1, 3]), (1.5, [0, 1, 3]), (2.0, [0, 1, 3, 4]), (None, [0, 1, 3, 4, 5]))
def test_reuse_takes_at_most_cap_times_k_the_largest_first(cap, expected):
    accumulated = torch.tensor([2.0, 9.0, 0.9, -8.0, 2.0, 1.0])
    selector = settled(1.0, cap=cap)
    assert selector.select(accumulated, 2, 0).indices.tolist() == expected
    assert selector.state == settled(1.0, served=2).state


def test_reuse_searches_afresh_when_nothing_reaches(searches):
    accumulated, selector = noise() / 100, settled(1000.0)
    check_promise(accumulated, 10, selector.select(accumulated, 10, 0))
    assert len(searches) == 1 and selector.state.served == 1
    selector.select(torch.zeros(SIZE), 10, 0)
    assert selector.state == BinarySearchState(None, 1)  # no threshold to reuse
    check_promise(accumulated, 10, selector.select(accumulated, 10, 0))
    assert len(searches) == 3


# ---- one sign at a time -------------------------------------------------------------------------


def of_sign(accumulated, sign) -> SparseVector:
    """Return the entries of one sign, including those that are not finite."""
    vector = SparseVector.from_dense(accumulated)
    return vector.keep((vector.values * sign > 0) | ~vector.values.isfinite())


@given(dense_tensors(max_size=60), st.integers(0, 70), st.integers(0, 9))
def test_both_turns_are_the_exact_top_of_their_sign(accumulated, k, step):
    before, selector = accumulated.clone(), OneSigned(Exact())
    for sign in (1, -1, 1, -1):
        same_vector(selector.select(accumulated, k, step).check(), of_sign(before, sign).top(k))


@given(dense_tensors(max_size=60), st.integers(1, 70))
@cases(lambda: Sampled(0.1, least=1), lambda: Blockwise(block=7), GaussianK)
def test_no_result_mixes_signs(inner, accumulated, k):
    selector = OneSigned(inner())
    for sign in (1, -1, 1):
        values = selector.select(accumulated, k, 0).check().values
        assert bool(((values * sign > 0) | ~values.isfinite()).all())


def test_every_call_takes_its_turn_an_empty_one_too():
    selector, accumulated = OneSigned(Exact()), torch.tensor([1.0, -1.0])
    selector.select(accumulated, 0, 0)
    assert selector.select(accumulated, 1, 0).indices.tolist() == [1]
    selector.select(torch.zeros(0), 1, 0)
    assert selector.select(accumulated, 1, 0).indices.tolist() == [1]


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
    with refused():
        selector.load_state_dict(BROKEN[name])
    assert selector.state == before == OneSignedState(False, Sampled().state)


def test_a_selector_that_reuses_thresholds_is_refused():
    with pytest.raises(ConfigurationError, match="Reused reuses thresholds between steps"):
        OneSigned(Reused())


def test_the_selector_inside_learns_of_the_layers():
    selector = OneSigned(Layered(Exact)).for_layers([3, 4])
    assert isinstance(selector, OneSigned) and selector.method(12) == "Exact"
