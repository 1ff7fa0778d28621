"""Threshold binary search, and the reuse of its threshold."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparsync import kernels
from sparsync.selection import redsync
from sparsync.selection.base import reaching
from sparsync.selection.redsync import BinarySearch, BinarySearchState, mean_and_max

from .redsync_inputs import NAMES, NAN, SIZE, SOME_K, check_promise, inputs, noise
from .strategies import FLOATS, dense_tensors, same_vector


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", NAMES)
def test_search_keeps_its_promise_on_awkward_inputs(name, dtype):
    accumulated = inputs(dtype)[name]
    for k in SOME_K:
        check_promise(accumulated, k, BinarySearch().select(accumulated, k, 0))


@given(dense_tensors(max_size=60), st.integers(0, 80), st.sampled_from([1e-9, 1e-3, 0.5]))
def test_search_keeps_its_promise(accumulated, k, eps):
    before = accumulated.clone()
    selected = BinarySearch(eps).select(accumulated, k, 0)
    check_promise(before, k, selected)


def bisected(accumulated: Tensor, k: int, eps: float) -> float | None:
    """Algorithm 3 as its text means it: the threshold; None where eps ended the search."""
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
    assert (
        selected.indices.tolist() == (accumulated.abs() >= threshold).nonzero().flatten().tolist()
    )


def test_the_published_walk_ends_regularly_on_ordinary_inputs():
    """Else the test above would compare little."""
    ended = [bisected(inputs(torch.float64)["normal"], k, 1e-3) for k in (1, 10, 100)]
    assert None not in ended
    assert bisected(inputs(torch.float64)["halving"], 100, 1e-3) is None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("eps", "trials"), [(0.5, 1), (1e-3, 10), (1e-9, 30)])
def test_trials_are_bounded(name, eps, trials, monkeypatch):
    passes, find = [], kernels.find
    monkeypatch.setattr(kernels, "find", lambda *given: passes.append(given) or find(*given))
    for k in (1, 100, SIZE):
        passes.clear()
        BinarySearch(eps).select(inputs(torch.float32)[name], k, 0)
        assert len(passes) <= trials


# ---- its reuse ------------------------------------------------------------------------------------


@pytest.fixture
def searches(monkeypatch):
    """Every search that a test makes: each looks at mean and maximum once."""
    made = []
    monkeypatch.setattr(redsync, "mean_and_max", lambda x: made.append(x) or mean_and_max(x))
    return made


@pytest.mark.parametrize("period", [1, 2, 5])
def test_it_searches_on_one_call_of_a_period(period, searches):
    selector, steps = BinarySearch(reuse_period=period), []
    for step in range(7, 22):  # the count is by calls, whatever the step
        before = len(searches)
        collect = selector.collect_from(40, step, torch.float32)
        selector.select(noise(step), 40, step)
        if len(searches) > before:
            steps.append(step - 7)
        assert (collect is None) == (len(searches) > before)
    assert steps == list(range(0, 15, period))


def settled(threshold: float, served: int = 1, **arguments) -> BinarySearch:
    """A selector that has searched and ended at a threshold."""
    selector = BinarySearch(reuse_period=5, **arguments)
    key = int(kernels.magnitude_keys(torch.tensor([threshold])))
    selector.state = BinarySearchState(key, served)
    return selector


@pytest.mark.parametrize(
    ("cap", "expected"),
    [(1.0, [1, 3]), (1.5, [0, 1, 3]), (2.0, [0, 1, 3, 4]), (None, [0, 1, 3, 4, 5])],
)
def test_reuse_takes_at_most_cap_times_k_the_largest_first(cap, expected):
    accumulated = torch.tensor([2.0, 9.0, 0.9, -8.0, 2.0, 1.0])
    selector = settled(1.0, cap=cap)
    assert selector.select(accumulated, 2, 0).indices.tolist() == expected
    assert selector.state == settled(1.0, served=2).state


def test_reuse_takes_fewer_than_k_where_fewer_reach():
    assert settled(1.0).select(torch.tensor([0.5, 9.0, 0.9]), 2, 0).indices.tolist() == [1]


def test_reuse_searches_afresh_when_nothing_reaches(searches):
    accumulated, selector = noise() / 100, settled(1000.0)
    check_promise(accumulated, 10, selector.select(accumulated, 10, 0))
    assert len(searches) == 1 and selector.state.served == 1
    selector.select(torch.zeros(SIZE), 10, 0)
    assert selector.state == BinarySearchState(None, 1)  # no threshold to reuse
    check_promise(accumulated, 10, selector.select(accumulated, 10, 0))
    assert len(searches) == 3


@given(dense_tensors(max_size=60, dtype=torch.float32), st.integers(0, 20), st.booleans())
def test_reuse_keeps_its_cap_and_what_was_collected_changes_nothing(accumulated, k, capped):
    alone, other = (settled(0.5, cap=1.5 if capped else None) for _ in range(2))
    collect = other.collect_from(k, 0, torch.float32)
    found = collect and reaching(accumulated, *collect)
    selected = alone.select(accumulated, k, 0)
    same_vector(other.select(accumulated, k, 0, found), selected)
    assert other.state == alone.state
    if alone.state.served == 2:  # it did reuse
        expected = int((kernels.magnitude_keys(accumulated) >= alone.state.threshold_key).sum())
        assert selected.nnz == (min(expected, math.floor(1.5 * k)) if capped else expected)


def test_asking_for_nothing_leaves_the_count():
    selector = settled(0.5)
    assert selector.collect_from(0, 0, torch.float32) is None
    assert selector.select(noise(), 0, 0).nnz == selector.select(torch.ones(0), 5, 0).nnz == 0
    assert selector.state.served == 1


def test_nan_is_selected_on_every_call():
    selector, broken = BinarySearch(reuse_period=5), noise()
    broken[17] = NAN
    for step in range(6):
        assert 17 in selector.select(broken, 5, step).indices.tolist()
