"""Adam where updates are exchanged: against torch's optimizers, and against itself."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from sparsync import LocalAdamW, LocalUpdates
from sparsync.errors import ConfigurationError, NonFiniteGradientError
from sparsync_papers.optimizers import UpdateSpaceAdamW

from .small_training import STEPS, backward, flat, model, trained


@pytest.mark.parametrize("algorithm", ["dense", "signs", "allgather", "budgeted", "oktopk"])
def test_nothing_is_lost_on_one_rank(algorithm):
    """The rank's own weights are those of training alone: what is not delivered stays in them."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    local = LocalUpdates(net, algorithm, density=0.1)
    for step in range(STEPS):
        backward(net, step)
        optimizer.step()
        local.step()
        with local.shared():
            common = flat(net)
        kept = local.reducer.residuals[0].value
        if local.since == 0:
            missing = torch.zeros_like(common) if kept is None else kept
            torch.testing.assert_close(flat(net), common + missing)
    alone = trained(lambda net: torch.optim.SGD(net.parameters(), lr=0.05))
    torch.testing.assert_close(flat(net), alone, rtol=1e-3, atol=1e-4)
    own = flat(net)
    local.finish()
    torch.testing.assert_close(flat(net), own)
    with local.shared():
        torch.testing.assert_close(flat(net), own)


def test_without_a_flush_the_shared_weights_stay():
    net = model()
    local, optimizer = LocalUpdates(net, period=2), torch.optim.SGD(net.parameters(), lr=0.05)
    for step in range(5):
        backward(net, step)
        optimizer.step()
        local.step()
    with local.shared():
        common = flat(net)
    assert not torch.equal(flat(net), common)
    local.finish(flush=False)
    assert torch.equal(flat(net), common)


@pytest.mark.parametrize(("density", "period"), [(0.01, 2), (0.001, 18), (0.1, 1), (1.0, 1)])
def test_the_period_makes_up_for_sending_every_element(density, period):
    local = LocalUpdates(model(), density=density)
    assert local.period == period
    sent_per_step = (1 + 32 / 256) / 64 / period  # in words of pairs per element
    assert sent_per_step <= density


def test_the_period_doubles_while_warming_up():
    net = model()
    local = LocalUpdates(net, period=8, warmup_steps=16)
    assert [local.period_at(step) for step in range(0, 20, 2)] == [1, 1, 2, 2, 4, 4, 8, 8, 8, 8]
    exchanged = []
    for step in range(33):
        before = local.reducer.step
        local.step()
        if local.reducer.step > before:
            exchanged.append(step)
    assert exchanged == [0, 1, 2, 3, 5, 7, 11, 19, 27]


def test_a_saved_state_continues_bit_for_bit_within_a_period():
    def make(net):
        optimizer = LocalAdamW(net.parameters(), 4, lr=0.01)
        return optimizer, LocalUpdates(net, period=4)

    through = model()
    optimizer, local = make(through)
    for step in range(22):
        backward(through, step)
        optimizer.step()
        local.step()
        if step == 9:  # two steps into a period
            saved = {
                "model": {k: v.clone() for k, v in through.state_dict().items()},
                "optimizer": torch.optim.Optimizer.state_dict(optimizer),
                "local": local.state_dict(),
            }
            saved = _copied(saved)
    resumed = model()
    resumed.load_state_dict(saved["model"])
    optimizer, second = make(resumed)
    optimizer.load_state_dict(saved["optimizer"])
    second.load_state_dict(saved["local"])
    for step in range(10, 22):
        backward(resumed, step)
        optimizer.step()
        second.step()
    assert torch.equal(flat(resumed), flat(through))
    local.finish(), second.finish()
    assert torch.equal(flat(resumed), flat(through))


