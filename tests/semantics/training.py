"""Train one model with every integration, and in one process with all ranks' batches.

With density 1 and period 1, all integrations give the same weights. With a lower density, no step
loses anything: gradients and updates are either delivered or kept in the residual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync.averaging import LocalSgd
from sparsync.updates import OuterStep
from sparsync_papers.baseline_optimizers import UpdateSpaceSGD
from tests import attaching
from tests.distributed.small_model import batch
from tests.distributed.small_model import model as network
from tests.on_ranks import same_everywhere

STEPS, RATE, SPARSE = 3, 0.1, 0.1
DDP_COLUMNS = ("attach", "updates")

Named = dict[str, Tensor]


def here() -> int:
    return dist.get_rank()


def mean_square(model: nn.Module, number: int, rank: int) -> Tensor:
    x, y = batch(number, rank)
    return (model(x).float() - y).pow(2).mean()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE)


def loop(model: nn.Module, optimizer: Any, steps: int = STEPS) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        mean_square(model, step, here()).backward()
        optimizer.step()


def same(thing: Any) -> Any:
    return thing


class Training:
    """A model ``net`` that is trained with an integration.

    The loop calls ``called``, which is ``net`` or its wrapper. ``handle`` is the object that sparsync
    returned.
    """

    def __init__(
        self,
        column: str,
        net: nn.Module,
        density: float = SPARSE,
        *,
        ddp: Mapping[str, Any] | None = None,
        wrap: Callable[[Any], Any] = same,
        wrap_inner: Callable[[Any], Any] = same,
        optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
        period: int = 1,
        tolerance: float = 1e-5,
        **settings: Any,
    ) -> None:
        self.tolerance = tolerance
        self.averages, self.attaches = column == "averaging", column in DDP_COLUMNS
        self.net: Any = net if self.attaches else wrap(wrap_inner(net))
        self.called, sparse = self.net, {"algorithm": "allgather", "density": density}
        if self.attaches:
            model = DistributedDataParallel(wrap_inner(net), **(ddp or {}))
            self.called = wrap(model)
        self.optimizer: Any = None
        if column != "UpdateSpace":
            self.optimizer = optimizer(self.called.parameters())
        self.handle: Any
        self._before: Named | None = None  # weights between an optimizer's step and the exchange
        if column == "attach":
            self.handle = attaching.attach(self.called, timeout=20.0, **sparse, **settings)
        elif column == "updates":
            given = getattr(self.optimizer, "parts", [self.optimizer])
            given[-1].register_step_post_hook(self._note)
            outer = OuterStep(residual="weights", period=period, **sparse)
            carried = sparsync.Transport(timeout=20.0)
            self.handle = sparsync.attach(
                self.called, given, outer, exchange="updates", transport=carried
            )
        elif column == "averaging":
            self.handle = LocalSgd(self.net, period=period)
        else:
            self.handle = self.optimizer = UpdateSpaceSGD(self.net, lr=RATE, **sparse)

    def backward(self, step: int) -> None:
        """Compute the gradients of one batch."""
        self.optimizer.zero_grad()
        mean_square(self.called, step, here()).backward()

    def _note(self, *_: Any) -> None:
        self._before = weights(self.net)

    def step(self) -> None:
        """Step the optimizer, and then the averager, if there is one."""
        self.optimizer.step()
        if self.averages:
            self.average()
        elif self._before is not None:
            self._check_sum(self._before)

    def average(self) -> None:
        """Step the averager."""
        before = weights(self.net)
        self.handle.step()
        self._check_sum(before)

    def _check_sum(self, before: Named) -> None:
        """Assert that an exchange did not change the sum of all ranks' weights."""
        now, then = everywhere(weights(self.net)), everywhere(before)
        assert_close(now, then, self.tolerance, "the sum of weights")

    def finish(self) -> None:
        """Make the weights of all ranks equal."""
        if hasattr(self.handle, "finish"):
            self.handle.finish()

    def close(self) -> None:
        """Detach from DDP."""
        if self.attaches:
            self.handle.close()


@contextmanager
def attached(
    net: nn.Module, density: float = 1.0, column: str = "attach", **options: Any
) -> Iterator[tuple[Any, Any]]:
    """Wrap a model in DDP and attach; yield the DDP model and the handle, and close at the end."""
    training = Training(column, net, density, **options)
    try:
        yield training.called, training.handle
    finally:
        training.close()


# ---- comparisons ------------------------------------------------------------------------------------


def plain(name: str) -> str:
    return name.replace("_orig_mod.", "")  # torch.compile adds this prefix


def weights(model: nn.Module) -> Named:
    return {plain(n): p.detach().double().clone() for n, p in model.named_parameters()}


def gradients(model: nn.Module) -> Named:
    """Return all gradients by name, as dense tensors; a missing gradient is returned as zeros."""
    found = {}
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        found[plain(name)] = gradient.detach().to_dense().double().clone()
    return found


def residuals(state: Mapping[str, Any], like: Named) -> Named:
    kept = state["content"]["reducer"]["residual"]
    kept = {plain(name): value for name, value in kept.items()}
    return {n: kept.get(n, torch.zeros(v.numel())).double().view(v.shape) for n, v in like.items()}


