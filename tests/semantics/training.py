"""One training, done by every integration, and by one process that has the batches of all ranks.

With everything exchanged (density 1, period 1) all of them are the same training.  With little exchanged
the law holds, on every step: what came in is delivered, or kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync.averaging import LocalSgd

STEPS, RATE, TIMEOUT = 3, 0.1, 20.0
SPARSE = 0.1  # density of the runs that test the law

Named = dict[str, Tensor]


def batch(number: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * number + rank)
    x = torch.randn(8, 20, generator=generator)
    return x, x[:, :5].sin()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 30), nn.Linear(30, 5))


def mean_square(model: nn.Module, number: int, rank: int) -> Tensor:
    x, y = batch(number, rank)
    return (model(x).float() - y).pow(2).mean()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE)


def nothing(model: nn.Module, rank: int) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Case:
    """A way to train.

    Attributes:
        make: the model, equal on all ranks.
        loss: of a model, the number of a micro-batch, and a rank.
        micro: backward passes per step.
        no_sync: all but the last of them under ``no_sync()``.
        ddp: options of DistributedDataParallel.
        wrap: done to what is called: the DDP model, or the plain one.
        wrap_inner: done to the model before DDP wraps it.
        optimizer: made of parameters.
        clip: ``clip_grad_norm_`` before the optimizer's step; None: no.
        set_to_none: of ``zero_grad``.
        before: done before every step, by model and rank.
        tolerance: absolute; of weights, and of the law.
        exact: whether local optimizers are the common one, when everything is exchanged.
    """

    make: Callable[[], nn.Module] = network
    loss: Callable[[nn.Module, int, int], Tensor] = mean_square
    micro: int = 1
    no_sync: bool = True
    ddp: Mapping[str, Any] = field(default_factory=dict)
    wrap: Callable[[Any], Any] = lambda model: model
    wrap_inner: Callable[[Any], Any] = lambda model: model
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd
    clip: float | None = None
    set_to_none: bool = True
    before: Callable[[nn.Module, int], None] = nothing
    tolerance: float = 1e-5
    exact: bool = True


# ---- what is compared -----------------------------------------------------------------------------


def weights(model: nn.Module) -> Named:
    return {plain(n): p.detach().double().clone() for n, p in model.named_parameters()}


def gradients(model: nn.Module) -> Named:
    """Return every gradient, dense; zeros where there is none."""
    found = {}
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        found[plain(name)] = gradient.detach().to_dense().double().clone()
    return found


def residuals(state: Mapping[str, Any], like: Named) -> Named:
    kept = {plain(name): value for name, value in state["residual"].items()}
    return {n: kept.get(n, torch.zeros(v.numel())).double().view(v.shape) for n, v in like.items()}


def plain(name: str) -> str:
    return name.replace("_orig_mod.", "")  # what torch.compile adds


def everywhere(values: Named) -> Named:
    """Sum over ranks."""
    total = torch.cat([value.flatten() for value in values.values()])
    dist.all_reduce(total)
    parts = total.split([value.numel() for value in values.values()])
    return {n: p.view(v.shape) for (n, v), p in zip(values.items(), parts, strict=True)}


def assert_equal_on_all_ranks(values: Named) -> None:
    mine = torch.cat([value.flatten() for value in values.values()])
    copies = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, mine)
    assert all(torch.equal(copy, copies[0]) for copy in copies), "replicas differ"


def assert_close(here: Named, there: Named, tolerance: float, what: str) -> None:
    assert here.keys() == there.keys(), what
    for name, value in here.items():
        gap = float((value - there[name]).abs().max()) if value.numel() else 0.0
        assert gap <= tolerance, f"{what}: '{name}' is off by {gap:.2e}, more than {tolerance:.0e}"


def added(*terms: tuple[float, Named]) -> Named:
    return {n: sum(factor * values[n] for factor, values in terms) for n in terms[0][1]}  # type: ignore


# ---- one process with everybody's batches -----------------------------------------------------------


def local_gradients(case: Case, model: nn.Module, step: int, rank: int) -> Named:
    model.zero_grad()
    for micro in range(case.micro):
        case.loss(model, step * case.micro + micro, rank).backward()
    return gradients(model)


def reference(case: Case, *, clip_local: bool) -> Named:
    """Train on the mean of all ranks' gradients."""
    model, ranks = case.make(), dist.get_world_size()
    optimizer = case.optimizer(model.parameters())
    for step in range(STEPS):
        of_ranks = []
        for rank in range(ranks):
            of_ranks.append(local_gradients(case, model, step, rank))
            if case.clip and clip_local:
                nn.utils.clip_grad_norm_(model.parameters(), case.clip)
                of_ranks[-1] = gradients(model)
        mean = added(*((1 / ranks, one) for one in of_ranks))
        for name, parameter in model.named_parameters():
            parameter.grad = mean[name].to(parameter.dtype) if parameter.requires_grad else None
        if case.clip and not clip_local:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
    return weights(model)


