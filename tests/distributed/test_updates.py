"""Updates of local optimizers, exchanged among three real ranks."""

import copy

import pytest
import torch
import torch.distributed as dist

from sparsync import LocalAdamW, OuterStep
from sparsync.errors import PeerError
from sparsync_papers.optimizers import UpdateSpaceAdamW
from tests.on_ranks import gathered, on_ranks, refused, same_everywhere

from .small_model import backward, ddp_model, flat, model, train


def step_of(net, optimizer, step):
    net.zero_grad()
    backward(net, step)
    optimizer.step()


@on_ranks(3)
def test_different_initial_weights_are_named():
    local = OuterStep(model(seed=dist.get_rank() % 2), period=1)
    with refused("the initial values of", error=PeerError):
        local.step()


@on_ranks(3)
def test_dense_local_sgd_of_period_1_is_ddp():
    ddp, net = ddp_model(), model()
    train(ddp, range(10))
    local, optimizer = (
        OuterStep(net, algorithm="dense", density=1.0),
        torch.optim.SGD(net.parameters(), lr=0.1),
    )
    for step in range(10):
        step_of(net, optimizer, step)
        local.step()
    assert torch.allclose(flat(net), flat(ddp), atol=1e-6)


@on_ranks(3)
@pytest.mark.parametrize(("algorithm", "period"), [("signs", 3), ("budgeted", 1), ("oktopk", 2)])
def test_replicas_are_equal_where_they_should_be(algorithm, period):
    """And only there; resuming is exact."""
    net, resumed = model(), model(seed=5)
    optimizer, again = (LocalAdamW(m.parameters(), 3, lr=0.01) for m in (net, resumed))
    local, second = (
        OuterStep(m, algorithm=algorithm, residual="weights", density=0.1, period=period)
        for m in (net, resumed)
    )
    for step in range(14):
        step_of(net, optimizer, step)
        local.step()
        if step == 6:
            resumed.load_state_dict(net.state_dict())
            again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            second.load_state_dict(local.state_dict())
        elif step > 6:
            step_of(resumed, again, step)
            second.step()
    own = flat(net)
    assert torch.equal(own, flat(resumed))
    assert not same_everywhere(own)
    with local.shared():
        shared = flat(net)
    assert same_everywhere(shared) and not torch.equal(own, shared)
    local.finish()
    assert same_everywhere(flat(net))
    assert torch.allclose(flat(net), torch.stack(gathered(own)).mean(0), atol=1e-6)


@on_ranks(3)
@pytest.mark.parametrize("moment", ["local", "frozen", "refreshed"])
def test_update_space_adam_keeps_replicas_equal(moment):
    net = model()
    optimizer = UpdateSpaceAdamW(
        net, 0.01, density=0.1, second_moment=moment, refresh_period=3, warmup_steps=2
    )
    for step in range(8):
        step_of(net, optimizer, step)
    assert same_everywhere(flat(net))
    squares = torch.cat([state["exp_avg_sq"].flatten() for state in optimizer.state.values()])
    # step 8 = 2 + 2 * 3: refreshed a moment ago
    assert same_everywhere(squares) == (moment != "local")
