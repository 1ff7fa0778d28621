"""Updates of local optimizers, exchanged among real ranks."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from sparsync import LocalAdamW, LocalUpdates, PeerError
from sparsync_papers.optimizers import UpdateSpaceAdamW

from .small_model import batch, flat, model, same_everywhere, train


def _backward(net: torch.nn.Module, step: int) -> None:
    x, y = batch(step)
    net.zero_grad()
    (net(x) - y).pow(2).mean().backward()


def updates() -> dict[str, bool]:
    """Replicas are equal where they should be, and only there; resuming is exact."""
    return {**_dense_is_ddp(), **_local_updates(), **_update_space(), **_different_weights()}


def _different_weights() -> dict[str, bool]:
    net = model(seed=dist.get_rank() % 2)
    local, said = LocalUpdates(net, period=1), ""
    try:
        local.step()
    except PeerError as error:
        said = str(error)
    return {"different initial weights are named": "the initial weights" in said}


def _dense_is_ddp() -> dict[str, bool]:
    ddp, net = DistributedDataParallel(model()), model()
    train(ddp, range(10))
    local, optimizer = LocalUpdates(net, "dense"), torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(10):
        _backward(net, step)
        optimizer.step()
        local.step()
    return {"dense local SGD of period 1 is DDP": torch.allclose(flat(net), flat(ddp), atol=1e-6)}


def _local_updates() -> dict[str, bool]:
    result = {}
    for algorithm, period in (("signs", 3), ("budgeted", 1), ("oktopk", 2)):
        net, resumed = model(), model(seed=5)
        options: dict[str, Any] = {"density": 0.1, "period": period}
        optimizer = LocalAdamW(net.parameters(), 3, lr=0.01)
        local = LocalUpdates(net, algorithm, **options)
        for step in range(14):
            _backward(net, step)
            optimizer.step()
            local.step()
            if step == 6:
                resumed.load_state_dict(net.state_dict())
                again = LocalAdamW(resumed.parameters(), 3, lr=0.01)
                again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                second = LocalUpdates(resumed, algorithm, **options)
                second.load_state_dict(local.state_dict())
            if step > 6:
                _backward(resumed, step)
                again.step()
                second.step()
        own = flat(net)
        with local.shared():
            shared = flat(net)
        result[f"{algorithm}: resume is exact"] = torch.equal(own, flat(resumed))
        result[f"{algorithm}: shared weights are equal"] = same_everywhere(shared)
        result[f"{algorithm}: own weights are not"] = not same_everywhere(own)
        local.finish()
        result[f"{algorithm}: equal in the end"] = same_everywhere(flat(net))
        mean = own.clone()
        dist.all_reduce(mean)
        close = torch.allclose(flat(net), mean / dist.get_world_size(), atol=1e-6)
        result[f"{algorithm}: the end is the mean"] = close and not torch.equal(own, shared)
    return result


def _update_space() -> dict[str, bool]:
    result = {}
    for moment in ("local", "frozen", "refreshed"):
        net = model()
        optimizer = UpdateSpaceAdamW(
            net, 0.01, density=0.1, second_moment=moment, refresh_period=3, warmup_steps=2
        )
        for step in range(8):
            _backward(net, step)
            optimizer.step()
        result[f"update space, {moment}: replicas are equal"] = same_everywhere(flat(net))
        squares = torch.cat([s["exp_avg_sq"].flatten() for s in optimizer.state.values()])
        expected = moment != "local"  # step 8 = 2 + 2 * 3: refreshed a moment ago
        result[f"update space, {moment}: second moments"] = same_everywhere(squares) == expected
    return result