def backward(case: Case, model: Any, step: int, rank: int) -> None:
    for micro in range(case.micro):
        quiet = case.no_sync and micro < case.micro - 1 and hasattr(model, "no_sync")
        with model.no_sync() if quiet else nullcontext():
            case.loss(model, step * case.micro + micro, rank).backward()


def local_step(case: Case, model: nn.Module, optimizer: Any, step: int) -> Named:
    """Do a step of this rank alone; return its gradients."""
    case.before(model, dist.get_rank())
    optimizer.zero_grad(set_to_none=case.set_to_none)
    backward(case, model, step, dist.get_rank())
    if case.clip:
        nn.utils.clip_grad_norm_(model.parameters(), case.clip)
    return gradients(model)


# ---- the integrations -------------------------------------------------------------------------------


def attach(case: Case, density: float) -> Named:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    net, twin = case.make(), case.make()
    ddp = DistributedDataParallel(case.wrap_inner(net), **case.ddp)
    sync = sparsync.attach(ddp, "allgather", density=density, timeout=TIMEOUT)
    called, optimizer = case.wrap(ddp), case.optimizer(ddp.parameters())
    try:
        for step in range(STEPS):
            twin.load_state_dict(net.state_dict())
            mine = local_gradients(case, twin, step, rank)
            kept = residuals(sync.state_dict(), mine)
            case.before(called, rank)
            optimizer.zero_grad(set_to_none=case.set_to_none)
            backward(case, called, step, rank)
            averages = gradients(net)
            came = everywhere(added((1.0, kept), (1.0, mine)))
            left = everywhere(residuals(sync.state_dict(), mine))
            went = added((ranks, averages), (1.0, left))
            assert_close(came, went, ranks * case.tolerance, f"the law, step {step}")
            assert_equal_on_all_ranks(averages)
            if case.clip:
                nn.utils.clip_grad_norm_(ddp.parameters(), case.clip)
            optimizer.step()
    finally:
        sync.close()
    return weights(net)


def local_updates(case: Case, density: float) -> Named:
    net = case.wrap(case.wrap_inner(case.make()))
    local = sparsync.LocalUpdates(net, "allgather", density=density, period=1)
    optimizer = case.optimizer(net.parameters())
    for step in range(STEPS):
        local_step(case, net, optimizer, step)
        optimizer.step()
        before = everywhere(weights(net))
        local.step()
        assert_close(everywhere(weights(net)), before, case.tolerance, f"the mean, step {step}")
    with local.shared():
        return weights(net)


def update_space(case: Case, density: float) -> Named:
    net, ranks = case.wrap(case.wrap_inner(case.make())), dist.get_world_size()
    optimizer = sparsync.UpdateSpaceSGD(net, lr=RATE, algorithm="allgather", density=density)
    for step in range(STEPS):
        mine = local_step(case, net, optimizer, step)
        kept, before = residuals(optimizer.state_dict()["sparsync"], mine), weights(net)
        optimizer.step()
        came = everywhere(added((1.0, kept), (RATE, mine)))
        left = everywhere(residuals(optimizer.state_dict()["sparsync"], mine))
        went = added((ranks, before), (-ranks, weights(net)), (1.0, left))
        assert_close(came, went, ranks * case.tolerance, f"the law, step {step}")
    return weights(net)


def averaging(case: Case, density: float) -> Named:
    net = case.wrap(case.wrap_inner(case.make()))
    averager, optimizer = LocalSgd(net, period=1), case.optimizer(net.parameters())
    for step in range(STEPS):
        local_step(case, net, optimizer, step)
        optimizer.step()
        before = everywhere(weights(net))
        averager.step()
        assert_close(everywhere(weights(net)), before, case.tolerance, f"the mean, step {step}")
    return weights(net)


COLUMNS = {
    "attach": attach,
    "LocalUpdates": local_updates,
    "UpdateSpace": update_space,
    "averaging": averaging,
}


def keeps_its_meaning(case: Case, column: str) -> None:
    """Assert that a column trains as one process would, and that it loses nothing."""
    train, local = COLUMNS[column], column != "attach"
    ends = train(case, 1.0)
    assert_equal_on_all_ranks(ends)
    if case.exact or not local:
        expected = reference(case, clip_local=local)
        assert_close(ends, expected, case.tolerance, "against one process")
        start = weights(case.make())
        assert any(not torch.equal(end, start[name]) for name, end in ends.items()), "stood still"
    if column != "averaging":  # which has no density
        assert_equal_on_all_ranks(train(case, SPARSE))
