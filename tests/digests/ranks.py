"""What two real processes compute; importable, because they are spawned, all cases by one start."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.on_ranks import gathered

from . import gradients, subject
from .canonical import sha

__all__ = ["RANKS", "SAME", "averaged", "rows"]

Digests = dict[str, str]
RANKS = 2
# rows of virtual ranks that real ones repeat; not "auto": it asks the clock, which is virtual there
SAME = [
    *(name for name in subject.PRESETS if name != "auto"),
    "budgeted, 3 units",
    "oktopk, warm-up, 3 units",
    "budgeted, int8",
    "budgeted, momentum",
    "oktopk, periods of 2",
    "redsync, layers",
    "redsync-quantized, layers",
]

_COMPARED = ("lost", "residuals", "state")
_STEPS = 4
_ATTACHED: dict[str, dict[str, Any]] = {
    "budgeted": {},
    "budgeted, units, momentum": {
        "algorithm": "budgeted",
        "unit_bytes": 2048,
        "correction": subject.Correction(momentum=0.9),
    },
    "oktopk": {},
    "redsync": {"compress_thd": 512},
    "sparcml": {},
    "allgather": {},
    "halving": {},
}
_LOCAL: dict[str, tuple[str, dict[str, Any]]] = {
    "signs": ("signs", {"period": 2}),
    "budgeted": ("budgeted", {"period": 2}),
    "oktopk": ("oktopk", {"period": 1, "warmup_steps": 2}),
    "dense": ("dense", {"period": 3}),
}
_UPDATES: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (subject.UpdateSpaceSGD, {"lr": 0.1}),
    "sgd, budgeted": (subject.UpdateSpaceSGD, {"lr": 0.1, "algorithm": "budgeted"}),
    "adamw": (subject.UpdateSpaceAdamW, {"lr": 0.01}),
    "adamw, frozen": (
        subject.UpdateSpaceAdamW,
        {"lr": 0.01, "second_moment": "frozen", "warmup_steps": 2},
    ),
    "adamw, refreshed": (
        subject.UpdateSpaceAdamW,
        {"lr": 0.01, "second_moment": "refreshed", "refresh_period": 2, "algorithm": "budgeted"},
    ),
}
# those whose ranks wait for each other: the others depend on who is late
_SCHEMES: dict[str, dict[str, Any]] = {
    "allreduce": {},
    "local": {"period": 3},
    "dpsgd": {},
    "sgp": {},
    "bmuf": {"period": 2},
    "diloco": {"period": 2},
    "qsparse-local": {"period": 2, "density": 0.1},
    "sparseloco": {"period": 2},
}


def rows() -> dict[str, Digests]:
    """Train in every way, and average what virtual ranks average."""
    torch.set_num_threads(1)
    table: dict[str, Digests] = {}
    for name, digests in _training():
        table[name] = {key: sha(gathered(sha(value))) for key, value in digests.items()}
    return {**table, **averaged("torch"), **averaged("zmq")}


def averaged(transport: str) -> dict[str, Digests]:
    """Do what virtual ranks do; return what must be equal to theirs."""
    torch.set_num_threads(1)
    table = {}
    for name in SAME:
        with closing(subject.connect_group(transport=transport, timeout=60)) as comm:
            digests = subject.run(gradients.steps_of(comm, name))
        everyone = gathered(digests)
        row = f"gradients: {name}: {dist.get_world_size()} ranks over {transport}"
        table[row] = {key: sha([one[key] for one in everyone]) for key in _COMPARED}
        table[row]["averages"] = digests["averages"]
    return table


def _training() -> Iterator[tuple[str, dict[str, Any]]]:
    for transport in ("torch", "zmq"):
        for name, options in _ATTACHED.items():
            settings = {"algorithm": name, "transport": transport, **options}
            net = DistributedDataParallel(_model())
            yield f"attached: {name}: {transport}", _attached(net, **settings)
    yield "attached: replicas: budgeted", _attached(_model(), replicate=dist.group.WORLD)
    for name, (algorithm, options) in _LOCAL.items():
        for adam in (False, True):
            kind = "AdamW" if adam else "SGD"
            yield f"local updates: {name}, {kind}", _local(algorithm, options, adam)
    for name, (make, options) in _UPDATES.items():
        yield f"updates: {name}", _updates(make, options)
    for name, options in _SCHEMES.items():
        yield f"bound: {name}", _bound(name, options)


def _attached(net: Any, **options: Any) -> dict[str, Any]:
    arguments = {"density": 0.05, "timeout": 60, **options}
    with closing(subject.attach(net, **arguments)) as sync:
        losses = _train(net, torch.optim.SGD(net.parameters(), lr=0.1))
        return {"losses": losses, "weights": _flat(net), "state": sync.state_dict()}


def _local(algorithm: str, options: dict[str, Any], adam: bool) -> dict[str, Any]:
    model = _model()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if adam:
        optimizer = subject.LocalAdamW(model.parameters(), RANKS, lr=0.01)
    with closing(subject.connect_group(transport="torch", timeout=60)) as comm:
        local = subject.OuterStep(
            model, algorithm=algorithm, residual="weights", density=0.05, comm=comm, **options
        )
        losses = _train(model, optimizer, local.step, steps=7)
        weights = _flat(model)
        local.finish()
    return {"losses": losses, "weights": weights, "end": _flat(model)}


def _updates(make: Any, options: dict[str, Any]) -> dict[str, Any]:
    model = _model()
    with closing(subject.connect_group(transport="torch", timeout=60)) as comm:
        optimizer = make(model, density=0.05, comm=comm, **options)
        losses = _train(model, optimizer, steps=6)
        return {"losses": losses, "weights": _flat(model), "state": optimizer.state_dict()}


def _bound(scheme: str, options: dict[str, Any]) -> dict[str, Any]:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with closing(subject.connect_group(transport="torch", timeout=60)) as comm:
        averager = subject.SCHEMES[scheme](
            model, comm=comm, optimizer=optimizer, moments="average", **options
        )
        losses = _train(model, optimizer, averager.step, steps=7)
        weights, state = _flat(model), copy.deepcopy(averager.state_dict())
        del state["scheme"]  # a name
        averager.finish()
    return {"losses": losses, "weights": weights, "state": state, "end": _flat(model)}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 30), nn.Linear(30, 5))


def _train(model: nn.Module, optimizer: Any, then: Any = None, steps: int = _STEPS) -> list[float]:
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        x = torch.randn(8, 20, generator=generator)
        optimizer.zero_grad()
        loss = (model(x) - x[:, :5].sin()).pow(2).mean()
        loss.backward()
        optimizer.step()
        if then is not None:
            then()
        losses.append(float(loss.detach()))
    return losses


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()
