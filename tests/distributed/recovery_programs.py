"""Overflow, divergence and checkpoints on real ranks; importable, because processes are spawned."""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync.checkpoint.reshard import state_like
from tests.attaching import attach

from . import checkpoint_programs
from .small_model import batch, flat, model, same_everywhere, train

OVERFLOWS = {3: 1, 4: 0, 9: 2}  # step: rank


def _steps(ddp: Any, optimizer: Any, steps: range, scaler: Any = None) -> list[torch.Tensor]:
    """Train with an overflow on one rank at some steps; return the weights after every step."""
    weights = []
    for step in steps:
        x, y = batch(step)
        if OVERFLOWS.get(step) == dist.get_rank():
            x[0, 0] = torch.inf
        optimizer.zero_grad()
        loss = (ddp(x) - y).pow(2).mean()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        weights.append(flat(ddp))
    return weights


def grad_scaler() -> dict[str, bool]:
    """A GradScaler skips on all ranks, backs off and grows; training is as without one, bit for bit."""
    result = {}
    for algorithm in ("oktopk", "budgeted"):
        runs = {}
        for scaled in (False, True):
            ddp = DistributedDataParallel(model(), bucket_cap_mb=0.001)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)
            options = {"scaler": scaler} if scaled else {"nonfinite": "skip"}
            sync = attach(ddp, algorithm, density=0.1, timeout=30, **options)
            runs[scaled] = _steps(ddp, optimizer, range(12), scaler if scaled else None)
            if scaled:
                scales, skipped = scaler.get_scale(), sync.stats()["skipped_steps"]
                result[f"{algorithm}: skipped"] = skipped == len(OVERFLOWS)
                result[f"{algorithm}: backed off and grew"] = scales == 2.0**11
                result[f"{algorithm}: state has the scale"] = sync.state_dict()["scale"] > 1
                kept = runs[True]
                for step in OVERFLOWS:
                    result[f"{algorithm}: step {step} passed"] = torch.equal(
                        kept[step], kept[step - 1]
                    )
            sync.close()
        same = all(map(torch.equal, runs[False], runs[True]))
        result[f"{algorithm}: as without a scaler"] = same
        result[f"{algorithm}: replicas equal"] = same_everywhere(runs[True][-1])
        result[f"{algorithm}: finite"] = bool(runs[True][-1].isfinite().all())
    return result


def _attached(policy: str, **options: Any) -> tuple[Any, Any]:
    ddp = DistributedDataParallel(model())
    sentinel = sparsync.Sentinel(period=2, policy=policy)
    return ddp, attach(ddp, "oktopk", density=0.1, timeout=30, sentinel=sentinel, **options)


def _flip(ddp: Any, rank: int) -> None:
    if dist.get_rank() == rank:
        with torch.no_grad():
            ddp.module[2].bias[3] += 1e-6


def sentinel() -> dict[str, Any]:
    """A bit that flips on one rank is found when the period closes: named, or healed."""
    result: dict[str, Any] = {}
    ddp, sync = _attached("raise")
    train(ddp, range(2))
    _flip(ddp, 1)
    try:
        train(ddp, range(2, 4))
        result["raised"] = ""
    except sparsync.PeerError as error:
        result["raised"] = str(error)
    sync.close()
    ddp, sync = _attached("heal")
    train(ddp, range(2))
    _flip(ddp, 2)
    train(ddp, range(2, 3))  # the period closes with the next backward pass
    apart = not same_everywhere(flat(ddp))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(ddp, range(3, 4))
    result["healed"] = apart and same_everywhere(flat(ddp))
    result["said"] = [str(w.message) for w in said if "sentinel" in str(w.message)]
    train(ddp, range(4, 6))
    result["stays"] = same_everywhere(flat(ddp))
    sync.close()
    return result


def batch_norm() -> bool:
    """Statistics that are each rank's own raise no alarm, however DDP treats buffers."""
    for broadcast in (True, False):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))
        ddp = DistributedDataParallel(net, broadcast_buffers=broadcast)
        sync = attach(
            ddp, density=0.1, timeout=30, sentinel=sparsync.Sentinel(period=1, policy="raise")
        )
        train(ddp, range(4))
        if same_everywhere(net[1].running_mean):
            return False  # they differ: the test would say nothing
        sync.close()
    return True


