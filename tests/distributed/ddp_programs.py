"""Scenarios of the DDP hook; importable, because processes are spawned."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync_papers.optimizers import UpdateSpaceSGD
from tests.attaching import attach

from . import ddp_edges as edges
from .small_model import batch, flat, model, same_everywhere, train


def ddp_settings() -> dict[str, bool]:
    """Train under each DDP setting; with one unit all settings must agree bit for bit."""
    settings: dict[str, dict[str, Any]] = {
        "default": {},
        "several buckets": {"bucket_cap_mb": 0.001},
        "one big bucket": {"bucket_cap_mb": 100},
        "gradient_as_bucket_view": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001},
        "static_graph": {"static_graph": True, "bucket_cap_mb": 0.001},
        "find_unused_parameters": {"find_unused_parameters": True},
    }
    ends, equal = {}, {}
    for name, options in settings.items():
        ddp = DistributedDataParallel(model(), **options)
        sync = attach(ddp, "oktopk", density=0.1, timeout=30)
        train(ddp, range(6))
        ends[name] = flat(ddp)
        equal[name] = same_everywhere(ends[name])
        sync.close()
    result = {f"{name}: replicas equal": value for name, value in equal.items()}
    for name, end in ends.items():
        result[f"{name}: as default"] = torch.equal(end, ends["default"])
    return result


def no_sync_accumulates() -> bool:
    """Gradient accumulation under no_sync equals one backward of the summed loss."""
    ends = []
    for accumulate in (True, False):
        ddp = DistributedDataParallel(model())
        sync = attach(ddp, "oktopk", density=0.1, timeout=30)
        (x, y), (u, v) = batch(0), batch(1)
        if accumulate:
            with ddp.no_sync():
                (ddp(x) - y).pow(2).mean().backward()
            (ddp(u) - v).pow(2).mean().backward()
        else:
            ((ddp(torch.cat([x, u])) - torch.cat([y, v])).pow(2).mean() * 2).backward()
        ends.append(torch.cat([p.grad.flatten() for p in ddp.parameters()]))
        sync.close()
    return torch.allclose(ends[0], ends[1], atol=1e-6) and bool((ends[0] != 0).sum() > 10)


class Branching(torch.nn.Module):
    """Uses ``rare`` only when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.always = torch.nn.Linear(20, 5)
        self.rare = torch.nn.Linear(20, 5)

    def forward(self, x: torch.Tensor, *, rare: bool) -> torch.Tensor:
        return self.always(x) + (self.rare(x) if rare else 0.0)


def unused_parameters_lose_nothing() -> dict[str, bool]:
    """Residual mass of a parameter that no rank uses is delivered, and reaches its gradient."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Branching(), find_unused_parameters=True)
    sync = attach(ddp, "oktopk", density=0.05, timeout=30)
    reducer = sync.reducer
    x, y = batch(0)
    (ddp(x, rare=True) - y).pow(2).mean().backward()  # leaves residual on ``rare``
    conserved = True
    delivered_to_rare = torch.zeros(())
    for step in range(1, 30):
        before = reducer.residuals[0].value.clone()
        ddp.zero_grad()
        x, y = batch(step)
        (0.01 * (ddp(x, rare=False) - y).pow(2).mean()).backward()
        gradients = torch.cat(
            [
                (torch.zeros_like(p) if p.grad is None else p.grad).flatten()
                for p in ddp.parameters()
            ]
        )
        rare = [p.grad for p in ddp.module.rare.parameters() if p.grad is not None]
        delivered_to_rare = delivered_to_rare + sum(g.abs().sum() for g in rare)
        # sum(residual before) + sum(gradients) == P * average + sum(residual after), on ``rare``
        sums = torch.stack([before, reducer.residuals[0].value])
        dist.all_reduce(sums)
        part = slice(105, 210)  # the elements of ``rare``, whose own gradients are zero
        world_size = dist.get_world_size()
        conserved &= torch.allclose(
            sums[0][part], sums[1][part] + world_size * gradients[part], atol=1e-5
        )
    sync.close()
    return {"conserved": bool(conserved), "delivered": bool(delivered_to_rare > 0)}


def resume_is_exact(directory: str) -> dict[str, bool]:
    """Save after 3 steps, load into a new process group member with other buckets, continue."""
    result = {}
    for algorithm in ("oktopk", "oktopk-paper", "allgather"):
        options = {} if algorithm == "allgather" else {"threshold_period": 4}
        through, first = (DistributedDataParallel(model()) for _ in range(2))
        sync = attach(through, algorithm, density=0.1, timeout=30, **options)
        train(through, range(8))
        saved = attach(first, algorithm, density=0.1, timeout=30, **options)
        train(first, range(3))
        path = Path(directory) / f"{algorithm}-{dist.get_rank()}.pt"
        torch.save({"model": first.module.state_dict(), "sync": saved.state_dict()}, path)
        loaded = torch.load(path, weights_only=True)
        fresh = model(seed=1)
        fresh.load_state_dict(loaded["model"])
        second = DistributedDataParallel(fresh, bucket_cap_mb=0.001)
        resumed = attach(second, algorithm, density=0.1, timeout=30, **options)
        resumed.load_state_dict(loaded["sync"])
        train(second, range(3, 8))
        result[algorithm] = torch.equal(flat(second), flat(through))
        result[f"{algorithm}: step"] = resumed.stats()["steps"] == 8
        for handle in (sync, saved, resumed):
            handle.close()
    return result


def nonfinite_policies() -> dict[str, bool]:
    """One rank's NaN: all ranks raise, skip or propagate together; residuals are untouched."""
    result = {}
    for policy in ("raise", "skip", "propagate"):
        ddp = DistributedDataParallel(model(), bucket_cap_mb=0.001)
        sync = attach(ddp, "oktopk", density=0.1, unit_bytes=1000, nonfinite=policy, timeout=30)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        train(ddp, range(2), optimizer)
        before = [r.value.clone() for r in sync.reducer.residuals]
        weights = flat(ddp)
        optimizer.zero_grad()
        x, y = batch(2)
        if dist.get_rank() == 1:
            x[0, 0] = float("inf")
        raised = ""
        try:
            (ddp(x) - y).pow(2).mean().backward()
        except sparsync.NonFiniteGradientError as error:
            raised = str(error)
        if policy == "raise":
            result["raise: raised"] = "parameter '0.weight'" in raised
        elif policy == "skip":
            optimizer.step()
            result["skip: nothing moved"] = raised == "" and torch.equal(flat(ddp), weights)
        else:
            some = [p.grad for p in ddp.parameters()]
            result["propagate: visible"] = not all(bool(g.isfinite().all()) for g in some)
            optimizer.zero_grad()
        after = [r.value for r in sync.reducer.residuals]
        result[f"{policy}: residuals untouched"] = all(map(torch.equal, before, after))
        result[f"{policy}: counted"] = sync.stats()["skipped_steps"] == 1
        train(ddp, range(3, 5), optimizer)
        result[f"{policy}: goes on"] = same_everywhere(flat(ddp)) and bool(
            flat(ddp).isfinite().all()
        )
        sync.close()
    return result


