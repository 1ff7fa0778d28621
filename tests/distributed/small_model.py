"""A small model, its training, and the requirements that every way to divide the training must meet."""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync.gradients.shards import AVERAGES_ON_CPU
from sparsync.units import local_of
from sparsync.updates import OuterStep
from tests import attaching
from tests.on_ranks import gathered, same_everywhere


def fully_shard(module: Any, **options: Any) -> Any:
    """Call FSDP2; skip the test where ``attach`` refuses it."""
    if torch.__version__ < AVERAGES_ON_CPU:
        pytest.skip(f"FSDP2 averages on the CPU since torch {AVERAGES_ON_CPU}")
    return fsdp.fully_shard(module, **options)


def model(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 30), torch.nn.Linear(30, 5)
    )


def batch(step: int, rank: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a rank's inputs and targets, by default this rank's."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(8, 20, generator=generator)
    return x, x[:, :5].sin()


def backward(net: torch.nn.Module, step: int) -> torch.Tensor:
    x, y = batch(step)
    loss = (net(x) - y).pow(2).mean()
    loss.backward()
    return loss


def train(net: Any, steps: range, optimizer: Any = None, backward: Any = backward) -> float:
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.1)
    loss = torch.zeros(())
    for step in steps:
        optimizer.zero_grad()
        loss = backward(net, step)
        optimizer.step()
    return float(loss)


def ddp_model(seed: int = 0, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model(seed), **options)


def attach(net: Any, algorithm: str = "oktopk", **options: Any) -> Any:
    return attaching.attach(net, algorithm, **{"density": 0.1, "timeout": 30, **options})


@contextmanager
def attached(net: Any, algorithm: str = "oktopk", **options: Any) -> Iterator[Any]:
    """Attach, and close at the end."""
    sync = attach(net, algorithm, **options)
    yield sync
    sync.close()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Put a tensor together from its shards."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def flat(net: torch.nn.Module) -> torch.Tensor:
    return torch.cat([whole(p).flatten().float() for p in net.parameters()])


def flat_gradient(net: torch.nn.Module) -> torch.Tensor:
    """Return the contents of ``grad``, with zeros where there is none."""
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in net.parameters()]
    return torch.cat([whole(grad).flatten() for grad in grads])


def residuals(sync: Any) -> list[torch.Tensor]:
    return [residual.accumulated.clone() for residual in sync.reducer.residuals]


# ---- what holds for DDP, nodes and shards ---------------------------------------------------------

Make = Callable[..., tuple[Any, Any]]  # (seed=, **options): a model and its handle