def everywhere(values: Named) -> Named:
    """Return the sum over ranks, by name."""
    total = torch.cat([value.flatten() for value in values.values()])
    dist.all_reduce(total)
    parts = total.split([value.numel() for value in values.values()])
    return {n: p.view(v.shape) for (n, v), p in zip(values.items(), parts, strict=True)}


def equal_on_all_ranks(values: Named) -> bool:
    return same_everywhere(torch.cat([value.flatten() for value in values.values()]))


def assert_close(here: Named, there: Named, tolerance: float, what: str) -> None:
    assert here.keys() == there.keys(), what
    for name, value in here.items():
        gap = float((value - there[name]).abs().max()) if value.numel() else 0.0
        assert gap <= tolerance, f"{what}: '{name}' is off by {gap:.2e}, more than {tolerance:.0e}"


def added(*terms: tuple[float, Named]) -> Named:
    return {n: sum(factor * values[n] for factor, values in terms) for n in terms[0][1]}  # type: ignore


def moved(net: nn.Module, start: Named) -> bool:
    return any(not torch.equal(end, start[name]) for name, end in weights(net).items())


# ---- the same training, four ways -------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """The settings of a training run that all integrations repeat."""

    make: Callable[[], nn.Module] = network  # equal on all ranks
    # returns the loss for a model, the number of a micro-batch, and a rank
    loss: Callable[[nn.Module, int, int], Tensor] = mean_square
    micro: int = 1  # backward passes per step
    no_sync: bool = True  # whether all passes except the last are within no_sync
    ddp: Mapping[str, Any] = field(default_factory=dict)
    wrap: Callable[[Any], Any] = same  # wraps the called model: the DDP model, or the plain one
    wrap_inner: Callable[[Any], Any] = same  # wraps the model before DDP does
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd
    clip: float | None = None  # clips the gradients that the optimizer gets
    set_to_none: bool = True  # the argument of ``zero_grad``
    before: Callable[[nn.Module, int], None] = lambda model, rank: None  # called before every step
    tolerance: float = 1e-5  # for comparisons of weights and for the law
    exact: bool = True  # whether local optimizers give the same weights as one process at density 1


def same_training(column: str, make: Callable[[], nn.Module] = network, **settings: Any) -> None:
    """Assert that an integration gives the same weights as one process, and that nothing is lost."""
    case, local = Case(make, **settings), column != "attach"
    ends = _train(case, column, 1.0)
    assert equal_on_all_ranks(ends), "replicas differ"
    if case.exact or not local:
        assert_close(ends, _one_process(case, clip_local=local), case.tolerance, "one process")
        assert moved(case.make(), ends), "weights did not move"
    if column != "averaging":  # averaging has no density
        assert equal_on_all_ranks(_train(case, column, SPARSE)), "replicas differ"


def _train(case: Case, column: str, density: float) -> Named:
    """Train with a column's integration and check the law on every step; return the final weights."""
    net, twin, ranks = case.make(), case.make(), dist.get_world_size()
    names = ("ddp", "wrap", "wrap_inner", "optimizer", "tolerance")
    training = Training(column, net, density, **{name: getattr(case, name) for name in names})
    model, handle, attach = training.called, training.handle, column == "attach"
    exact = column in ("attach", "UpdateSpace")  # only here is the delivered part known
    try:
        for step in range(STEPS):
            if exact:
                twin.load_state_dict(net.state_dict())
                mine = local_gradients(case, twin, step, here(), clip=not attach)
                kept, before = residuals(handle.state_dict(), mine), weights(net)
            case.before(model, here())
            training.optimizer.zero_grad(set_to_none=case.set_to_none)
            for micro in range(case.micro):
                quiet = case.no_sync and micro < case.micro - 1 and training.attaches
                with model.no_sync() if quiet else nullcontext():
                    case.loss(model, step * case.micro + micro, here()).backward()
            averages = gradients(net)
            if case.clip:
                nn.utils.clip_grad_norm_(model.parameters(), case.clip)
            training.step()
            if exact:
                delivered = averages if attach else added((1.0, before), (-1.0, weights(net)))
                came = everywhere(added((1.0, kept), (1.0 if attach else RATE, mine)))
                left = everywhere(residuals(handle.state_dict(), mine))
                went = added((ranks, delivered), (1.0, left))
                assert_close(came, went, ranks * case.tolerance, f"the law, step {step}")
                assert equal_on_all_ranks(delivered), "averages differ between ranks"
        with handle.shared() if column == "updates" else nullcontext():
            return weights(net)
    finally:
        training.close()


def local_gradients(
    case: Case, model: nn.Module, step: int, rank: int, *, clip: bool = False
) -> Named:
    model.zero_grad()
    for micro in range(case.micro):
        case.loss(model, step * case.micro + micro, rank).backward()
    if case.clip and clip:
        nn.utils.clip_grad_norm_(model.parameters(), case.clip)
    return gradients(model)


def _one_process(case: Case, *, clip_local: bool) -> Named:
    """Train in one process on the mean of all ranks' gradients."""
    model, ranks = case.make(), dist.get_world_size()
    optimizer = case.optimizer(model.parameters())
    for step in range(STEPS):
        of_ranks = (local_gradients(case, model, step, r, clip=clip_local) for r in range(ranks))
        mean = added(*((1 / ranks, one) for one in of_ranks))
        for name, parameter in model.named_parameters():
            parameter.grad = mean[name].to(parameter.dtype) if parameter.requires_grad else None
        if case.clip and not clip_local:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
    return weights(model)
