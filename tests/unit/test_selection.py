"""Test selectors beyond the contracts; RedSync's have a separate file."""

import math
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparsync import SparseVector, kernels
from sparsync.published.baselines import GaussianK
from sparsync.published.oktopk import Reused, ReusedState, oktopk
from sparsync.published.oktopk import reuse as reused
from sparsync.selection import Blockwise, Exact, Sampled
from sparsync.selection.sampled import SampledState
from sparsync.selection.selector import largest
from sparsync.units import plan_units
from tests.tables import cases, refuses

from .selection_inputs import INF, NAMES, NAN, inputs
from .strategies import FLOATS, dense_tensors, same, same_vector

SIZE, K = 20_000, 200


def noise(size: int = SIZE, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def key(value: float) -> int:
    return int(kernels.magnitude_keys(torch.tensor([value])))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", NAMES)
def test_selectors_keep_their_promise_on_awkward_inputs(name, dtype):
    accumulated = inputs(dtype)[name]
    for k in (40, 300, 2000):
        check_sampled(Sampled().select(accumulated, k, 0), accumulated, k, 0.75)
        selected = GaussianK().select(accumulated, k, 0).check()
        assert selected.nnz >= min(math.floor(0.75 * k) + 1, int((accumulated != 0).sum()))
        same_vector(Exact().select(accumulated, k, 0), SparseVector.from_dense(accumulated).top(k))


@refuses(
    (Reused, {"threshold_period": 0}, "threshold_period is 0; give at least 1 step"),
    (Reused, {"threshold_period": "never"}, 'is never; give at least 1 step, or "auto"'),
    (Reused, {"cap": 0.0}, "cap is 0.0; give a factor > 0"),
    (Reused, {"cap": NAN}, "cap is nan"),
    (Reused, {"floor": 1.5}, "floor is 1.5; give a factor of k"),
    (oktopk, {"threshold_period": "auto", "global_threshold": "allgather"}, "'histogram'"),
    (GaussianK, {"enough": 1.0}, "enough is 1.0; give a fraction of k"),
    (GaussianK, {"enough": NAN}, "enough is nan"),
    (GaussianK, {"scaling": 1.0}, "scaling is 1.0; give a factor"),
    (GaussianK, {"scaling": 0.0}, "scaling is 0.0"),
    (GaussianK, {"trials": 0}, "trials is 0; give at least 1"),
    (Blockwise, {"block": 0}, "block is 0; give at least 1 element"),
    (Blockwise, {"entries": 0}, "entries is 0; give 1 to 512 per block, or None"),
    (Blockwise, {"entries": 9, "block": 8}, "entries is 9; give 1 to 8"),
    (Sampled, {"fraction": 0.0}, "fraction is 0.0; give a fraction of the elements"),
    (Sampled, {"fraction": NAN}, "fraction is nan"),
    (Sampled, {"enough": 1.5}, "enough is 1.5; give a fraction of k"),
    (Sampled, {"least": 0}, "least is 0; give at least 1"),
)
def test_bad_constants_are_refused(make, arguments):
    make(**arguments)


# ---- everything, exact, reused ------------------------------------------------------------------


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


@cases((1.0, [1, 3]), (1.5, [0, 1, 3]), (None, [0, 1, 3, 4]), (0.4, [1]))
def test_reused_takes_at_most_cap_times_k_the_largest_first(cap, expected):
    selector = Reused(threshold_period=32, cap=cap)
    selector.select(torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0]), k=2, step=0)
    selected = selector.select(torch.tensor([2.0, 9.0, 0.9, -8.0, 2.0]), k=2, step=1)
    assert selected.indices.tolist() == expected


