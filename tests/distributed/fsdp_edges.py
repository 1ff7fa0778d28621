"""Rare situations of FSDP2 inside replicas; importable, because processes are spawned."""

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync.integrations.shards import local_of
from tests.attaching import attach

from .fsdp_programs import (
    Net,
    attached,
    flat,
    flat_gradient,
    grid,
    loss_of,
    residuals,
    sharded,
    train,
)
from .small_model import same_everywhere


def resume_is_exact(directory: Path) -> dict[str, bool]:
    """Save after 3 steps on every rank, load into fresh modules, continue."""
    mesh, result = grid(2, 2), {}
    through, first, second = sharded(mesh), sharded(mesh), sharded(mesh, Net(seed=1))
    syncs = [attached(net, mesh, threshold_period=4) for net in (through, first, second)]
    train(through, range(8))
    train(first, range(3))
    path = directory / f"{dist.get_rank()}.pt"
    torch.save(syncs[1].state_dict(), path)
    for mine, theirs in zip(second.parameters(), first.parameters(), strict=True):
        mine.detach().to_local().copy_(theirs.detach().to_local())
    state = torch.load(path, weights_only=True)
    syncs[2].load_state_dict(state)
    train(second, range(3, 8))
    result["exact"] = torch.equal(flat(second), flat(through))
    rows = state["pieces"]["table.weight"]
    first_row = 0 if mesh["shard"].get_local_rank() == 0 else 6
    result["pieces"] = rows["shape"] == [11, 7] and rows["offset"] == [first_row, 0]
    result["keys"] = state["residual"]["table.weight"].shape == (rows["size"][0] * 7,)
    rows["offset"] = [1, 0]
    try:
        syncs[2].load_state_dict(state)
        result["another shard's is refused"] = False
    except sparsync.ConfigurationError as error:
        result["another shard's is refused"] = "'table.weight'" in str(error)
    for sync in syncs:
        sync.close()
    return result


def nonfinite_policies() -> dict[str, bool]:
    """Infinite weights' gradients on one rank of one shard: no rank of any shard applies the step."""
    result, mesh = {}, grid(2, 2)
    for policy in ("raise", "skip", "propagate"):
        net = sharded(mesh)
        poison = Poison(net.table.weight)  # its hook comes before sparsync's
        sync = attached(net, mesh, nonfinite=policy, unit_bytes=100)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        train(net, range(2), optimizer)
        before, weights = residuals(sync), flat(net)
        optimizer.zero_grad()
        poison.on, raised = dist.get_rank() == 1, ""  # the other shards' gradients are finite
        try:
            loss_of(net, 2).backward()
        except sparsync.NonFiniteGradientError as error:
            raised = str(error)
        poison.on = False
        if policy == "raise":
            result["raise: raised"] = "'table.weight'" in raised
        elif policy == "skip":
            optimizer.step()
            result["skip: nothing moved"] = not raised and torch.equal(flat(net), weights)
        else:
            result["propagate: visible"] = not bool(flat_gradient(net).isfinite().any())
            optimizer.zero_grad()
        after = residuals(sync)
        result[f"{policy}: residuals untouched"] = all(map(torch.equal, before, after))
        result[f"{policy}: counted"] = sync.stats()["skipped_steps"] == 1
        train(net, range(3, 5), optimizer)
        healthy = bool(flat(net).isfinite().all())
        result[f"{policy}: goes on"] = same_everywhere(flat(net)) and healthy
        sync.close()
    return result


