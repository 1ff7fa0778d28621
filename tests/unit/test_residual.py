import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsync import DenseVector, SparseVector
from sparsync.residual import Residual


def residual(size: int) -> Residual:
    return Residual(size, torch.float32, torch.device("cpu"))


steps = st.lists(
    st.tuples(
        st.lists(st.integers(-9, 9), min_size=6, max_size=6),  # gradient
        st.lists(st.booleans(), min_size=6, max_size=6),  # which entries are delivered
        st.booleans(),  # whether the step is refused
    ),
    max_size=6,
)


@given(steps)
def test_nothing_is_lost_over_any_steps_refused_ones_among_them(steps):
    kept, given_in, given_out = residual(6), torch.zeros(6), torch.zeros(6)
    for gradient, mask, refused in steps:
        kept.accumulate(0, torch.tensor(gradient, dtype=torch.float32))
        if refused:
            continue
        accumulated = kept.accumulated.clone()
        delivered = SparseVector.from_dense(accumulated).restrict(
            torch.tensor(mask).nonzero()[:, 0]
        )
        kept.retain(delivered)
        given_in += torch.tensor(gradient)
        given_out += delivered.to_dense()
        assert torch.equal(kept.value, accumulated - delivered.to_dense())
    held = torch.zeros(6) if kept.value is None else kept.value
    assert torch.equal(given_in, given_out + held)


def test_pieces_accumulate_in_any_order():
    kept = residual(4)
    kept.accumulate(2, torch.tensor([3.0, 4.0]))
    kept.accumulate(0, torch.tensor([1.0, 2.0]))
    assert kept.accumulated.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_a_refused_step_leaves_no_trace():
    kept = residual(2)
    kept.accumulate(0, torch.tensor([1.0, 2.0]))
    kept.retain(SparseVector.empty(2, kept.accumulated))
    kept.accumulate(0, torch.tensor([float("nan"), float("inf")]))
    assert kept.value.tolist() == [1.0, 2.0]
    kept.accumulate(0, torch.tensor([1.0, 1.0]))
    assert kept.accumulated.tolist() == [2.0, 3.0]


def test_what_was_delivered_without_being_selected_is_owed():
    """An owner may deliver entries that it never selected: they turn negative, none is lost."""
    kept = residual(2)
    kept.accumulate(0, torch.tensor([1.0, 0.0]))
    kept.retain(SparseVector(torch.tensor([1]), torch.tensor([5.0]), 2))
    assert kept.value.tolist() == [1.0, -5.0]


def test_the_two_buffers_take_turns():
    kept = residual(3)
    kept.accumulate(0, torch.ones(3))
    first = kept.accumulated
    kept.retain(SparseVector.empty(3, first))
    second = kept.accumulated
    assert kept.value is first and second is not first
    kept.accumulate(0, torch.ones(3))
    kept.retain(SparseVector.empty(3, first))
    assert kept.value is second and kept.accumulated is first


def test_delivering_everything_keeps_no_residual():
    kept = residual(2)
    kept.accumulate(0, torch.tensor([1.0, 2.0]))
    kept.retain(DenseVector(kept.accumulated))
    assert kept.value is None
    kept.accumulate(0, torch.tensor([3.0, 4.0]))
    assert kept.accumulated.tolist() == [3.0, 4.0]


def test_a_rounded_dense_delivery_keeps_the_rounding_error():
    kept = residual(2)
    kept.accumulate(0, torch.tensor([1.25, 2.0]))
    kept.retain(DenseVector(torch.tensor([1.0, 2.0])))
    assert kept.value.tolist() == [0.25, 0.0]
