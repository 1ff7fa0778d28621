"""What FSDP2 and plain models do behind the hooks' back; importable, because processes are spawned."""

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import sparsync
from tests.attaching import attach

from .fsdp_programs import attached, flat, flat_gradient, grid
from .small_model import same_everywhere

EVERYTHING: dict[str, Any] = {"algorithm": "allgather", "density": 1.0}


class Branches(torch.nn.Module):
    """``rare`` need not run, ``never`` does not; of ``rare`` only the first rows have gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.often, self.rare = torch.nn.Linear(20, 20), torch.nn.Linear(20, 20)
        self.never = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        y = self.often(x)
        rows = torch.arange(20) < 10
        return y + factor * self.rare(x) * rows if factor else y


def x_of(step: int, width: int = 20) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(4, width, generator=generator)


def gathered(mine: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def message_of(run: Callable[[], Any]) -> str:
    """What every rank says; nothing where one of them says nothing."""
    said = ""
    try:
        run()
    except sparsync.ConfigurationError as error:
        said = str(error)
    return said if all(gathered(said)) else ""


def models(*modules: torch.nn.Module) -> list[tuple[str, torch.nn.Module, Any]]:
    """Each plain, as one of four replicas, and sharded, 2 replicas x 2 shards."""
    found = []
    for module in modules:
        found.append(("plain", copy.deepcopy(module), grid(4, 1)))
        mesh = grid(2, 2)
        for child in module.children():
            if any(True for _ in child.parameters()):
                fully_shard(child, mesh=mesh["shard"])
        found.append(("FSDP2", fully_shard(module, mesh=mesh["shard"]), mesh))
    return found


def step_of(net: Any, step: int, *arguments: Any) -> None:
    net(x_of(step, next(net.parameters()).shape[-1]), *arguments).pow(2).mean().backward()


def gradients_are_everywhere_or_nowhere() -> dict[str, bool]:
    """Used on one rank, or delivered in one shard: the others have zeros, not None; so decay agrees."""
    result = {}
    for name, net, mesh in models(Branches()):
        sync = attached(net, mesh, density=0.02, algorithm="allgather")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=0.1)
        there, norms = [], []
        for step, factor in enumerate([1e-6 * (mesh["replicate"].get_local_rank() == 0), 1e4, 0.0]):
            optimizer.zero_grad()
            step_of(net, step, factor)
            there.append(gathered([n for n, p in net.named_parameters() if p.grad is not None]))
            if (
                there[-1].count(there[-1][0]) == dist.get_world_size()
            ):  # else shards wait for others
                norms.append(float(_whole(torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0))))
            optimizer.step()
        result[f"{name}: alike"] = all(told == step[0] for step in there for told in step)
        result[f"{name}: there"] = all("rare.weight" in step[0] for step in there)
        result[f"{name}: nowhere"] = all("never.weight" not in step[0] for step in there)
        result[f"{name}: replicas equal"] = same_everywhere(flat(net))
        result[f"{name}: norms"] = len(norms) == 3 and len(set(gathered(norms[-1]))) == 1
        sync.close()
    return result


def _whole(norm: Any) -> torch.Tensor:
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def nobody_uses_it() -> dict[str, bool]:
    """What no rank uses keeps None, and the next pass of those who do is whole."""
    result = {}
    for name, net, mesh in models(Branches()):
        sync = attached(net, mesh, **EVERYTHING)
        step_of(net, 0, 0.0)
        result[f"{name}: None"] = all(p.grad is None for p in net.rare.parameters())
        net.zero_grad()
        step_of(net, 1, 1.0)  # and a second pass, in which the other replicas leave the module out
        first = flat_gradient(net)
        step_of(net, 2, float(mesh["replicate"].get_local_rank() == 0))
        added = flat_gradient(net)
        net.zero_grad()
        step_of(net, 2, float(mesh["replicate"].get_local_rank() == 0))
        near = torch.allclose(added, first + flat_gradient(net), atol=1e-5)
        result[f"{name}: two passes add"] = near and same_everywhere(added)
        sync.close()
    return result


class Checkpointed(torch.nn.Module):
    def __init__(self, parts: str) -> None:
        super().__init__()
        self.parts, self.layers = parts, torch.nn.ModuleDict()
        for name in "abc":
            self.layers[name] = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name, layer in self.layers.items():
            x = x.tanh() if x.requires_grad else x.clone().requires_grad_()
            x = checkpoint(layer, x, use_reentrant=True) if name in self.parts else layer(x)
        return x


def reentrant_checkpoints() -> dict[str, str]:
    """In the middle, at the end (its backward pass opens the step), everywhere."""
    said = {}
    for parts in ("b", "c", "abc"):
        torch.manual_seed(0)
        net = Checkpointed(parts)
        sync = attach(net, replicate=dist.group.WORLD, timeout=30, **EVERYTHING)
        said[parts] = message_of(lambda net=net: step_of(net, 0))
        assert sync.stats()["steps"] == 0
        net.parts = ""
        net.zero_grad()
        step_of(net, 1)
        assert sync.stats()["steps"] == 1
        assert same_everywhere(flat_gradient(net))
        sync.close()
    return said


def averages_that_are_left() -> dict[str, str]:
    """With momentum in the correction they must not come in as gradients; zeros and sums may."""
    said = {}
    for name, net, mesh in models(torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False))):
        sync = attached(net, mesh, correction=sparsync.Correction(momentum=0.9), **EVERYTHING)
        for step in range(3):
            net.zero_grad(set_to_none=step != 1)
            with sync.no_sync():
                step_of(net, step)
            step_of(net, step)
        said[name] = message_of(lambda net=net: step_of(net, 3))
        sync.close()
    return said


def thawed() -> dict[str, str]:
    """Before the first forward pass, later, and beside what FSDP2 has."""
    said = {}
    for when in ("at once", "later", "plain"):
        mesh = grid(4, 1)
        net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
        torch.nn.init.constant_(net[2].weight, 0.1)
        net[0].weight.requires_grad_(False)
        for module in [net[2]] if when == "plain" else [net[0], net]:
            fully_shard(module, mesh=mesh["shard"])
        sync = attached(net, mesh, **EVERYTHING)
        if when != "at once":
            with sync.no_sync():  # which compares no weights
                step_of(net, 0)
        net[0].weight.requires_grad_(True)
        said[when] = message_of(lambda net=net: step_of(net, 1))
        sync.close()
    return said


def copies() -> dict[str, bool]:
    """Of a plain model: not attached, and the original goes on."""
    torch.manual_seed(0)
    net = torch.nn.Linear(8, 8)
    sync = attach(net, replicate=dist.group.WORLD, timeout=30, **EVERYTHING)
    average, file = AveragedModel(net), io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    twins = [copy.deepcopy(net), torch.load(file, weights_only=False)]
    for twin in twins:
        step_of(twin, 0)
    step_of(net, 0)
    average.update_parameters(net)
    own = [not same_everywhere(flat_gradient(twin)) for twin in twins]
    result = {"local": all(own), "exchanged": same_everywhere(flat_gradient(net))}
    result["steps"] = sync.stats()["steps"] == 1
    sync.close()
    return result


def partly_sharded() -> str:
    mesh, net = grid(2, 2), Branches()
    fully_shard(net.often, mesh=mesh["shard"])
    return message_of(lambda: attached(net, mesh))


def what_models_do() -> dict[str, Any]:
    return {
        "unused": {**gradients_are_everywhere_or_nowhere(), **nobody_uses_it()},
        "reentrant": reentrant_checkpoints(),
        "left": averages_that_are_left(),
        "thawed": thawed(),
        "copies": copies(),
        "partly": {"sharded": partly_sharded()},
    }
