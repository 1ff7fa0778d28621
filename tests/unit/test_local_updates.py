"""Adam where updates are exchanged: against torch's optimizers, and against itself."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import sparsync
from sparsync import ArrivalAdamW, LocalAdamW, LocalUpdates, UpdateSpaceAdamW
from sparsync.errors import ConfigurationError, NonFiniteGradientError

STEPS = 30


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def backward(net: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(5, 6, generator=generator)
    net.zero_grad()
    (net(x) - x[:, :3].sin()).pow(2).mean().backward()


def flat(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def trained(make, steps: int = STEPS) -> torch.Tensor:
    net = model()
    optimizer = make(net)
    for step in range(steps):
        backward(net, step)
        optimizer.step()
    return flat(net)


REFERENCE = {"lr": 0.01, "weight_decay": 0.1}


@pytest.mark.parametrize(
    "make",
    [
        lambda net: LocalAdamW(net.parameters(), 1, **REFERENCE),
        lambda net: ArrivalAdamW(net.parameters(), **REFERENCE),
        lambda net: UpdateSpaceAdamW(net, algorithm="dense", **REFERENCE),
        lambda net: UpdateSpaceAdamW(net, algorithm="allgather", density=1.0, **REFERENCE),
        lambda net: UpdateSpaceAdamW(net, second_moment="refreshed", refresh_period=3,
                                     algorithm="dense", **REFERENCE),
    ],
    ids=["local", "arrival", "update, dense", "update, density 1", "refreshed"],
)  # fmt: skip
def test_on_one_rank_it_is_adamw(make):
    expected = trained(lambda net: torch.optim.AdamW(net.parameters(), **REFERENCE))
    torch.testing.assert_close(trained(make), expected, rtol=1e-4, atol=1e-5)


def test_a_frozen_moment_stays():
    net = model()
    optimizer = UpdateSpaceAdamW(net, 0.01, "dense", second_moment="frozen", warmup_steps=4)
    seen = []
    for step in range(8):
        backward(net, step)
        optimizer.step()
        seen.append(next(iter(optimizer.state.values()))["exp_avg_sq"].clone())
    assert not torch.equal(seen[2], seen[3])
    assert all(torch.equal(seen[3], later) for later in seen[4:])


def test_the_second_moment_is_that_of_the_average():
    """P local gradients of mean 1 and variance s^2: the average's second moment is 1 + s^2 / P."""
    ranks, steps = 4, 4000
    weight = nn.Parameter(torch.zeros(2000))
    optimizer = LocalAdamW([weight], ranks, lr=1.0, betas=(0.99, 0.999), weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        before = weight.detach().clone()
        weight.grad = 1 + 3 * torch.randn(2000, generator=generator)
        optimizer.step()
        if step >= steps - 1:
            moved = float((before - weight.detach()).mean())
    assert moved == pytest.approx(1 / math.sqrt(1 + 9 / ranks), rel=0.05)


def test_an_arrival_counts_for_itself():
    """An entry that arrives every 10th step moves as far per arrival as one that always arrives."""
    weight = nn.Parameter(torch.zeros(2))
    optimizer = ArrivalAdamW([weight], lr=0.01, weight_decay=0.0)
    for step in range(100):
        weight.grad = torch.tensor([1.0, 1.0 if step % 10 == 0 else 0.0])
        optimizer.step()
    assert weight.tolist() == pytest.approx([-1.0, -0.1], rel=1e-3)


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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LocalUpdates(model(), period=0), "period is 0"),
        (lambda: LocalUpdates(model(), nonfinite="ignore"), "choose raise or skip"),
        (lambda: LocalUpdates(model(), warmup_steps=-1), "warmup_steps is -1"),
        (lambda: LocalUpdates(model(), density=0), "density is 0"),
        (lambda: LocalAdamW(model().parameters(), 0), "world_size is 0"),
        (lambda: LocalAdamW(model().parameters(), 2, lr=-1), "lr is -1"),
        (lambda: ArrivalAdamW(model().parameters(), betas=(1.0, 0.9)), "betas are"),
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


def test_what_is_public():
    assert sparsync.LocalUpdates is LocalUpdates