def refusals() -> dict[str, str]:
    """What differs between ranks when they attach is named."""
    said, rank = {}, dist.get_rank()

    def refuse(name: str, ddp: Any, **options: Any) -> None:
        try:
            attach(ddp, "oktopk", density=0.1, timeout=30, **options)
        except sparsync.SparsyncError as error:
            said[name] = f"{type(error).__name__}: {error}"

    ddp = DistributedDataParallel(model())
    _flip(ddp, 1)
    refuse("weights", ddp)
    true = torch.__version__
    try:
        if rank == 2:
            torch.__version__ = "1.0.0"
        refuse("versions", DistributedDataParallel(model()))
    finally:
        torch.__version__ = true
    every = sparsync.Sentinel(period=5 + rank)
    refuse("sentinel", DistributedDataParallel(model()), sentinel=every)
    scaler = torch.amp.GradScaler("cpu")
    refuse("skip", DistributedDataParallel(model()), scaler=scaler, nonfinite="skip")
    refuse("no scaler", DistributedDataParallel(model()), scaler=2.0)
    return said


def checkpoints(folder: str) -> dict[str, bool]:
    """Save, go on, load into a fresh job with other buckets, go on: the same bits."""
    ends = []
    for fresh in (False, True):
        ddp = DistributedDataParallel(model(seed=fresh), bucket_cap_mb=0.001 if fresh else 25)
        sync = attach(ddp, "oktopk", density=0.1, timeout=30, threshold_period=4)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        saved = {"model": ddp.module, "optimizer": optimizer}
        if fresh:
            epoch = sparsync.load(sync, folder, **saved)["epoch"]
        else:
            train(ddp, range(3), optimizer)
            sparsync.save(sync, folder, epoch=1, **saved)
        train(ddp, range(3, 8), optimizer)
        ends.append(flat(ddp))
        sync.close()
    return {"bit for bit": torch.equal(*ends), "epoch": epoch == 1}


def _everyone(state: Any) -> list[Any]:
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, state)
    return states


def _fsdp(replicas: int, shards: int) -> tuple[Any, Any]:
    mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))
    net = model()
    fully_shard(net, mesh=mesh["shard"])
    sync = attach(net, "oktopk", density=0.1, timeout=30, replicate=mesh["replicate"])
    return net, sync


def ddp_and_fsdp(folder: str) -> dict[str, bool]:
    """DDP's residuals move to FSDP2 and back: the same per parameter; training goes on alike."""
    result = {}
    ddp = DistributedDataParallel(model())
    sync = attach(ddp, "oktopk", density=0.1, timeout=30)
    train(ddp, range(3))
    states = _everyone(sync.state_dict())
    sparsync.save(sync, folder)
    weights = {name: value.clone() for name, value in ddp.module.state_dict().items()}
    train(ddp, range(3, 6))
    world = dist.get_world_size()

    net, resumed = _fsdp(world, 1)
    _put(net, weights)
    sparsync.load(resumed, folder)
    mine, before = resumed.state_dict()["residual"], states[dist.get_rank()]["residual"]
    result["same residual per parameter"] = all(torch.equal(mine[n], before[n]) for n in before)
    train(net, range(3, 6))
    whole = torch.cat([p.full_tensor().flatten() for p in net.parameters()]).detach()
    result["goes on alike"] = torch.allclose(whole, flat(ddp), atol=1e-6)
    resumed.close()

    net, divided = _fsdp(2, 2)
    _put(net, weights)
    sparsync.load(divided, folder)
    divided_again = f"{folder}/divided"
    sparsync.save(divided, divided_again)
    parts = _everyone(divided.state_dict())
    back = [
        state_like({**states[0], "rank": r}, sparsync.reshard(parts, world)) for r in range(world)
    ]
    for name in before:
        owed = sum(state["residual"][name].double() for state in states)
        kept = sum(state["residual"][name].double() for state in back)
        result[f"{name}: the sum is kept"] = torch.allclose(owed, kept, atol=1e-6)
    sparsync.load(sync, divided_again)
    owed = sum(state["residual"]["0.weight"].double() for state in states)
    kept = sum(state["residual"]["0.weight"].double() for state in _everyone(sync.state_dict()))
    result["files: the sum is kept"] = torch.allclose(owed, kept, atol=1e-6)
    train(net, range(3, 5))
    result["divided goes on"] = divided.stats()["steps"] == 5
    divided.close()
    sync.close()
    return result


def _put(net: Any, weights: dict[str, torch.Tensor]) -> None:
    from torch.distributed.tensor import distribute_tensor

    with torch.no_grad():
        for name, parameter in net.named_parameters():
            placed = distribute_tensor(weights[name], parameter.device_mesh, parameter.placements)
            parameter.copy_(placed)


def everything(folder: str) -> dict[str, Any]:
    return {
        "grad scaler": grad_scaler(),
        "sentinel": sentinel(),
        "batch norm": batch_norm(),
        "refusals": refusals(),
        "checkpoints": checkpoints(folder),
        "fsdp": ddp_and_fsdp(f"{folder}/ddp"),
        "faults": _everyone(checkpoint_programs.everything(f"{folder}/faults")),
    }
