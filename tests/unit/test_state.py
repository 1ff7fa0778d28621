"""Saved state: what does not fit is refused, and then nothing has changed."""

import copy

import pytest
import torch

from sparsync import ConfigurationError, connect
from sparsync.feedback.reducer import Reducer
from sparsync.feedback.state import reducer_state, restore_reducer
from sparsync.presets import oktopk
from sparsync.transports.driver import run
from sparsync.units import plan_units
from sparsync_papers.optimizers import UpdateSpaceSGD


def reducer_after(steps, dtype=torch.float32):
    units = plan_units([("a", torch.zeros(30, dtype=dtype)), ("b", torch.zeros(20, dtype=dtype))])
    reducer = Reducer(connect(), units, oktopk(), density=0.1)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        run(reducer.reduce([torch.randn(50, generator=generator).to(dtype)]))
    return reducer


BROKEN = {
    "a residual of another size": lambda s: s["residual"].update(a=torch.zeros(31)),
    "a residual that is a list": lambda s: s["residual"].update(a=[0.0] * 30),
    "a residual that is missing": lambda s: s["residual"].pop("b"),
    "a step between steps": lambda s: s.update(step=1.5),
    "a negative step": lambda s: s.update(step=-1),
    "no step": lambda s: s.pop("step"),
    "no selectors": lambda s: s.pop("selectors"),
    "another field": lambda s: s["selectors"][0].update(surprise=1),
    "a hostile boundary": lambda s: s["collectives"][0].update(boundaries=["x"]),
    "another algorithm": lambda s: s.update(algorithm="dense"),
    "another rank": lambda s: s.update(rank=3),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(name):
    reducer = reducer_after(2)
    before, broken = copy.deepcopy(reducer_state(reducer)), reducer_state(reducer_after(5))
    BROKEN[name](broken)
    with pytest.raises(ConfigurationError) as caught:
        run(restore_reducer(reducer, broken))
    assert "\n" not in str(caught.value)
    after = reducer_state(reducer)
    assert all(torch.equal(after["residual"][n], before["residual"][n]) for n in "ab")
    assert {**after, "residual": 0} == {**before, "residual": 0}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_16_bit_gradients_lose_nothing_in_the_residual(dtype):
    # 1 + 1/512 is 1 in bfloat16: a residual of that dtype would stop growing
    reducer = Reducer(
        connect(), plan_units([("w", torch.zeros(2, dtype=dtype))]), oktopk(), density=0.5
    )
    delivered = torch.zeros(2, dtype=torch.float64)
    gradient = torch.tensor([1.0, 2.0**-9], dtype=dtype)
    for _ in range(200):
        (average,) = run(reducer.reduce([gradient.clone()]))
        delivered += average.to_dense().double()
    fed = 200 * gradient.double()
    assert torch.allclose(delivered + reducer.residuals[0].value.double(), fed)


def test_an_optimizer_state_without_ours_is_refused():
    optimizer = UpdateSpaceSGD(torch.nn.Linear(2, 1), lr=0.1)
    with pytest.raises(ConfigurationError, match="no 'sparsync' part"):
        optimizer.load_state_dict(torch.optim.SGD([torch.zeros(1)], lr=0.1).state_dict())


def test_parameters_cannot_join_later():
    optimizer = UpdateSpaceSGD(torch.nn.Linear(2, 1), lr=0.1)
    with pytest.raises(ConfigurationError, match="after the model is complete"):
        optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})
