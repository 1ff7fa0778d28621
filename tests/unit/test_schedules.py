"""Test AdamW's default under several schedules: loss, Adam's moments, and unused weights."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

STEPS = 48
UNSEEN = 5  # rows of the embedding that occur in no batch


@pytest.fixture(scope="module")
def virtual():
    """Import the benchmarks' module as their commands do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        import virtual_updates

        yield virtual_updates


class Net(nn.Module):
    """A linear layer on an embedding with rows that are never looked up."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.out = nn.Embedding(20, 8), nn.Linear(8, 3)

    def forward(self, at):
        return self.out(self.rows(at))


TARGETS = torch.randn(20, 3, generator=torch.Generator().manual_seed(1))


def loss_of(model, step, rank):
    draw = torch.Generator().manual_seed(100 * step + rank)
    at = torch.randint(20 - UNSEEN, (16,), generator=draw)
    noise = 0.1 * torch.randn(16, 3, generator=draw)
    return nn.functional.mse_loss(model(at), TARGETS[at] + noise)


def error_of(model):
    at = torch.arange(20 - UNSEEN)
    with torch.no_grad():
        return nn.functional.mse_loss(model(at), TARGETS[at]).item()


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.0, **options)


rates = st.sampled_from([0.0, 1e-12, 1e-4, 0.01, 0.03])
schedules = st.lists(st.tuples(rates, rates), min_size=1, max_size=5)


def rate_of(pieces, step):
    """Return a rate that is linear within each piece and jumps between pieces."""
    at = step * len(pieces) / STEPS
    first, last = pieces[int(at)]
    return first + (last - first) * (at - int(at))


@settings(max_examples=8, deadline=None, derandomize=True)
@given(schedules, st.sampled_from([{}, {"period": 3, "warmup_steps": 0}, {"warmup_steps": 6}]))
def test_any_schedule(virtual, pieces, more):
    bound = 0.1 / math.sqrt(0.01 * (1 - 0.81 / 0.99))  # of any gradients, by Cauchy and Schwarz

    def check(_model, optimizer):
        for state in optimizer.state.values():
            mean, root = state["exp_avg"], state["exp_avg_sq"].sqrt()
            assert (mean.abs() <= bound * root * 1.001 + 1e-12).all()

    arguments = Net, adamw, loss_of, lambda step: rate_of(pieces, step), STEPS
    chosen = {**virtual.DEFAULT, **more}
    model, _ = virtual.train_updates(*arguments, settings=chosen, after_step=check)
    dense = error_of(virtual.train_dense(*arguments))
    # unseen rows are rounded with the others of their block, and restored up to the last bit of a
    # float
    unseen = [net.rows.weight[-UNSEEN:] for net in (model, Net())]
    torch.testing.assert_close(*unseen, atol=1e-6, rtol=0)
    assert error_of(model) <= 1.15 * dense + 0.02


@pytest.mark.fast(1)
@pytest.mark.parametrize("options", [{"maximize": True}, {"amsgrad": True}, {"foreach": False}])
def test_variants_of_adamw(virtual, options):
    def loss(model, step, rank):
        return (-1 if options.get("maximize") else 1) * loss_of(model, step, rank)

    arguments = Net, lambda model: adamw(model, **options), loss, lambda _: 0.03, STEPS
    model, _ = virtual.train_updates(*arguments)
    assert error_of(model) <= 1.15 * error_of(virtual.train_dense(*arguments)) + 0.02