def refusals() -> dict[str, str]:
    """Collect the messages of what attach must refuse."""
    said = {}

    def refuse(name: str, **changes: Any) -> None:
        target = changes.pop("model", None)
        try:
            attach(
                DistributedDataParallel(model()) if target is None else target,
                **{"algorithm": "oktopk", "density": 0.01, "timeout": 30, **changes},
            )
        except sparsync.SparsyncError as error:
            said[name] = f"{type(error).__name__}: {error}"

    refuse("not DDP", model=model())
    refuse("unknown name", algorithm="oktopq")
    refuse("density 0", density=0.0)
    refuse("density 2", density=2)
    refuse("unknown option", treshold_period=3)
    refuse("bad option", threshold_period=0)
    refuse("bad policy", nonfinite="ignore")
    refuse("bad timeout", timeout=float("inf"))
    once = DistributedDataParallel(model())
    sync = attach(once, "oktopk", density=0.01, timeout=30)
    refuse("second attach", model=once)
    sync.close()
    refuse("ranks disagree", density=0.01 * (1 + dist.get_rank()))
    refuse("other cap", cap=None if dist.get_rank() else 1.0)
    refuse("other policy", nonfinite="skip" if dist.get_rank() else "raise")
    refuse("other units", unit_bytes=1000 if dist.get_rank() else 1001)
    return said


def update_space() -> dict[str, bool]:
    """Algorithm 2 to the letter, against a dense simulation of it in this process."""
    net = model()
    optimizer = UpdateSpaceSGD(net, lr=0.1, density=0.1, algorithm="allgather")
    reference, residual = model(), torch.zeros(flat(net).numel())
    k = optimizer.reducer.units[0].entries(0.1)
    lr = 0.1
    for step in range(5):
        lr = 0.1 / (step + 1)
        for group in optimizer.param_groups:
            group["lr"] = lr
        x, y = batch(step)
        for module in (net, reference):
            module.zero_grad()
            (module(x) - y).pow(2).mean().backward()
        optimizer.step()
        gradient = torch.cat([p.grad.flatten() for p in reference.parameters()])
        accumulated = residual + lr * gradient
        chosen = accumulated.abs().topk(k).indices
        sent = torch.zeros_like(accumulated)
        sent[chosen] = accumulated[chosen]
        residual = accumulated - sent
        everyone = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, sent)
        total = torch.zeros_like(sent)
        for share in everyone:
            total = total + share
        with torch.no_grad():
            updated = flat(reference) - total / dist.get_world_size()
            torch.nn.utils.vector_to_parameters(updated, reference.parameters())
    return {
        "equals the reference": torch.allclose(flat(net), flat(reference), atol=1e-7),
        "replicas equal": same_everywhere(flat(net)),
    }


def everything_about_ddp(directory: str) -> dict[str, Any]:
    return {
        "settings": ddp_settings(),
        "no_sync": no_sync_accumulates(),
        "unused": unused_parameters_lose_nothing(),
        "resume": resume_is_exact(directory),
        "nonfinite": nonfinite_policies(),
        "refusals": refusals(),
        "update space": update_space(),
        "odd": edges.odd_parameters(),
        "forgotten": edges.forgotten_handle_ends_its_thread(),
        "different steps": edges.states_of_different_steps(),
        "thawed": edges.thawed_too_late(),
        "auto": edges.the_planner_chooses(),
    }
