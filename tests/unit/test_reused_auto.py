"""``threshold_period="auto"``: exact when the count leaves a band around k, and only then."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsync import ConfigurationError, SparseVector, kernels
from sparsync.presets import oktopk
from sparsync.selection import Reused, ReusedState, reused
from sparsync.selection.base import largest

from .strategies import dense_tensors, same_vector

SIZE, K = 20_000, 200


def key(value: float) -> int:
    return int(kernels.magnitude_keys(torch.tensor([value])))


def auto(cap: float | None = None, **options) -> Reused:
    return Reused("auto", cap, **options)


def about(reaching: int, k: int = 100) -> torch.Tensor:
    """A vector of 10 k elements of which so many are 1 or larger; all differ."""
    values = torch.linspace(0.1, 0.9, 10 * k)
    values[:reaching] = torch.linspace(1.0, 2.0, reaching)
    return values


def with_threshold_1(**options) -> Reused:
    selector = auto(**options)
    selector.state = ReusedState(key(1.0))
    return selector


@pytest.mark.parametrize("reaching", [89, 95, 100, 111])
def test_within_the_band_it_takes_what_reaches_the_threshold(reaching):
    selector = with_threshold_1()
    assert selector.select(about(reaching), k=100, step=64).nnz == reaching
    assert selector.state == ReusedState(key(1.0))


@pytest.mark.parametrize("reaching", [0, 50, 88, 112, 400, 800])
def test_outside_it_takes_exactly_k_and_renews_the_threshold(reaching):
    selector, accumulated = with_threshold_1(), about(reaching)
    selected = selector.select(accumulated, k=100, step=64)
    same_vector(selected, SparseVector.from_dense(accumulated).top(100))
    assert selector.state == ReusedState(key(float(selected.values.abs().min())))


@pytest.fixture
def looks(monkeypatch):
    """The selections among all n that a test makes."""
    made = []
    monkeypatch.setattr(reused, "largest", lambda *given: made.append(given) or largest(*given))
    return made


@pytest.mark.parametrize(("reaching", "near"), [(50, 60), (50, 2000), (150, 0), (100, 2000)])
def test_it_looks_at_all_elements_only_where_it_must(reaching, near, looks):
    """What lies just below the threshold is enough; too much of that is passed over."""
    selector, accumulated = with_threshold_1(), torch.zeros(5000)
    accumulated[:reaching] = torch.linspace(1.0, 2.0, reaching)
    accumulated[1000 : 1000 + near] = torch.linspace(0.9, 0.99, near)
    before = len(looks)
    selected = selector.select(accumulated, k=100, step=1)
    same_vector(selected, SparseVector.from_dense(accumulated).top(100))
    assert len(looks) - before == (1 if (reaching, near) == (50, 2000) else 0)


def test_no_step_deviates_by_more_than_the_band_and_few_are_exact(looks):
    """Error feedback on a gradient that shrinks by a third: a period drifts, the band holds."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.randn(SIZE, generator=generator).exp()
    gradients = [
        0.999**step * scale * torch.randn(SIZE, generator=generator) for step in range(300)
    ]

    def run(selector):
        accumulated, deviations = torch.zeros(SIZE), []
        looks.clear()
        for step, gradient in enumerate(gradients):
            accumulated += gradient
            selected = selector.select(accumulated, K, step)
            accumulated[selected.indices] = 0
            deviations.append(abs(selected.nnz - K) / K)
        return len(looks), sum(deviations) / len(deviations), max(deviations)

    exact, mean, most = run(auto())
    assert most <= 0.11 and mean < 0.06 and exact <= 3
    for period in (4, 32, 64, 128):
        many, drift, _ = run(Reused(period, None))
        assert drift > mean and many >= exact


@given(dense_tensors(), st.integers(1, 40), st.integers(0, 99), st.sampled_from([1.0, 2.0, None]))
def test_it_selects_within_the_band_whatever_came_before(accumulated, k, step, cap):
    selector = auto(cap)
    selector.select(torch.linspace(-3, 3, 50), k, step)
    selected = selector.select(accumulated, k, step + 1).check()
    available = int((accumulated != 0).sum())
    assert min(0.89 * k, available) <= selected.nnz <= (cap or 1.11) * k


def test_nan_is_selected_and_zeros_are_not():
    selector = with_threshold_1()
    assert selector.select(torch.tensor([9.0, float("nan")]), k=1, step=3).values.isnan()
    assert with_threshold_1().select(torch.zeros(9), k=3, step=3).nnz == 0


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Reused("never"), 'threshold_period is never; give at least 1 step, or "auto"'),
        (lambda: auto(band=1.0), r"band is 1.0; give a fraction of k in \[0, 1\)"),
        (
            lambda: oktopk(threshold_period="auto", global_threshold="allgather"),
            "'auto' needs global_threshold='histogram'",
        ),
    ],
)
def test_bad_settings_are_refused(make, says):
    with pytest.raises(ConfigurationError, match=says):
        make()


def test_the_preset_passes_it_on():
    algorithm = oktopk(threshold_period="auto")
    assert algorithm.make_selector().threshold_period == "auto"
    assert algorithm.make_collective().threshold_period == 32  # of a threshold that it does not use
    assert oktopk(threshold_period=16).make_collective().threshold_period == 16