def _copied(value, path="/saved.pt"):
    """Pass a value through a file, as a user would: it must load under ``weights_only``."""
    import io

    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_weights_that_broke_return_to_the_last_exchange(nonfinite):
    net = model()
    local = LocalUpdates(net, "allgather", density=0.1, period=2, nonfinite=nonfinite)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for step in range(4):
        backward(net, step)
        optimizer.step()
        local.step()
    before = flat(net)
    local.step()
    with torch.no_grad():
        next(net.parameters())[0, 0] = math.nan
    if nonfinite == "raise":
        with pytest.raises(NonFiniteGradientError, match=r"0\.weight"):
            local.step()
    else:
        local.step()
    torch.testing.assert_close(flat(net), before)
    assert local.stats()["skipped_steps"] == 1


def test_adam_recovers_from_one_broken_gradient():
    net = model()
    optimizer = LocalAdamW(net.parameters(), 2, lr=0.01)
    local = LocalUpdates(net, "allgather", density=0.1, nonfinite="skip", optimizer=optimizer)
    for step in range(8):
        backward(net, step)
        if step == 3:
            next(net.parameters()).grad[0, 0] = math.nan
        before = flat(net)
        optimizer.step()
        local.step()
        assert bool(flat(net).isfinite().all())
        assert torch.equal(flat(net), before) == (step == 3)
    assert local.stats()["skipped_steps"] == 1


def test_without_the_optimizer_a_second_refusal_raises():
    net = model()
    optimizer = LocalAdamW(net.parameters(), 2, lr=0.01)
    local = LocalUpdates(net, "allgather", density=0.1, nonfinite="skip")
    backward(net, 0)
    next(net.parameters()).grad[0, 0] = math.nan
    optimizer.step()
    local.step()
    backward(net, 1)
    optimizer.step()  # its moments are NaN
    with pytest.raises(NonFiniteGradientError):
        local.step()


def test_a_broken_end_leaves_finite_weights():
    net = model()
    local = LocalUpdates(net, period=4)
    common = flat(net)
    with torch.no_grad():
        next(net.parameters())[0, 0] = math.inf
    with pytest.raises(NonFiniteGradientError, match="finish: weights are NaN or Inf"):
        local.finish()
    assert torch.equal(flat(net), common)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LocalUpdates(model(), period=0), "period is 0"),
        (lambda: LocalUpdates(model(), nonfinite="ignore"), "choose raise or skip"),
        (lambda: LocalUpdates(model(), warmup_steps=-1), "warmup_steps is -1"),
        (lambda: LocalUpdates(model(), density=0), "density is 0"),
        (lambda: LocalAdamW(model().parameters(), 0), "world_size is 0"),
        (lambda: LocalAdamW(model().parameters(), 2, lr=-1), "lr is -1"),
        (lambda: LocalAdamW(model().parameters(), 2, lr=True), "lr is True; give a learning rate"),
        (lambda: UpdateSpaceAdamW(model(), 0.1, betas=(1.0, 0.9)), "betas are"),
        (lambda: UpdateSpaceAdamW(model(), 0.1, eps=-1.0), "eps is -1.0"),
        (lambda: UpdateSpaceAdamW(model(), 0.1, second_moment="frozen"), "needs warmup_steps > 0"),
        (lambda: UpdateSpaceAdamW(model(), 0.1, second_moment="global"), "choose local, frozen"),
        (lambda: UpdateSpaceAdamW(model(), 0.1, refresh_period=0), "refresh_period is 0"),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_states_of_other_set_ups_are_refused():
    local = LocalUpdates(model(), period=4)
    state = local.state_dict()
    with pytest.raises(ConfigurationError, match="period 4, this run 2"):
        LocalUpdates(model(), period=2).load_state_dict(state)
    with pytest.raises(ConfigurationError, match="load what LocalUpdates"):
        local.load_state_dict({"steps": 3})
    with pytest.raises(ConfigurationError, match="of other parameters"):
        LocalUpdates(nn.Linear(6, 8), period=4).load_state_dict(state)
