import importlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsync import ConfigurationError, kernels
from tests.tables import refuses

from .strategies import FLOATS, dense_tensors, same


def by_magnitude(x: torch.Tensor) -> list[int]:
    """Return positions of nonzero elements: NaN first, then by falling magnitude, ties in order."""

    def order(at):
        value = abs(x[at].item())
        return (value == value, -value if value == value else 0.0, at)

    return sorted((at for at in range(len(x)) if x[at] != 0), key=order)


@given(dense_tensors(), st.integers(-1, 40))
def test_top_takes_exactly_min_k_nnz_of_the_largest(x, k):
    positions = kernels.top(x, k)
    expected = by_magnitude(x)[: max(k, 0)]
    assert positions.tolist() == sorted(expected)
    assert positions.dtype == torch.int64


@given(dense_tensors())
def test_keys_order_like_magnitudes(x):
    keys = kernels.magnitude_keys(x)
    largest, _ = kernels.key_range(x.dtype)
    assert all(0 <= key <= largest for key in keys.tolist())
    for a in range(len(x)):
        for b in range(len(x)):
            if x[a].abs() < x[b].abs() or (x[b].isnan() and not x[a].isnan()):
                assert keys[a] < keys[b]
            if x[a].abs() == x[b].abs():
                assert keys[a] == keys[b]


@pytest.mark.parametrize("dtype", FLOATS)
def test_doubling_adds_one_octave_to_the_key(dtype):
    _, octave = kernels.key_range(dtype)
    x = torch.tensor([0.75, 1.0, 3.5], dtype=dtype)
    gained = kernels.magnitude_keys(2 * x).to(torch.int64) - kernels.magnitude_keys(x)
    assert gained.tolist() == [octave] * 3


def test_keys_of_a_strided_view_are_those_of_its_elements():
    x = torch.tensor([1.0, 9.0, 2.0, 9.0])[::2]
    same(kernels.magnitude_keys(x), kernels.magnitude_keys(torch.tensor([1.0, 2.0])))


def test_integers_have_no_magnitude_keys():
    with pytest.raises(ConfigurationError, match=r"torch\.int64.*float32"):
        kernels.magnitude_keys(torch.tensor([1]))


def test_merge_needs_a_stream():
    with pytest.raises(ConfigurationError, match="at least one"):
        kernels.merge([], 4)


@given(dense_tensors(finite=True), st.data())
def test_accumulate_swaps_and_finds_what_reaches_the_key(residual, data):
    gradient = residual.flip(0) * 0.5
    old, total = residual.clone(), residual + gradient
    keys = kernels.magnitude_keys(total).tolist()
    key = data.draw(st.sampled_from([None, -1, 0, 1, *keys, 1 << 70]))
    reaching = [] if key is None else [i for i, mine in enumerate(keys) if mine >= max(key, 1)]
    limit = data.draw(st.integers(0, 40))
    found = kernels.accumulate_(residual, gradient, key, limit)
    same(residual, total)
    same(gradient, old)
    if key is None or len(reaching) > limit:
        assert found is None
    else:
        assert found[0].tolist() == reaching
        same(found[1], total[reaching])


@given(dense_tensors(), st.lists(st.integers(0, 2**31 - 1), max_size=5))
def test_count_from_counts_what_reaches_each_key(values, others):
    keys = kernels.magnitude_keys(values).tolist()
    edges = sorted([*keys[::3], *others])
    counts = kernels.count_from(values, torch.tensor(edges, dtype=torch.int64))
    assert counts.tolist() == [sum(key >= edge for key in keys) for edge in edges]


@pytest.mark.parametrize("dtype", FLOATS)
def test_in_place_kernels_write_through_strided_views(dtype):
    for write in (kernels.subtract_, kernels.scatter_):
        whole = torch.zeros(4, dtype=dtype)
        write(whole[1::2], torch.tensor([1]), torch.tensor([-2.0], dtype=dtype))
        assert whole.abs().tolist() == [0.0, 0.0, 0.0, 2.0]


def test_arguments_by_name_are_those_by_position():
    stream, places = (torch.tensor([1, 2]), torch.tensor([1.0, 3.0])), torch.arange(10)[::2]
    indices, values = kernels.merge(streams=[stream], size=10, within=places)
    assert (indices.tolist(), values.tolist()) == ([2], [3.0])
    whole = torch.zeros(4)
    kernels.scatter_(whole[1::2], indices=torch.tensor([1]), values=torch.tensor([2.0]))
    assert whole.tolist() == [0.0, 0.0, 0.0, 2.0]


@refuses(
    (torch.zeros(3), torch.zeros(4), r"\[3\] x torch.float32.*\[4\] x torch.float32"),
    (torch.zeros(3), torch.zeros(3, dtype=torch.float64), "convert the gradient"),
    (torch.zeros(6)[::2], torch.zeros(3), "1-D and contiguous"),
    (torch.zeros(3), torch.zeros(3, 1), r"gradient \[3, 1\].*1-D"),
)
def test_accumulate_refuses_what_it_cannot_swap(residual, gradient):
    kernels.accumulate_(residual, gradient)


# ---- dealing --------------------------------------------------------------------------------------

sizes = st.integers(0, 300)
world_sizes = st.integers(1, 40)


@given(sizes, world_sizes, st.integers(0, 2**40))
def test_undeal_is_the_inverse_of_deal(size, world_size, start):
    indices = torch.arange(start, start + 3 * size, 3)
    dealt = kernels.deal(indices, world_size)
    assert sorted(dealt.order.tolist()) == list(range(size))
    shares, orders = (torch.split(x, dealt.counts) for x in (dealt.local, dealt.order))
    for owner, (local, order) in enumerate(zip(shares, orders, strict=True)):
        assert torch.equal(kernels.undeal(local, owner, world_size), indices[order])
        assert bool((local.diff() > 0).all()), "order is kept, and no two share an index"


@given(st.integers(0, 100), world_sizes)
def test_every_p_consecutive_elements_have_p_owners(group, world_size):
    indices = torch.arange(group * world_size, (group + 1) * world_size)
    dealt = kernels.deal(indices, world_size)
    assert dealt.counts == [1] * world_size and set(dealt.local.tolist()) == {group}


@pytest.mark.parametrize("works", [True, False])
def test_where_triton_cannot_launch_pytorch_takes_its_place(works, monkeypatch, caplog):
    """Triton compiles its driver with a C compiler at the first launch."""
    backend = importlib.import_module("sparsync.kernels.triton")

    def launch(*arguments, **constants):
        if not works:
            raise RuntimeError("Failed to find C compiler.\nPlease specify one")

    monkeypatch.setattr(backend, "installed", lambda: True)
    monkeypatch.setattr(backend, "_launch", launch)
    here = torch.device("cpu")
    chosen = kernels._triton.__wrapped__
    for _ in range(2):
        assert chosen(here) is (backend if works else None)
    said = [] if works else ["Triton cannot launch kernels on cpu (Failed to find C compiler.), so"]
    assert [record.getMessage()[: len(said[0])] for record in caplog.records] == said
    kernels._warn_that_triton_fails.cache_clear()
