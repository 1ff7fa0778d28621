"""Test on one rank which calls count as optimizer steps when updates are exchanged."""

import pytest
import torch
import torch.distributed as dist

import sparsync
from sparsync.errors import ConfigurationError
from sparsync.handle import Hook
from sparsync.updates.stepping import follow
from tests.tables import cases

pytestmark = [pytest.mark.gloo, pytest.mark.usefixtures("alone")]


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
@cases(torch.optim.AdamW, fused, Subclass, lambda given: Wrapper(torch.optim.AdamW(given)))
def test_what_a_scaler_skips_counts_once(make, wrap, told):
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


# torch's compiler uses torch.jit
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_compiled_step_calls_its_hooks_and_does_not_trace_them():
    model, traced = net(), []
    optimizer = Subclass(model.parameters())
    torch.optim.AdamW(net().parameters())
    note = Hook(lambda *_: traced.append(torch.compiler.is_compiling()))
    follow(optimizer, note, note)
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    for _ in range(2):
        backward(model)
        step()
    assert traced == [False] * 4


class Parts(torch.nn.Module):
    """A model whose loop calls its parts, so no hook sees a forward pass."""

    def __init__(self):
        super().__init__()
        self.first, self.second = net(), torch.nn.Linear(2, 2)
        self.first.weight.requires_grad_(False)

    def loss(self):
        return self.second(self.first(torch.ones(2, 3))).square().sum()


@pytest.mark.parametrize("exchange", ["gradients", "updates", "updates, and step()"])
def test_what_thaws_is_refused_where_only_parts_of_a_model_are_called(exchange):
    model, alone = Parts(), exchange == "updates, and step()"
    inside = {"replicate": dist.group.WORLD} if exchange == "gradients" else {}
    optimizer = torch.optim.AdamW(model.parameters())
    given = None if alone else optimizer
    with sparsync.attach(model, given, exchange=exchange.split(",")[0], **inside) as sync:
        for thawed in (False, True):
            model.first.weight.requires_grad_(thawed)
            start = model.first.weight.clone()

            def step():
                model.zero_grad()
                model.loss().backward()
                optimizer.step()
                if alone:
                    sync.step()

            if not thawed:
                step()
                continue
            with pytest.raises(ConfigurationError, match=r"'first\.weight' trains now"):
                step()
            assert alone or torch.equal(model.first.weight, start)


def test_steps_that_no_exchange_follows_are_told_once(capsys):
    for given in ("the first of two", None):
        model = net()
        one, other = torch.optim.Adam([model.weight]), torch.optim.NAdam([model.bias])
        with sparsync.attach(model, given and [one, other], exchange="updates") as sync:
            for _ in range(201):
                backward(model)
                one.step()
            assert sync.steps == 0
        said = capsys.readouterr().err
        assert said.count("replicas drift apart: 100 times in a row there was") == 1
        assert ("NAdam, the last optimizer" if given else "no sync.step()") in said


def test_parameters_outside_of_the_model_are_told_when_they_come(capsys):
    model, other, attached = net(), torch.nn.Linear(5, 7), net()
    optimizer = torch.optim.AdamW([*model.parameters(), *attached.parameters()])
    with sparsync.attach(model, optimizer), sparsync.attach(attached, optimizer):
        for added in (False, True):
            if added:
                optimizer.add_param_group({"params": other.parameters()})
            for _ in range(2):
                backward(model)
                optimizer.step()
            said = capsys.readouterr().err.count("AdamW also steps 2 parameters that are not in")
            assert said == 2 * added  # once by each handle
