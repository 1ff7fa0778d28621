import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsync import DenseVector, SparseVector, kernels
from sparsync.feedback.residual import Residual


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
        before = kept.value if kept.value is None else kept.value.clone()
        given_gradient = torch.tensor(gradient, dtype=torch.float32)
        kept.accumulate(0, given_gradient)
        if refused:
            kept.restore()
            assert not given_gradient.any()
            assert (kept.value is None) == (before is None)
            assert before is None or torch.equal(kept.value, before)
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


def test_a_refused_step_leaves_no_trace():
    kept = residual(3)
    kept.accumulate(0, torch.tensor([1.0, 1e-30, 2.0]))
    kept.retain(SparseVector.empty(3, kept.accumulated))
    kept.accumulate(2, torch.tensor([float("inf")]))
    kept.accumulate(0, torch.tensor([float("nan"), 1.0]))  # 1 + 1e-30 - 1 is not 1e-30
    kept.restore()
    assert kept.value.tolist() == torch.tensor([1.0, 1e-30, 2.0]).tolist()
    kept.accumulate(0, torch.tensor([1.0, 1.0, 1.0]))
    assert kept.accumulated.tolist() == [2.0, 1.0, 3.0]


def test_16_bit_gradients_are_undone_exactly():
    kept = Residual(2, torch.bfloat16, torch.device("cpu"))
    kept.accumulate(0, torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    kept.retain(SparseVector(torch.tensor([0]), torch.tensor([0.001]), 2))
    before = kept.value.clone()
    kept.accumulate(0, torch.tensor([3.0, 4.0], dtype=torch.bfloat16))
    assert kept.accumulated.dtype == torch.float32
    kept.restore()
    assert torch.equal(kept.value, before)


def test_what_was_asked_for_is_collected_in_pieces():
    kept = residual(5)
    kept.accumulate(0, torch.tensor([1.0, 0.0, 0.0, 0.0, 5.0]))
    kept.retain(SparseVector.empty(5, kept.accumulated))
    two, three = kernels.magnitude_keys(torch.tensor([2.0, 3.0])).tolist()
    kept.accumulate(3, torch.tensor([3.0, 0.0]), two, 2)
    kept.accumulate(0, torch.tensor([1.0, 1.0, 0.0]), two, 2)
    found = kept.collected().check()
    assert (found.indices.tolist(), found.values.tolist()) == ([0, 3, 4], [2.0, 3.0, 5.0])
    assert kept.collected(three).indices.tolist() == [3, 4]
    assert kept.collected(three, 1) is kept.collected(two, 2) is None, "more than the limit"
    kept.restore()
    kept.accumulate(0, torch.full((5,), 9.0), two, 2)
    assert kept.collected() is None, "more than the limit of a piece"


def test_delivering_everything_keeps_no_residual():
    kept = residual(2)
    kept.accumulate(0, torch.tensor([1.0, 2.0]))
    kept.retain(DenseVector(kept.accumulated))
    assert kept.value is None
    kept.accumulate(0, torch.tensor([3.0, 4.0]))
    assert kept.accumulated.tolist() == [3.0, 4.0]
