"""Scenarios of FSDP2 inside replicas; importable, because processes are spawned."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.attaching import attach

from .small_model import same_everywhere

Attach = dict[str, Any]


class Net(torch.nn.Module):
    """An embedding (whose input needs no gradient), uneven rows, and one row that one rank has."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table = torch.nn.Embedding(11, 7)
        self.hidden = torch.nn.Linear(7, 9)
        self.out = torch.nn.Linear(9, 3)
        self.rare = torch.nn.Linear(9, 3)
        self.gain = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, *, rare: bool = True) -> torch.Tensor:
        hidden = torch.tanh(self.hidden(self.table(x))) * self.gain
        return self.out(hidden) + (self.rare(hidden) if rare else 0.0)


def grid(replicas: int, shards: int) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def sharded(mesh: DeviceMesh, net: torch.nn.Module | None = None, **options: Any) -> Any:
    net = Net() if net is None else net
    for module in (net.table, net.hidden, net.out, net.rare):
        fully_shard(module, mesh=mesh["shard"], **options)
    return fully_shard(net, mesh=mesh["shard"], **options)


def attached(net: Any, mesh: DeviceMesh, **changes: Any) -> Any:
    options = {"algorithm": "oktopk", "density": 0.1, "timeout": 30, **changes}
    return attach(net, replicate=mesh["replicate"], **options)


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randint(11, (6,), generator=generator)


def loss_of(net: Any, step: int, **how: Any) -> torch.Tensor:
    return (net(batch(step), **how) - 1).pow(2).mean()


def train(net: Any, steps: range, optimizer: Any = None) -> None:
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.1)
    for step in steps:
        optimizer.zero_grad()
        loss_of(net, step).backward()
        optimizer.step()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def flat(net: Any) -> torch.Tensor:
    return torch.cat([whole(p).flatten().float() for p in net.parameters()])


def flat_gradient(net: Any) -> torch.Tensor:
    """What is in ``grad``, zeros where there is none; put together from the shards."""
    pieces = [torch.zeros_like(p) if p.grad is None else p.grad for p in net.parameters()]
    return torch.cat([whole(piece).flatten() for piece in pieces])


def residuals(sync: Any) -> list[torch.Tensor]:
    return [torch.cat([r.accumulated, torch.zeros(1)]).clone() for r in sync.reducer.residuals]


def every_density() -> dict[str, bool]:
    """Replicas stay equal bit for bit; at density 1 they are what dense DDP trains."""
    reference = DistributedDataParallel(Net())
    train(reference, range(6))
    result, mesh = {}, grid(2, 2)
    in_units = {"algorithm": "allgather", "unit_bytes": 100}
    for name, options in {
        "oktopk": {},
        "budgeted, several units": {"algorithm": "budgeted", "unit_bytes": 100},
        "everything": {"algorithm": "allgather", "density": 1.0},
        "dense": {"algorithm": "dense"},
        "all at the end": {"density": 1.0, "overlap": False, **in_units},
        "gloo": {"transport": "torch", "unit_bytes": 100},
    }.items():
        net = sharded(mesh)
        sync = attached(net, mesh, **options)
        train(net, range(6))
        result[f"{name}: replicas equal"] = same_everywhere(flat(net))
        if name in ("everything", "dense", "all at the end"):
            result[f"{name}: as DDP"] = torch.allclose(flat(net), flat(reference), atol=1e-6)
        else:
            result[f"{name}: not dense"] = not torch.allclose(flat(net), flat(reference))
        sizes = sum(unit.size for unit in sync.reducer.units)
        local = sum(p.to_local().numel() for p in net.parameters())
        result[f"{name}: no padding"] = sizes == local
        sync.close()
    return result


def one_shard_is_plain_data_parallelism() -> dict[str, bool]:
    """A shard mesh of size 1 trains what DDP does with the same units, bit for bit."""
    result, mesh = {}, grid(4, 1)
    for algorithm in ("oktopk", "budgeted"):
        ddp, net = DistributedDataParallel(Net()), sharded(mesh)
        syncs = [
            attach(ddp, algorithm, density=0.1, timeout=30),
            attached(net, mesh, algorithm=algorithm),
        ]
        for model in (ddp, net):
            train(model, range(6), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        result[algorithm] = torch.equal(flat(ddp), flat(net))
        for sync in syncs:
            sync.close()
    return result


def nothing_is_lost() -> bool:
    """With fixed weights: sum of averages + mean of what is left == sum of dense averages."""
    mesh, dense = grid(2, 2), DistributedDataParallel(Net())
    net = sharded(mesh)
    sync = attached(net, mesh, density=0.05, unit_bytes=100, algorithm="budgeted")
    wanted, got = (torch.zeros(flat(net).numel()) for _ in range(2))
    for step in range(5):
        for model in (dense, net):
            model.zero_grad()
            loss_of(model, step).backward()
        wanted += flat_gradient(dense)
        got += flat_gradient(net)
    left = sync.state_dict()["residual"]
    for name, parameter in net.named_parameters():  # a shard's residual, as the gradient of it
        kept = left[name].clone()
        dist.all_reduce(kept, group=mesh["replicate"].get_group())
        local = parameter.to_local()
        parameter.grad = torch.zeros_like(parameter.detach())
        parameter.grad.to_local().copy_(kept.view(local.shape) / 2)
    before = torch.allclose(got, wanted, atol=1e-5)
    got += flat_gradient(net)
    sync.close()
    return torch.allclose(got, wanted, atol=1e-5) and not before


def accumulated(how: str) -> bool:
    """Several backward passes, one exchange: by FSDP2's own switches, or by ``no_sync``."""
    mesh = grid(2, 2)
    reference, net = DistributedDataParallel(Net()), sharded(mesh)
    sync = attached(net, mesh, algorithm="allgather", density=1.0)
    for _ in range(2):  # the second time: everything is as before
        reference.zero_grad()
        (loss_of(reference, 0) + loss_of(reference, 1)).backward()
        net.zero_grad()
        switch: Callable[[bool], None] = {
            "set_requires_gradient_sync": net.set_requires_gradient_sync,
            "set_requires_all_reduce": net.set_requires_all_reduce,
        }.get(how, lambda on: None)
        switch(False)
        net.set_is_last_backward(False)
        if how == "no_sync":
            with sync.no_sync():
                loss_of(net, 0).backward()
        else:
            loss_of(net, 0).backward()
        switch(True)
        net.set_is_last_backward(True)
        loss_of(net, 1).backward()
    steps = sync.stats()["steps"]
    sync.close()
    once = steps == (4 if how == "two exchanges" else 2)
    return once and torch.allclose(flat_gradient(net), flat_gradient(reference), atol=1e-6)


def everything_about_fsdp(directory: str) -> dict[str, Any]:
    from . import fsdp_edges as edges  # which imports from here
    from .watch_programs import what_models_do

    ways = ("set_requires_gradient_sync", "set_requires_all_reduce", "no_sync", "two exchanges")
    return {
        "densities": every_density(),
        "one shard": one_shard_is_plain_data_parallelism(),
        "law": nothing_is_lost(),
        "accumulation": {how: accumulated(how) for how in ways},
        "resume": edges.resume_is_exact(Path(directory)),
        "nonfinite": edges.nonfinite_policies(),
        "precision": edges.mixed_precision(MixedPrecisionPolicy),
        "unused": edges.a_replica_that_leaves_modules_out(),
        "again": edges.a_module_that_runs_twice(),
        "broken": edges.a_backward_pass_that_breaks_off(),
        "fails": edges.a_part_that_fails(),
        "refusals": edges.refusals(),
        "models": what_models_do(),
    }
