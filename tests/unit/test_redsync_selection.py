"""RedSync's trimmed top-k and size policy; what all of its selectors have in common."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparsync import ConfigurationError, DenseVector, SparseVector, kernels
from sparsync.selection.base import reaching
from sparsync.selection.redsync import BinarySearch, BySize, Trimmed, mean_and_max

from .redsync_inputs import INF, NAMES, NAN, SIZE, SOME_K, inputs, largest, noise
from .strategies import FLOATS, dense_tensors, same_vector

KIB, MIB = 2**10, 2**20

# ---- trimmed --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", NAMES)
def test_trimmed_is_the_top_of_awkward_inputs(name, dtype):
    accumulated = inputs(dtype)[name]
    for k in SOME_K:
        same_vector(Trimmed().select(accumulated, k, 0), largest(accumulated, k))


@given(dense_tensors(max_size=60), st.integers(0, 80), st.sampled_from([0.001, 0.2, 0.3, 1.0]))
def test_trimmed_is_the_top_of_the_whole_vector(accumulated, k, eps):
    before = accumulated.clone()
    same_vector(Trimmed(eps).select(accumulated, k, 3).check(), largest(before, k))


def test_equal_numbers_have_no_mean_above_them():
    """Their rounded sum may: then the thresholds of the walk would not descend."""
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
    """Algorithm 2 as its text means it: how many survive the first threshold that k reach."""
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


def test_sizes_of_section_5_4():
    policy = BySize()
    assert [policy.method(size) for size in (0, 128 * KIB - 1)] == ["dense", "dense"]
    assert [policy.method(size) for size in (128 * KIB, 4 * MIB - 1)] == ["trimmed", "trimmed"]
    assert policy.method(4 * MIB) == "binary-search"


@pytest.mark.parametrize(
    ("name", "start"),
    [("dense", ()), ("exact", (0, MIB)), ("trimmed", (0, 0)), ("binary-search", (0, 0, 0))],
)
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


def test_bytes_count_not_elements():
    policy = BySize(exact_from=4 * SIZE)
    assert isinstance(policy.select(noise().half(), 10, 0), DenseVector)
    assert isinstance(policy.select(noise(), 10, 0), SparseVector)


def test_what_was_collected_is_not_looked_for_again(monkeypatch):
    policy, accumulated = BySize(0, 0, 0), noise()
    policy.select(accumulated, 10, 0)
    found = reaching(accumulated, *policy.collect_from(10, 1, torch.float32))
    monkeypatch.delattr(kernels, "find")
    assert policy.select(accumulated, 10, 1, found).indices.tolist() == found.indices.tolist()


@pytest.mark.parametrize("make", [BinarySearch, partial(BySize, 0, 0, 0)])
def test_saved_state_goes_on_as_if_uninterrupted(make):
    selector = make(reuse_period=5)
    for step in range(3):
        selector.select(noise(step), 40, step)
    assert selector.state.served == 3
    other = make(reuse_period=5)
    other.load_state_dict(selector.state_dict())
    assert other.state == selector.state
    for step in range(3, 8):
        asked = [s.collect_from(40, step, torch.float32) for s in (other, selector)]
        assert asked[0] == asked[1]
        same_vector(other.select(noise(step), 40, step), selector.select(noise(step), 40, step))


# ---- all ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (partial(Trimmed, 0.0), "eps is 0.0; give the step"),
        (partial(Trimmed, NAN), "eps is nan"),
        (partial(BinarySearch, 0.0), "eps is 0.0; give a width"),
        (partial(BinarySearch, NAN), "eps is nan"),
        (partial(BinarySearch, reuse_period=0), "reuse_period is 0; give at least 1"),
        (partial(BinarySearch, cap=0.5), "cap is 0.5; give a factor >= 1"),
        (partial(BinarySearch, cap=INF), "cap is inf"),
        (partial(BySize, -1), "are -1, -1, 4194304; give bytes that do not descend"),
        (partial(BySize, 10, 5), "are 10, 5, 4194304"),
        (partial(BySize, 10, 20, 15), "are 10, 20, 15"),
    ],
)
def test_bad_constants_are_refused(make, says):
    with pytest.raises(ConfigurationError, match=says):
        make()