class Poison:
    """Spoils one element of this rank's shard of a gradient, as an overflow would."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self.on = False
        parameter.register_post_accumulate_grad_hook(self.spoil)

    def spoil(self, parameter: torch.Tensor) -> None:
        if self.on:
            assert parameter.grad is not None
            local_of(parameter.grad).view(-1)[0] = float("nan")


def mixed_precision(policy: Any) -> dict[str, bool]:
    """16-bit computation, reduced over the shards in 32 or 16 bits; float16 is divided in two steps."""
    result, mesh = {}, grid(2, 2)
    for name, reduce_dtype in {
        "32": torch.float32,
        "16": torch.bfloat16,
        "half": torch.float16,
    }.items():
        plain = Net()
        dtype = torch.float16 if name == "half" else torch.bfloat16
        net = sharded(mesh, mp_policy=policy(param_dtype=dtype, reduce_dtype=reduce_dtype))
        sync = attached(net, mesh, density=1.0, algorithm="allgather")
        for step in range(3):
            net.zero_grad()
            loss_of(net, step).backward()
        ddp = DistributedDataParallel(plain)
        loss_of(ddp, 2).backward()
        near = torch.allclose(flat_gradient(net), flat_gradient(ddp), atol=0.02, rtol=0.05)
        result[name] = near and same_everywhere(flat_gradient(net))
        sync.close()
    return result


def a_replica_that_leaves_modules_out() -> dict[str, bool]:
    """``rare`` runs on the first replica only: it counts as zero on the other, and nothing hangs."""
    mesh = grid(2, 2)
    first = mesh["replicate"].get_local_rank() == 0
    net, ddp = sharded(mesh), DistributedDataParallel(Net(), find_unused_parameters=True)
    sync = attached(net, mesh, algorithm="allgather", density=1.0, unit_bytes=100)
    for model in (net, ddp):
        loss_of(model, 0, rare=first).backward()
    some = torch.allclose(flat_gradient(net), flat_gradient(ddp), atol=1e-6)
    net.zero_grad()
    loss_of(net, 1, rare=False).backward()
    none = net.rare.weight.grad is None
    sync.close()
    return {"on one replica": some, "on none: no gradient": none}


class Twice(Net):
    """Runs ``out`` twice, each a reduce-scatter of its own."""

    def forward(self, x: torch.Tensor, *, rare: bool = True) -> torch.Tensor:
        hidden = torch.tanh(self.hidden(self.table(x))) * self.gain
        return self.out(hidden) + self.out(2 * hidden) + self.rare(hidden)


def a_module_that_runs_twice() -> dict[str, Any]:
    mesh, ddp = grid(2, 2), DistributedDataParallel(Twice())
    loss_of(ddp, 0).backward()
    result = {}
    for overlap in (False, True):
        net = sharded(mesh, Twice())
        sync = attached(net, mesh, algorithm="allgather", density=1.0, overlap=overlap)
        loss_of(net, 0).backward()
        near = torch.allclose(flat_gradient(net), flat_gradient(ddp), atol=1e-6)
        result[f"overlap={overlap}"] = near
        sync.close()
    return result


def a_backward_pass_that_breaks_off() -> dict[str, bool]:
    """What the user's own code raises leaves residuals, and the next step, as they would have been."""
    mesh = grid(2, 2)
    ends = []
    for breaks in (False, True):
        net = sharded(mesh)
        sync = attached(net, mesh, unit_bytes=100)
        train(net, range(2))
        if breaks:
            net.zero_grad()
            hook = net.out.register_full_backward_pre_hook(_give_up)
            try:
                loss_of(net, 2).backward()
            except KeyError:
                net.reset_iter_state()
            hook.remove()
        before = residuals(sync) if not breaks else None
        state = sync.state_dict()["residual"]
        train(net, range(2, 5))
        ends.append((flat(net), state, before))
        sync.close()
    (through, kept, _), (broken, restored, _) = ends
    return {
        "goes on": torch.equal(through, broken),
        "residuals": all(torch.equal(kept[name], restored[name]) for name in kept),
    }


def _give_up(module: Any, gradients: Any) -> None:
    raise KeyError("a user's error")


def a_part_that_fails() -> dict[str, bool]:
    """When the exchange of one shard fails, the ranks of the others are told at once; all go on after."""
    mesh = grid(2, 2)
    net = sharded(mesh)
    sync = attached(net, mesh, unit_bytes=100)
    train(net, range(2))
    before, exchange, broken = (
        residuals(sync),
        sync.reducer.exchange,
        mesh["shard"].get_local_rank(),
    )

    async def failing(unit: int) -> None:
        raise sparsync.PeerError(f"unit {unit}: the other replica is gone")

    sync.reducer.exchange = failing if broken == 0 else exchange
    started, said = time.monotonic(), ""
    try:
        loss_of(net, 2).backward()
    except sparsync.PeerError as error:
        said = str(error)
    sync.reducer.exchange = exchange
    result = {
        "own error": ("the other replica is gone" in said) == (broken == 0),
        "told": ("exchange of part 0 of this replica failed" in said) == (broken == 1),
        "at once": time.monotonic() - started < 15,  # of a timeout of 30
        "residuals untouched": all(map(torch.equal, before, residuals(sync))),
    }
    train(net, range(2, 4))
    result["goes on"] = same_everywhere(flat(net))
    sync.close()
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, result)
    return {name: all(answer[name] for answer in answers) for name in result}


def refusals() -> dict[str, str]:
    """Collect the messages of what must be refused."""
    said, mesh = {}, grid(2, 2)

    def refuse(name: str, make: Any, run: Any = None, **changes: Any) -> None:
        try:
            sync = attached(make(), mesh, **changes)
        except sparsync.SparsyncError as error:
            said[name] = f"{type(error).__name__}: {error}"
            return
        try:
            run(sync)
        except sparsync.SparsyncError as error:
            said[name] = f"{type(error).__name__}: {error}"
        finally:
            sync.close()

    refuse("native HSDP", lambda: fully_shard(Net(), mesh=mesh))
    refuse("clip", lambda: sharded(mesh), correction=sparsync.Correction(clip=1.0))
    refuse("DDP", lambda: DistributedDataParallel(Net()))
    refuse("parts disagree", lambda: sharded(mesh), density=0.1 * (1 + dist.get_rank() % 2))
    nets = [sharded(mesh)]
    refuse("second attach", lambda: nets[0], lambda sync: attached(nets[0], mesh))
    refuse("step without schedule", lambda: sharded(mesh), lambda sync: sync.step())
    seed = dist.get_rank() // 2
    nets.append(sharded(mesh, Net(seed)))
    refuse("other weights", lambda: nets[1], lambda sync: loss_of(nets[1], 0).backward())
    nets.append(sharded(mesh))
    refuse("replaced", lambda: nets[2], lambda sync: _replace(nets[2]))
    nets.append(Net())
    options = {"replicate": mesh, "timeout": 30}
    try:
        attach(nets[3], **options)
    except sparsync.ConfigurationError as error:
        said["two dimensions"] = str(error)
    return said


def _replace(net: Any) -> None:
    fresh = {name: p.detach().clone() for name, p in net.named_parameters()}
    net.load_state_dict(fresh, assign=True)
    for step in range(2):
        loss_of(net, step).backward()
