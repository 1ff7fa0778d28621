"""DGC's sampled top-k."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparsync import ConfigurationError, SparseVector, kernels
from sparsync.selection.sampled import Sampled, SampledState

from .strategies import FLOATS, dense_tensors, same_vector

NAN = float("nan")
SIZE = 20_000
SELECTORS = [Sampled(), Sampled(0.1, least=1)]

awkward = pytest.mark.parametrize(
    "name", ["constant", "one-hot", "denormal", "all zero", "heavy-tailed", "ties", "NaN"]
)
every_dtype = pytest.mark.parametrize("dtype", FLOATS)


def noise(size: int = SIZE, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def awkward_input(name: str, dtype: torch.dtype) -> Tensor:
    base, limits, size = noise(3000).double(), torch.finfo(dtype), 3000
    broken = base.clone()
    broken[17] = NAN
    inputs = {
        "constant": torch.full((size,), -2.0),
        "one-hot": (torch.arange(size) == 471).double(),
        "denormal": base * limits.smallest_normal / 64,
        "all zero": torch.zeros(size),
        "heavy-tailed": (base.abs().pow(8) * base.sign()).clamp(-limits.max, limits.max),
        "ties": base.round(),
        "NaN": broken,
    }
    return inputs[name].to(dtype)


def nonzero(x: Tensor) -> int:
    return int((x != 0).sum())


def check_sampled(selected: SparseVector, accumulated: Tensor, k: int, enough: float) -> None:
    """So many as promised, and none is left out that is larger than one that came."""
    nnz = nonzero(accumulated)
    assert min(math.ceil(enough * k), nnz) <= selected.nnz <= k
    same_vector(selected.check(), SparseVector.from_dense(accumulated).top(selected.nnz))


@given(
    dense_tensors(max_size=60), st.integers(1, 80), st.sampled_from([0, 0.5, 1]), st.integers(0, 9)
)
def test_sampled_returns_the_largest_between_enough_and_k(accumulated, k, enough, seed):
    selector = Sampled(fraction=0.1, enough=enough, least=1, seed=seed)
    before = accumulated.clone()
    for step in range(3):  # each with another sample
        check_sampled(selector.select(accumulated, k, step), before, k, enough)


@every_dtype
@awkward
@pytest.mark.parametrize("k", [40, 300, 3000, 6000])
def test_sampled_keeps_its_promise_on_awkward_inputs(name, dtype, k):
    accumulated = awkward_input(name, dtype)
    check_sampled(Sampled().select(accumulated, k, 0), accumulated, k, 0.75)


def sampled_passes(accumulated: Tensor, k: int, **arguments) -> list[int]:
    """How many entries were found in each pass over all n."""
    counts, find = [], kernels.find

    def counted(x, key, limit):
        found = find(x, key, limit)
        counts.append(found[0].numel())
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "find", counted)
        Sampled(**arguments).select(accumulated, k, 0)
    return counts


def test_a_sample_of_a_hundredth_tells_the_threshold():
    """16 of the k largest are in the sample: the count is within 1 / sqrt(16), here thrice that."""
    for seed in range(20):
        first, *_ = sampled_passes(noise(), 1600, seed=seed)
        assert first == pytest.approx(1600, rel=0.75)


def test_too_few_lower_the_threshold_and_too_many_are_cut():
    counts = {s: sampled_passes(noise(), 1600, enough=1, seed=s) for s in range(20)}
    cut = [seed for seed, found in counts.items() if found[0] > 1600]
    lowered = [seed for seed, found in counts.items() if found[0] < 1600]
    assert cut and lowered
    for seed in (*cut, *lowered):
        assert Sampled(enough=1, seed=seed).select(noise(), 1600, 0).nnz == 1600
        assert sorted(counts[seed]) == counts[seed] and counts[seed][-1] >= 1600


def test_without_enough_entries_in_the_sample_the_selection_is_exact():
    rare = torch.zeros(SIZE)
    rare[:3] = noise(3)  # in all of 200 sampled, hardly one
    assert sampled_passes(rare, 1600) == []
    assert Sampled().select(rare, 1600, 0).indices.tolist() == [0, 1, 2]
    assert sampled_passes(noise(), 16) == []  # 16 of k = 16 take all n


def test_every_call_samples_anew_and_a_reloaded_selector_goes_on():
    accumulated, selector = noise(), Sampled()
    counts = [selector.select(accumulated, 1600, 0).nnz for _ in range(6)]
    assert len(set(counts)) > 1 and selector.state == SampledState(6)
    again = Sampled()
    assert [again.select(accumulated, 1600, 0).nnz for _ in range(3)] == counts[:3]
    reloaded = Sampled()
    reloaded.load_state_dict(again.state_dict())
    assert [reloaded.select(accumulated, 1600, 0).nnz for _ in range(3)] == counts[3:]
    assert counts != [Sampled(seed=9).select(accumulated, 1600, 0).nnz for _ in range(6)]


@pytest.mark.parametrize("selector", SELECTORS)
@every_dtype
def test_nothing_is_asked_or_there_is_nothing(selector, dtype):
    assert selector.select(torch.ones(9, dtype=dtype), k=0, step=0).nnz == 0
    assert selector.select(torch.ones(0, dtype=dtype), k=5, step=0).size == 0
    assert selector.select(torch.zeros(9, dtype=dtype), k=5, step=0).nnz == 0
    assert selector.select(torch.ones(9, dtype=dtype), k=99, step=0).nnz == 9


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"fraction": 0.0}, "fraction is 0.0; give the part of the elements"),
        ({"fraction": NAN}, "fraction is nan"),
        ({"enough": 1.5}, "enough is 1.5; give the part of k"),
        ({"least": 0}, "least is 0; give at least 1"),
    ],
)
def test_bad_constants_are_refused(arguments, says):
    with pytest.raises(ConfigurationError, match=says):
        Sampled(**arguments)
