"""Scenarios of tensor parallelism, and of nodes that sum densely; importable, for spawned processes."""

import gc
import time
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import sparsync
from sparsync.integrations.shards import local_of
from tests.attaching import attach

from .mesh_programs import Late, equal_over, mesh_of, network, on_all, whole

WORDS, WIDTH = 4, 6


class Block(torch.nn.Module):
    """A plain norm, a sharded pair of matrices, and a norm on pieces of the sequence."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.before = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 10)
        self.down = torch.nn.Linear(10, WIDTH)
        self.after = torch.nn.LayerNorm(WIDTH)
        self.head = torch.nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.after(self.down(torch.tanh(self.up(self.before(x))))))


def parallel(mesh: DeviceMesh, seed: int = 0) -> Any:
    plan = {
        "up": ColwiseParallel(),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "after": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1)),
    }
    return parallelize_module(Block(seed), mesh["tp"], plan)


def rows(step: int, replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + replica)
    x = torch.randn(3, WORDS, WIDTH, generator=generator)
    return x, x[..., :2].sin()


def loss_of(net: Any, step: int, replica: int, halves: tuple[int, int] | None = None) -> Any:
    """Mean square; of tensor-parallel ranks each has its columns of the output."""
    x, y = rows(step, replica)
    if halves is not None:
        place, parts = halves
        y = y.chunk(parts, dim=-1)[place]
    error = (net(x) - y).pow(2)
    return error.sum() / (3 * WORDS * 2)


def train(net: Any, mesh: DeviceMesh, steps: range, optimizer: Any = None) -> None:
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.1)
    place = mesh["tp"].get_local_rank(), 2
    for step in steps:
        optimizer.zero_grad()
        loss_of(net, step, mesh["dp"].get_local_rank(), place).backward()
        optimizer.step()


def reference(steps: range) -> torch.nn.Module:
    net = Block()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in steps:
        optimizer.zero_grad()
        for replica in range(2):
            (loss_of(net, step, replica) / 2).backward()
        optimizer.step()
    return net


def local(net: Any, *, sharded: bool) -> torch.Tensor:
    """Parameters that are divided over tensor-parallel ranks, or those that are not."""
    found = []
    for parameter in net.parameters():
        mine = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if (mine.shape != parameter.shape) == sharded:
            found.append(mine.detach().flatten())
    return torch.cat(found)


def attached(net: Any, mesh: DeviceMesh, **changes: Any) -> Any:
    options = {"algorithm": "oktopk", "density": 0.1, "timeout": 30, **changes}
    return attach(net, replicate=mesh["dp"], **options)


def tensor_parallel_trains() -> dict[str, bool]:
    """Equal over replicas; what is replicated, also over tensor-parallel ranks; right at density 1."""
    result, mesh = {}, mesh_of(dp=2, tp=2)
    for name, options in {
        "everything": {"algorithm": "allgather", "density": 1.0},
        "oktopk": {},
        "budgeted": {"algorithm": "budgeted", "density": 0.2},
        "in units": {"algorithm": "allgather", "unit_bytes": 40, "density": 0.2},
        "whole norms": {"compress": lambda name, parameter: parameter.ndim > 1},
    }.items():
        net = parallel(mesh)
        sync = attached(net, mesh, **options)
        train(net, mesh, range(8))
        shards, copies = local(net, sharded=True), local(net, sharded=False)
        result[f"{name}: over replicas"] = on_all(
            equal_over(mesh["dp"], torch.cat([shards, copies]))
        )
        result[f"{name}: copies"] = on_all(equal_over(mesh["tp"], copies))
        result[f"{name}: shards differ"] = on_all(not equal_over(mesh["tp"], shards))
        near = torch.allclose(whole(net), whole(reference(range(8))), atol=1e-5)
        result[f"{name}: as one process"] = on_all(near == (name == "everything"))
        sync.close()
    return result


def tensor_parallel_resumes(directory: Path) -> dict[str, bool]:
    mesh = mesh_of(dp=2, tp=2)
    through, first, second = parallel(mesh), parallel(mesh), parallel(mesh, seed=1)
    syncs = [attached(net, mesh, threshold_period=4) for net in (through, first, second)]
    train(through, mesh, range(7))
    train(first, mesh, range(3))
    path = directory / f"tensor-{dist.get_rank()}.pt"
    torch.save(syncs[1].state_dict(), path)
    state = torch.load(path, weights_only=True)
    second.load_state_dict(first.state_dict())
    syncs[2].load_state_dict(state)
    train(second, mesh, range(3, 7))
    place = mesh["tp"].get_local_rank()
    columns = state["pieces"]["down.weight"]
    result = {
        "exact": on_all(torch.equal(whole(second), whole(through))),
        "pieces": columns == {"shape": [6, 10], "offset": [0, 5 * place], "size": [6, 5]},
        "whole": "before.weight" in state["residual"] and "before.weight" not in state["pieces"],
    }
    for sync in syncs:
        sync.close()
    return result


def tensor_parallel_refuses() -> dict[str, Any]:
    """NaN in one shard of one rank: told on all; what decides by rank goes with shards alone."""
    mesh = mesh_of(dp=2, tp=2)
    net = parallel(mesh)
    net.up.bias.register_hook(lambda g: g * float("nan") if dist.get_rank() == 3 else g)
    sync = attached(net, mesh)
    raised = ""
    try:
        loss_of(net, 0, 0, (mesh["tp"].get_local_rank(), 2)).backward()
    except sparsync.NonFiniteGradientError as error:
        raised = str(error)
    told = on_all("'up.bias'" in raised)
    sync.close()
    said = []
    for options in ({"algorithm": "auto"}, {"density": sparsync.AdaptiveDensity()}):
        try:
            attached(parallel(mesh), mesh, **options).close()
        except sparsync.ConfigurationError as error:
            said.append(str(error))
    return {"told": told, "by rank": len(said) == 2 and all("fixed density" in s for s in said)}


def half_of_the_world() -> bool:
    """Two ranks train a plain model by themselves, and attach again after ``close()``."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = halves[dist.get_rank() // 2]
    for _ in range(2):
        net = Block(seed=dist.get_rank() // 2)
        sync = attach(net, replicate=mine, world=mine, density=0.1, timeout=30)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(net, step, dist.get_rank()).backward()
            optimizer.step()
        everyone = [torch.empty_like(whole(net)) for _ in range(2)]
        dist.all_gather(everyone, whole(net), group=mine)
        sync.close()
    return on_all(torch.equal(*everyone))


def units_start_while_others_go_backward() -> bool:
    """The last layers' exchange has begun before the first layers' gradients have come."""
    layers = network()
    net = torch.nn.Sequential(layers[0], layers[1], Late(), layers[2], layers[3])
    options: Any = {"replicate": mesh_of(dp=2, tp=2)["dp"], "unit_bytes": 1, "timeout": 30}
    begins = []
    for overlap in (True, False):
        sync = attach(net, overlap=overlap, **options)
        ends: list[float] = []
        hook = net[0].bias.register_post_accumulate_grad_hook(
            lambda p, ends=ends: ends.append(time.perf_counter())
        )
        x, y = torch.ones(8, 6) * dist.get_rank(), torch.zeros(8, 3)
        (net(x) - y).pow(2).mean().backward()
        first = min(begin for _, begin, _ in sync.stats()["exchanges_last_step"])
        begins.append(first < ends[0] - 0.1)  # Late takes 0.15 s
        hook.remove()
        sync.close()
    return on_all(begins == [True, False])


def alone() -> dict[str, bool]:
    """One rank: trains, closes to a plain model, and a forgotten handle ends with its model."""
    mesh, result = mesh_of(dp=1, tp=1), {}
    for kind in ("plain", "FSDP2"):
        net = torch.nn.Linear(WIDTH, 2)
        if kind == "FSDP2":
            fully_shard(net, mesh=mesh["tp"])
        sync = attached(net, mesh)
        net(torch.ones(3, WIDTH)).sum().backward()
        result[f"{kind}: sparse"] = int(local_of(net.weight.grad).count_nonzero()) <= 2
        thread, alive = sync._engine._thread, weakref.ref(sync)
        del net, sync
        gc.collect()
        thread.join(timeout=10)
        result[f"{kind}: forgotten"] = alive() is None and not thread.is_alive()
    net = torch.nn.Linear(WIDTH, 2)
    attached(net, mesh).close()
    net(torch.ones(3, WIDTH)).sum().backward()
    result["closed: plain"] = bool((net.weight.grad == 3).all())
    return result