@cases(
    # no element reaches 3, fewer than the floor: exact again
    (0.5, [1.0, 0.5, 0.2, 0.1], [0, 1], 0.5),
    (0.5, [3.0, 0.5, 0.2, 0.1], [0], 3.0),  # 1 of 2 is not below the floor
    (1.0, [3.0, 0.5, 0.2, 0.1], [0, 1], 0.5),
    (None, [1.0, 0.5, 0.2, 0.1], [], 3.0),  # as published
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


# ---- reused, "auto" -----------------------------------------------------------------------------


def auto(cap: float | None = None, **options) -> Reused:
    return Reused("auto", cap, **options)


def about(reaching: int, k: int = 100) -> torch.Tensor:
    """Return a vector of 10 k distinct elements, ``reaching`` of which are at least 1."""
    values = torch.linspace(0.1, 0.9, 10 * k)
    values[:reaching] = torch.linspace(1.0, 2.0, reaching)
    return values


def with_threshold_1(**options) -> Reused:
    selector = auto(**options)
    selector.state = ReusedState(key(1.0))
    return selector


@pytest.mark.parametrize("reaching", [89, 95, 100, 111])
def test_auto_takes_within_the_band_what_reaches_the_threshold(reaching):
    selector = with_threshold_1()
    assert selector.select(about(reaching), k=100, step=64).nnz == reaching
    assert selector.state == ReusedState(key(1.0))


@pytest.mark.parametrize("reaching", [0, 50, 88, 112, 400, 800])
def test_auto_takes_exactly_k_outside_the_band_and_renews_the_threshold(reaching):
    selector, accumulated = with_threshold_1(), about(reaching)
    selected = selector.select(accumulated, k=100, step=64)
    same_vector(selected, SparseVector.from_dense(accumulated).top(100))
    assert selector.state == ReusedState(key(float(selected.values.abs().min())))


@pytest.fixture
def looks(monkeypatch):
    """Record each selection among all n elements that a test makes."""
    made = []
    monkeypatch.setattr(reused, "largest", lambda *given: made.append(given) or largest(*given))
    return made


@pytest.mark.parametrize(("reaching", "near"), [(50, 60), (50, 2000), (150, 0), (100, 2000)])
def test_auto_looks_at_all_elements_only_where_it_must(reaching, near, looks):
    """Entries just below the threshold suffice, unless there are too many of them."""
    selector, accumulated = with_threshold_1(), torch.zeros(5000)
    accumulated[:reaching] = torch.linspace(1.0, 2.0, reaching)
    accumulated[1000 : 1000 + near] = torch.linspace(0.9, 0.99, near)
    before = len(looks)
    selected = selector.select(accumulated, k=100, step=1)
    same_vector(selected, SparseVector.from_dense(accumulated).top(100))
    assert len(looks) - before == (1 if (reaching, near) == (50, 2000) else 0)


def test_no_step_deviates_by_more_than_the_band_and_few_are_exact(looks):
    """The gradient shrinks by a third under error feedback; a period drifts, but the band holds."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.randn(SIZE, generator=generator).exp()
    drawn = (torch.randn(SIZE, generator=generator) for _ in range(300))
    gradients = [0.999**step * scale * one for step, one in enumerate(drawn)]

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
def test_auto_selects_within_the_band_whatever_came_before(accumulated, k, step, cap):
    selector = auto(cap)
    selector.select(torch.linspace(-3, 3, 50), k, step)
    selected = selector.select(accumulated, k, step + 1).check()
    available = int((accumulated != 0).sum())
    assert min(0.89 * k, available) <= selected.nnz <= (cap or 1.11) * k


# ---- gaussian -----------------------------------------------------------------------------------


def peaked() -> Tensor:
    """Return values mostly near zero and never large, like late gradients and unlike a normal."""
    uniform = torch.rand(SIZE, generator=torch.Generator().manual_seed(1)) * 2 - 1
    return uniform.sign() * uniform.abs().clamp(max=0.9) ** 2


def first_trial(accumulated: Tensor, k: int) -> int:
    """Return how many entries reach the threshold that is predicted in a single trial."""
    return GaussianK(enough=0.0).select(accumulated, k, 0).nnz


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1, 0.5])
def test_normal_entries_are_selected_at_their_density(density):
    """If its assumption holds, the method is accurate to a few per cent without further trials."""
    k = round(density * SIZE)
    assert first_trial(0.3 * noise(), k) == pytest.approx(k, abs=5 * k**0.5)


@given(dense_tensors(max_size=60), st.integers(1, 80))
def test_gaussian_returns_what_it_promises(accumulated, k):
    """All entries above some magnitude are selected: more than 3k/4, or all nonzero ones."""
    before = accumulated.clone()
    selected = GaussianK().select(accumulated, k, 0).check()
    nnz = int((before != 0).sum())
    assert selected.nnz > 0.75 * k or selected.nnz == min(k, nnz)
    same(selected.values, before[selected.indices])
    assert int((~selected.isfinite()).sum()) == int((~before.isfinite()).sum())
    if selected.nnz > k:  # then no tie was cut
        found, _ = kernels.find(before, int(kernels.magnitude_keys(selected.values).min()), None)
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


def test_trials_of_gaussian_are_bounded():
    vector = torch.tensor([1e30, 3.0, -2.0, 1.0, 0.0])
    with mock.patch.object(kernels, "find", wraps=kernels.find) as find:
        selected = GaussianK(trials=7).select(vector, 3, 0)
    assert find.call_count == 7 and selected.indices.tolist() == [0, 1, 2]  # then it is exact


@pytest.mark.parametrize("broken", [[NAN], [INF, -INF], [NAN, INF, NAN]])
def test_nan_and_inf_are_selected_by_gaussian_and_have_no_part_in_the_threshold(broken):
    sane = noise(1000)
    sane[: len(broken)] = 0
    accumulated = sane.clone()
    accumulated[: len(broken)] = torch.tensor(broken)
    selected = GaussianK().select(accumulated, 100, 0)
    assert int((~selected.isfinite()).sum()) == len(broken)
    # replacing NaN and Inf by zeros changes mean and deviation in proportion to their number
    assert selected.nnz == pytest.approx(GaussianK().select(sane, 100, 0).nnz + len(broken), abs=4)
    assert GaussianK().select(torch.tensor(broken), 1, 0).nnz == len(broken)


# ---- blockwise ----------------------------------------------------------------------------------


def block_by_block(accumulated, entries: int, block: int) -> SparseVector:
    """Return the result of the simple version, which takes the exact top-k of each block in turn."""
    size, parts = accumulated.numel(), []
    for start in range(0, size, block):
        piece = accumulated[start : start + block]
        part = piece.numel() / block
        of_this = entries if part == 1 else max(math.floor(entries * part + 0.5), 1)
        top = SparseVector.from_dense(piece).top(of_this)
        parts.append(top.embed(start, size))
    return SparseVector.join(parts) if parts else SparseVector.empty(size, accumulated)


@given(dense_tensors(max_size=60), st.integers(1, 9), st.data(), st.integers(0, 3))
def test_every_block_gives_its_largest(accumulated, block, data, step):
    entries = data.draw(st.integers(1, block))
    before = accumulated.clone()
    selected = Blockwise(entries, block).select(accumulated, 5, step).check()
    same_vector(selected, block_by_block(before, entries, block))


@given(dense_tensors(max_size=60), st.integers(1, 9), st.integers(1, 99))
def test_without_entries_a_block_gives_its_part_of_k(accumulated, block, k):
    size = accumulated.numel()
    selected = Blockwise(block=block).select(accumulated, k, 0)
    if size:
        whole = [math.floor(e * size / block + 0.5) >= min(k, size) for e in range(1, block + 1)]
        same_vector(selected, block_by_block(accumulated, 1 + whole.index(True), block))
    assert selected.nnz <= k + -(-size // block)


@pytest.mark.parametrize("block", [512, 500])
@pytest.mark.parametrize("entries", [1, 4, 16])
@pytest.mark.parametrize("size", [3, 256, 512, 5_000, 20_000, 1_000_448, 1_000_700, 1_000_720])
def test_a_density_of_whole_entries_per_block_selects_as_many(size, entries, block):
    """ "The 4 largest of 512", although k, the part of the whole layer, is rounded."""
    (unit,) = plan_units([("w", torch.empty(size, device="meta"))])
    k = unit.entries(entries / block)
    accumulated = torch.rand(size, generator=torch.Generator().manual_seed(0)) + 1
    selected = Blockwise(block=block).select(accumulated, k, 0)
    counts = torch.bincount(selected.indices // block)
    assert counts[: size // block].unique().tolist() == [entries] * (size >= block)
    assert k <= selected.nnz <= k + 1


# ---- sampled ------------------------------------------------------------------------------------


def check_sampled(selected: SparseVector, accumulated: Tensor, k: int, enough: float) -> None:
    """Check that the promised number of entries was selected, and no larger entry omitted."""
    nnz = int((accumulated != 0).sum())
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


def test_without_enough_entries_in_the_sample_the_selection_is_exact():
    rare = torch.zeros(SIZE)
    rare[:3] = noise(3)  # in a sample of 200, hardly one of them
    assert Sampled().select(rare, 1600, 0).indices.tolist() == [0, 1, 2]
    same_vector(Sampled().select(noise(), 16, 0), SparseVector.from_dense(noise()).top(16))


def test_every_call_draws_another_sample():
    accumulated, selector = noise(), Sampled()
    counts = [selector.select(accumulated, 1600, 0).nnz for _ in range(6)]
    assert len(set(counts)) > 1 and selector.state == SampledState(6)
    again = Sampled()
    assert [again.select(accumulated, 1600, 0).nnz for _ in range(6)] == counts
    assert counts != [Sampled(seed=9).select(accumulated, 1600, 0).nnz for _ in range(6)]
