"""Scenarios of two nodes of two ranks, dense inside and sparse between; for spawned processes."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import sparsync
from tests.attaching import attach

from .small_model import batch, flat, model, same_everywhere, train


def nodes() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "ranks"))


def attached(ddp: DistributedDataParallel, **changes: Any) -> Any:
    options = {"algorithm": "oktopk", "density": 0.1, "timeout": 30, **changes}
    return attach(ddp, **{"hierarchy": nodes(), **options})


def nodes_train() -> dict[str, bool]:
    """Replicas stay equal bit for bit; at density 1 they are what dense DDP trains."""
    reference = DistributedDataParallel(model())
    train(reference, range(6))
    result, ends = {}, {}
    settings: dict[str, dict[str, Any]] = {
        "everything": {"algorithm": "allgather", "density": 1.0},
        "everything, in units": {"algorithm": "allgather", "density": 1.0, "unit_bytes": 700},
        "oktopk": {},
        "by the launcher": {"hierarchy": "node"},
        "budgeted, in units": {"algorithm": "budgeted", "unit_bytes": 700},
        "gloo": {"transport": "torch", "unit_bytes": 700},
    }
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    for name, options in settings.items():
        ddp = DistributedDataParallel(model(), bucket_cap_mb=0.001)
        sync = attached(ddp, **options)
        train(ddp, range(6))
        ends[name] = flat(ddp)
        result[f"{name}: replicas equal"] = same_everywhere(ends[name])
        near = torch.allclose(ends[name], flat(reference), atol=1e-6)
        result[f"{name}: as DDP"] = near == name.startswith("everything")
        sync.close()
    result["two ways to say it"] = torch.equal(ends["oktopk"], ends["by the launcher"])
    return result


def nothing_is_lost() -> bool:
    """With fixed weights: sum of averages + mean of what is left == sum of dense averages."""
    ddp, dense = DistributedDataParallel(model()), DistributedDataParallel(model())
    sync = attached(ddp, density=0.05, algorithm="budgeted", unit_bytes=700)
    wanted, got = (torch.zeros(flat(ddp).numel()) for _ in range(2))
    for step in range(5):
        for net, into in ((dense, wanted), (ddp, got)):
            net.zero_grad()
            x, y = batch(step)
            (net(x) - y).pow(2).mean().backward()
            into += torch.cat([p.grad.flatten() for p in net.parameters()])
    state, start, left = sync.state_dict(), 0, torch.zeros_like(got)
    for name, parameter in ddp.module.named_parameters():
        piece = state["pieces"].get(name)
        if piece is not None:
            first = start + piece["offset"][0]
            left[first : first + piece["size"][0]] = state["residual"][name]
        start += parameter.numel()
    before = torch.allclose(got, wanted, atol=1e-5)
    dist.all_reduce(left)  # each rank of a node holds its own part: their sum over two nodes
    sync.close()
    return torch.allclose(got + left / 2, wanted, atol=1e-5) and not before


def bytes_are_booked() -> dict[str, bool]:
    """Between nodes a rank sends its part; inside, twice half of everything."""
    ddp = DistributedDataParallel(model())
    sync = attached(ddp, algorithm="allgather", density=0.1)
    train(ddp, range(3))
    stats = sync.stats()
    size = flat(ddp).numel()
    inner = stats["inner"]
    sync.close()
    return {
        "half of the elements": stats["units"][0]["size"] == (size + 1) // 2,
        "between nodes": 0 < stats["bytes_sent_per_step_max"] < 0.1 * size * 8,
        "inside": inner["node reduce-scatter"]["sent"] == 3 * 4 * ((size + 1) // 2),
        "inside, back": inner["node allgather"]["sent"] == 3 * 4 * ((size + 1) // 2),
        "no mixture": not any("node" in phase for phase in stats["phases"]),
    }


def nodes_resume(directory: Path) -> dict[str, bool]:
    through, first = (DistributedDataParallel(model()) for _ in range(2))
    options = {"threshold_period": 4, "correction": sparsync.Correction(0.9, weight_decay=0.01)}
    syncs = [attached(through, **options), attached(first, **options)]
    train(through, range(7))
    train(first, range(3))
    path = directory / f"node-{dist.get_rank()}.pt"
    torch.save({"net": first.module.state_dict(), "sync": syncs[1].state_dict()}, path)
    saved = torch.load(path, weights_only=True)
    fresh = model(seed=1)
    fresh.load_state_dict(saved["net"])
    second = DistributedDataParallel(fresh, bucket_cap_mb=0.001)
    syncs.append(attached(second, **options))
    syncs[2].load_state_dict(saved["sync"])
    train(second, range(3, 7))
    plain = DistributedDataParallel(model())
    whole = attach(plain, "oktopk", density=0.1, timeout=30, threshold_period=4)
    try:
        whole.load_state_dict(saved["sync"])
        refused = False
    except sparsync.ConfigurationError:
        refused = True
    for sync in (*syncs, whole):
        sync.close()
    return {"exact": torch.equal(flat(second), flat(through)), "elsewhere refused": refused}


def a_node_refuses() -> dict[str, bool]:
    """NaN in one element of one rank: ranks that exchange other elements refuse as well."""
    result = {}
    for policy in ("raise", "skip", "propagate"):
        ddp = DistributedDataParallel(model())
        sync = attached(ddp, nonfinite=policy, unit_bytes=700)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        train(ddp, range(2), optimizer)
        before = [r.accumulated.clone() for r in sync.reducer.residuals]
        weights, raised = flat(ddp), ""
        optimizer.zero_grad()
        x, y = batch(2)
        spoil = torch.ones(5)
        spoil[0] = float("nan") if dist.get_rank() == 2 else 1.0  # not in the second rank's part
        hook = ddp.module[3].bias.register_hook(lambda g, spoil=spoil: g * spoil)
        try:
            (ddp(x) - y).pow(2).mean().backward()
        except sparsync.NonFiniteGradientError as error:
            raised = str(error)
        hook.remove()
        if policy == "raise":
            result["raise: raised"] = "'3.bias'" in raised
        elif policy == "skip":
            optimizer.step()
            result["skip: nothing moved"] = not raised and torch.equal(flat(ddp), weights)
        else:
            grads = torch.cat([p.grad.flatten() for p in ddp.parameters()])
            result["propagate: visible"] = not bool(grads.isfinite().any())
            optimizer.zero_grad()
        after = [r.accumulated for r in sync.reducer.residuals]
        result[f"{policy}: residuals untouched"] = all(map(torch.equal, before, after))
        train(ddp, range(3, 5), optimizer)
        result[f"{policy}: goes on"] = same_everywhere(flat(ddp))
        sync.close()
    return result


def refusals() -> dict[str, str]:
    said: dict[str, str] = {}
    changes: dict[str, dict[str, Any]] = {
        "clip": {"correction": sparsync.Correction(clip=1.0)},
        "a word": {"hierarchy": "rack"},
        "three to a node": {"hierarchy": "node"},
        "one dimension": {"hierarchy": nodes()["ranks"]},
        "inside a node": {"density": 0.1 * (1 + dist.get_rank() % 2)},
        "replicate": {"replicate": nodes()["nodes"]},
    }
    os.environ["LOCAL_WORLD_SIZE"] = "3"
    for name, options in changes.items():
        try:
            attached(DistributedDataParallel(model()), **options)
        except sparsync.SparsyncError as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def everything_about_nodes(directory: str) -> dict[str, Any]:
    return {
        "training": nodes_train(),
        "law": {"holds": nothing_is_lost()},
        "bytes": bytes_are_booked(),
        "resume": nodes_resume(Path(directory)),
        "nonfinite": a_node_refuses(),
        "refusals": refusals(),
    }
