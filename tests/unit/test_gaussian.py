import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparsync import ConfigurationError, kernels
from sparsync.selection.gaussian import GaussianK
from sparsync.testing import cases

from .strategies import dense_tensors, same_vector

INF, NAN = float("inf"), float("nan")
SIZE = 20_000


def noise(size: int = SIZE, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def peaked() -> Tensor:
    """Most mass near zero and a sharp cut: as gradients late in training, narrower than normal."""
    uniform = torch.rand(SIZE, generator=torch.Generator().manual_seed(1)) * 2 - 1
    return uniform.sign() * uniform.abs().clamp(max=0.9) ** 2


def first_trial(accumulated: Tensor, k: int) -> int:
    """How many reach the predicted threshold: with no part of k to exceed, one trial serves."""
    return GaussianK(enough=0.0).select(accumulated, k, 0).nnz


def smallest_key(values: Tensor) -> int:
    return int(kernels.magnitude_keys(values).min())


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1, 0.5])
def test_normal_entries_are_selected_at_their_density(density):
    """The assumption of the method: then it is accurate to a few per cent, without a trial more."""
    k = round(density * SIZE)
    nnz = first_trial(0.3 * noise(), k)
    assert nnz == pytest.approx(k, abs=5 * k**0.5)


@given(dense_tensors(max_size=60), st.integers(1, 80))
def test_it_returns_what_it_promises(accumulated, k):
    """All entries from some magnitude on; more than 3k/4 of them, or all that are not zero."""
    before = accumulated.clone()
    selected = GaussianK().select(accumulated, k, 0).check()
    nnz = int((before != 0).sum())
    assert selected.nnz > 0.75 * k or selected.nnz == min(k, nnz)
    assert bool(
        before[selected.indices].eq(selected.values).logical_or(selected.values.isnan()).all()
    )
    assert int(selected.isfinite().logical_not().sum()) == int(
        before.isfinite().logical_not().sum()
    )
    if selected.nnz > k:  # then no tie was cut
        found, _ = kernels.find(before, smallest_key(selected.values), None)
        assert found.tolist() == selected.indices.tolist()


def test_too_high_a_threshold_is_lowered_just_so_far():
    """Ok-Topk, section 5.4: "gradually scale the predicted threshold ... more than 3k/4"."""
    accumulated, k = peaked(), 200
    selected = GaussianK(enough=0.75, scaling=0.9).select(accumulated, k, 0)
    assert selected.nnz > 0.75 * k
    fine = GaussianK(enough=0.75, scaling=0.999, trials=2000).select(accumulated, k, 0)
    assert 0.75 * k < fine.nnz <= selected.nnz


def test_the_prediction_underestimates_k_where_tails_are_shorter_than_normal():
    """Ok-Topk, section 2: "it usually underestimates the value of k"."""
    narrow = noise().clamp(-2.0, 2.0) + 0.01 * noise(seed=1)
    assert first_trial(narrow, 20) < 5  # of 20: 3.3 deviations lie beyond the cut
    assert GaussianK().select(narrow, 20, 0).nnz > 15


def test_the_sign_of_the_mean_does_not_matter():
    accumulated = noise() + 0.5
    a, b = (GaussianK().select(sign * accumulated, 100, 0) for sign in (1.0, -1.0))
    assert a.indices.tolist() == b.indices.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["constant", "zero", "denormal", "huge", "one peak", "two orders"])
def test_awkward_inputs_end_and_keep_the_promise(name, dtype):
    k, limits = 40, torch.finfo(dtype)
    base = noise(1000)
    inputs = {
        "constant": torch.full((1000,), -2.0),
        "zero": torch.zeros(1000),
        "denormal": base.double() * limits.smallest_normal / 64,
        "huge": base.sign().double() * limits.max * (base.abs().double() / 8).clamp(max=1),
        "one peak": torch.cat([torch.tensor([limits.max], dtype=torch.float64), base[1:].double()]),
        "two orders": torch.logspace(-7, 4, 1000, dtype=torch.float64),
    }
    accumulated = inputs[name].to(dtype)
    selected = GaussianK().select(accumulated, k, 0)
    nnz = int((accumulated != 0).sum())
    assert min(k, nnz) >= min(selected.nnz, k) >= min(31, nnz)
    if name == "constant":
        assert selected.nnz == 1000  # as published: nothing bounds it above
    if name == "one peak":
        assert selected.nnz == k  # no trial came so far down: exact


@pytest.mark.parametrize("trials", [1, 5])
def test_after_the_last_trial_the_selection_is_exact(trials):
    accumulated = torch.tensor([1e30, 3.0, -2.0, 1.0, 0.5, 0.0])
    selected = GaussianK(trials=trials).select(accumulated, 3, 0)
    assert selected.indices.tolist() == [0, 1, 2]


def test_trials_are_bounded():
    passes, find = [], kernels.find

    def counted(*arguments):
        passes.append(arguments)
        return find(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "find", counted)
        GaussianK(trials=7).select(torch.tensor([1e30, 1.0, 1.0, 1e-30]), 3, 0)
    assert len(passes) == 7


@pytest.mark.parametrize("broken", [[NAN], [INF, -INF], [NAN, INF, NAN]])
def test_nan_and_inf_are_selected_and_have_no_part_in_the_threshold(broken):
    sane = noise(1000)
    sane[: len(broken)] = 0
    accumulated = sane.clone()
    accumulated[: len(broken)] = torch.tensor(broken)
    selected = GaussianK().select(accumulated, 100, 0)
    assert int((~selected.isfinite()).sum()) == len(broken)
    # zeros instead of NaN and Inf move mean and deviation by their share of the elements
    assert selected.nnz == pytest.approx(GaussianK().select(sane, 100, 0).nnz + len(broken), abs=4)
    assert GaussianK().select(torch.tensor(broken), 1, 0).nnz == len(broken)


def test_every_contract_case_keeps_the_promise():
    for case in cases():
        for step in range(3):
            accumulated = case.make(0, 2, step)
            before = accumulated.clone()
            selected = GaussianK().select(accumulated, case.k, step).check()
            assert torch.equal(accumulated, before), case.name
            assert torch.equal(selected.values, accumulated[selected.indices]), case.name
            assert bool((selected.values != 0).all()), case.name
            nnz = int((accumulated != 0).sum())
            assert selected.nnz > 0.75 * case.k or selected.nnz == min(case.k, nnz), case.name


def test_it_repeats_itself():
    same_vector(GaussianK().select(peaked(), 50, 0), GaussianK().select(peaked(), 50, 9))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"enough": 1.0}, "enough is 1.0; give the part of k to exceed"),
        ({"enough": float("nan")}, "enough is nan"),
        ({"scaling": 1.0}, "scaling is 1.0; give the factor"),
        ({"scaling": 0.0}, "scaling is 0.0"),
        ({"trials": 0}, "trials is 0; give at least 1"),
    ],
)
def test_bad_constants_are_refused(arguments, says):
    with pytest.raises(ConfigurationError, match=says):
        GaussianK(**arguments)