def resumes_exactly(make: Make, train: Callable[..., Any] = train, **options: Any) -> Any:
    """Train 8 steps, and again 3, a save, a load and 5 more, with equal results; return the state."""
    (through, a), (first, b), (second, c) = (make(seed=seed, **options) for seed in (0, 0, 1))
    train(through, range(8))
    train(first, range(3))
    file = io.BytesIO()
    torch.save(b.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    second.load_state_dict(first.state_dict())
    c.load_state_dict(state)
    train(second, range(3, 8))
    assert torch.equal(flat(second), flat(through))
    assert c.stats()["exchanges"] == 8
    for sync in (a, b, c):
        sync.close()
    return state


def the_law_holds(net: Any, sync: Any, dense: Any, backward: Any) -> None:
    """Check with fixed weights: sum of averages + mean residual == sum of dense averages."""
    wanted, got = (torch.zeros(flat(net).numel()) for _ in range(2))
    for step in range(5):
        for module, into in ((dense, wanted), (net, got)):
            module.zero_grad()
            backward(module, step)
            into += flat_gradient(module)
    content, left = sync.state_dict()["content"], {}
    for name, parameter in getattr(net, "module", net).named_parameters():  # of DDP, or itself
        left[name] = torch.zeros(parameter.shape)
        if piece := content["pieces"].get(name):
            ends = zip(piece["offset"], piece["size"], strict=True)
            place = tuple(slice(offset, offset + size) for offset, size in ends)
            part = left[name].view(piece["shape"])[place]
            part += content["reducer"]["residual"][name].view(part.shape)
    kept = torch.cat([value.flatten() for value in left.values()])
    dist.all_reduce(kept)
    assert not torch.allclose(got, wanted, atol=1e-5)
    assert torch.allclose(got + kept / 2, wanted, atol=1e-5)
    sync.close()


def all_refuse_what_is_not_finite(
    make: Make, name: str, poison: Callable[[Any], Any], backward: Any = backward
) -> None:
    """With NaN in a gradient of one rank, all ranks raise, skip or propagate it; residuals stay.

    ``poison`` spoils a gradient of a model, and returns a handle whose ``remove`` stops the
    spoiling.
    """
    for policy in ("raise", "skip", "propagate"):
        net, sync = make(nonfinite=policy)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        train(net, range(2), optimizer, backward)
        before, weights = residuals(sync), flat(net)
        optimizer.zero_grad()
        spoiled = poison(net)
        if policy == "raise":
            with pytest.raises(sparsync.errors.NonFiniteGradientError, match=f"'{name}'"):
                backward(net, 2)
        else:
            backward(net, 2)
        spoiled.remove()
        if policy == "skip":
            optimizer.step()
            assert torch.equal(flat(net), weights)
        elif policy == "propagate":
            assert not flat_gradient(net).isfinite().any()
            optimizer.zero_grad()
        assert all(map(torch.equal, before, residuals(sync))), policy
        assert sync.stats()["refused_exchanges"] == 1
        train(net, range(3, 5), optimizer, backward)
        assert same_everywhere(flat(net)) and flat(net).isfinite().all(), policy
        sync.close()


# ---- updates, where a replica is divided ----------------------------------------------------------


def local_flat(net: torch.nn.Module) -> torch.Tensor:
    return torch.cat([local_of(p).flatten() for p in net.parameters()])


def local_shared(net: Any, sync: Any) -> torch.Tensor:
    with sync.shared():
        return local_flat(net)


def updating(net: Any, replicate: Any = None, **settings: Any) -> tuple[Any, Any]:
    """Attach to AdamW; ``sync.stepped`` holds the weights after a local step and before the exchange."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    optimizer.register_step_post_hook(lambda *_: setattr(sync, "stepped", local_flat(net)))
    transport = sparsync.Transport(timeout=30, hierarchy=settings.pop("hierarchy", None))
    settings = {"density": 1.0, "period": 1, "residual": "weights", **settings}
    sync: Any = sparsync.attach(
        net, optimizer, OuterStep(**settings), replicate=replicate, transport=transport
    )
    return optimizer, sync


def mean_over(values: torch.Tensor, group: Any) -> torch.Tensor:
    total = values.clone()
    dist.all_reduce(total, group=group)
    return total / dist.get_world_size(group)


def the_law_of_updates_holds(
    net: Any, optimizer: Any, sync: Any, backward: Any, group: Any
) -> None:
    """Check that exchanges keep the mean of replicas, and that shared and final weights are equal."""
    for step in range(5):
        optimizer.zero_grad()
        backward(net, step)
        optimizer.step()
        assert same_everywhere(local_shared(net, sync), group)
        kept = mean_over(local_flat(net), group)
        assert torch.allclose(kept, mean_over(sync.stepped, group), atol=1e-6)
    assert not same_everywhere(local_flat(net), group)
    sync.finish()
    assert same_everywhere(local_flat(net), group)
    assert torch.allclose(local_flat(net), kept, atol=1e-6)


def nan_on_one_rank_brings_all_back(
    net: Any, optimizer: Any, sync: Any, backward: Any, spoiled: torch.Tensor, rank: int
) -> None:
    """Check that all parts of all replicas return to the last exchange, and raise the second time."""

    def spoil(_optimizer: Any, *_: Any) -> None:
        if dist.get_rank() == rank:
            local_of(spoiled.grad).view(-1)[0] = torch.nan

    train(net, range(3), optimizer, backward)
    before = local_flat(net)
    hook = optimizer.register_step_pre_hook(spoil)
    train(net, range(3, 4), optimizer, backward)
    assert torch.equal(local_flat(net), before)
    assert sync.stats()["refused_exchanges"] == 1
    hook.remove()
    train(net, range(4, 6), optimizer, backward)
    assert not torch.equal(local_flat(net), before)
    counts = {name: int(state["step"]) for name, state in optimizer.state_dict()["state"].items()}
    assert gathered(counts)[dist.get_rank() ^ 1] == counts  # dropped on all parts of a replica
    shared = local_shared(net, sync)
    with torch.no_grad():
        if dist.get_rank() == rank:
            local_of(spoiled).view(-1)[0] = torch.nan
    sync.finish()
    assert torch.equal(local_flat(net), shared) and shared.isfinite().all()
    hook = optimizer.register_step_pre_hook(spoil)
    with pytest.raises(sparsync.errors.NonFiniteGradientError):
        train(net, range(6, 8), optimizer, backward)
    hook.remove()
