"""Test on one rank which calls count as optimizer steps when updates are exchanged."""

import pytest
import torch
import torch.distributed as dist

import sparsync

pytestmark = pytest.mark.gloo


@pytest.fixture(scope="module", autouse=True)
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def net():
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)


def wrapped():
    return torch.nn.parallel.DistributedDataParallel(net())


def backward(model, factor=1.0, scaler=None):
    model.zero_grad()
    loss = model(torch.ones(2, 3)).square().sum() * factor
    (loss if scaler is None else scaler.scale(loss)).backward()


class Subclass(torch.optim.AdamW):
    """A subclass that calls its base's ``step``, which has its own hooks once an ``AdamW`` exists."""

    def step(self, closure=None):
        loss = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                torch._foreach_clamp_min_(group["params"], -10.0)
        return loss


@pytest.mark.parametrize("wrap", [net, wrapped])
def test_a_step_within_a_step_is_none_of_its_own(wrap):
    model = wrap()
    optimizer = Subclass(model.parameters())
    torch.optim.AdamW(net().parameters())
    with sparsync.attach(model, optimizer) as sync:
        for step in range(3):
            backward(model)
            optimizer.step()
            assert sync.steps == step + 1


def test_a_step_that_an_exception_ends_is_none_and_hides_no_other():
    model = net()
    optimizer = Subclass(model.parameters())
    torch.optim.AdamW(net().parameters())

    def closure():
        raise MemoryError("out of memory")

    with sparsync.attach(model, optimizer) as sync:
        for step in range(3):
            backward(model)
            with pytest.raises(MemoryError):
                optimizer.step(closure)
            optimizer.step()
            assert sync.steps == step + 1


class Wrapper(torch.optim.Optimizer):
    """A wrapper like that of sharpness-aware minimisation."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.base_optimizer = inner

    def step(self, closure=None):
        return self.base_optimizer.step(closure)


def fused(parameters):
    return torch.optim.AdamW(parameters, fused=True)


@pytest.mark.parametrize("wrap", [net, wrapped])
@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize(
    "make", [torch.optim.AdamW, fused, Subclass, lambda given: Wrapper(torch.optim.AdamW(given))]
)
def test_what_a_scaler_skips_counts_once(wrap, told, make):
    model, scaler = wrap(), torch.amp.GradScaler("cpu")
    optimizer = make(model.parameters())
    monitoring = sparsync.Monitoring(scaler=scaler) if told else None
    with sparsync.attach(model, optimizer, exchange="updates", monitoring=monitoring) as sync:
        for step, factor in enumerate((1.0, torch.inf, 1.0, torch.inf, torch.inf, 1.0)):
            backward(model, factor, scaler)
            before = model.state_dict()["weight" if wrap is net else "module.weight"].clone()
            scaler.step(optimizer)
            scaler.update()
            assert sync.steps == step + 1
            moved = not torch.equal(before, next(model.parameters()))
            assert moved == (factor == 1.0)


def test_a_skipped_step_is_not_measured():
    """Gradients that a fused optimizer has skipped are still scaled, and would dominate the noise."""
    model, scaler = net(), torch.amp.GradScaler("cpu")
    optimizer = fused(model.parameters())
    with sparsync.attach(model, optimizer) as sync:
        measured = []
        for bias in (1.0, torch.inf):
            model.zero_grad()
            scaler.scale(model(torch.ones(2, 3)).square().sum()).backward()
            model.bias.grad.mul_(bias)
            scaler.step(optimizer)
            scaler.update()
            measured.append(sync._weights.noise._last.abs().sum(1).tolist())
        assert all(measured[0]) and measured[1] == [0.0, 0.0]


@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_that_are_dropped_are_no_step(scaled):
    model = wrapped()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    with sparsync.attach(model, optimizer) as sync:
        for step in range(3):
            for _ in range(2):
                backward(model, scaler=scaler)
            scaler.step(optimizer)
            scaler.update()
            assert sync.steps == step + 1
