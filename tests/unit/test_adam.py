"""Compare Adam on local or sparse gradients with torch's Adam, and check its own claims."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from sparsync.errors import NonFiniteGradientError
from sparsync_papers.baseline_optimizers import LocalAdamW, UpdateSpaceAdamW

from .small_training import backward, flat, model, trained

REFERENCE = {"lr": 0.01, "weight_decay": 0.1}


@pytest.mark.parametrize(
    "make",
    [
        lambda net: LocalAdamW(net.parameters(), 1, **REFERENCE),
        lambda net: UpdateSpaceAdamW(net, algorithm="dense", **REFERENCE),
        lambda net: UpdateSpaceAdamW(net, algorithm="allgather", density=1.0, **REFERENCE),
        lambda net: UpdateSpaceAdamW(net, second_moment="refreshed", refresh_period=3,
                                     algorithm="dense", **REFERENCE),
    ],
    ids=["local", "update, dense", "update, density 1", "refreshed"],
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
    """If P local gradients have mean 1 and variance s^2, their average has second moment 1 + s^2 / P."""
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


def test_update_space_adam_keeps_its_moments_when_a_step_is_refused():
    net = model()
    optimizer = UpdateSpaceAdamW(net, 0.01, "allgather", density=0.5)
    backward(net, 0)
    optimizer.step()
    before = flat(net)
    backward(net, 1)
    next(net.parameters()).grad[0, 0] = math.nan
    with pytest.raises(NonFiniteGradientError):
        optimizer.step()
    assert torch.equal(flat(net), before)
    backward(net, 2)
    optimizer.step()
    assert bool(flat(net).isfinite().all()) and not torch.equal(flat(net), before)


def test_a_frozen_moment_has_a_floor():
    """A row that first occurs after the warm-up does not take a giant step."""
    net = nn.Embedding(4, 3)
    optimizer = UpdateSpaceAdamW(net, 0.01, "dense", second_moment="frozen", warmup_steps=3)
    for step in range(6):
        net.zero_grad()
        net(torch.tensor([0, 1] if step < 4 else [3])).sum().backward()
        optimizer.step()
    assert float(net.weight.detach().abs().max()) < 5
