"""Test that averages keep the length of steps that does not depend on gradients."""

import copy
from functools import partial

import pytest
import torch

from sparsync.transports.sim import simulate
from sparsync.updates.gradient_noise import GradientNoise, noise_of
from sparsync.updates.step_length import lengthen, of_own_length, remember

RATE, DECAY = 0.1, 0.3
DECAYED = {"lr": RATE, "weight_decay": DECAY}


def signs(name, decay):
    """Return an optimizer of this name, whose steps are signs and whose decay has its own name."""

    def step(self):
        for group in self.param_groups:
            for parameter in filter(lambda p: p.grad is not None, group["params"]):
                parameter.data.mul_(1 - group["lr"] * group[decay])
                parameter.data.sub_(parameter.grad.sign(), alpha=group["lr"])

    made = type(name, (torch.optim.Optimizer,), {"step": step})
    return lambda p: made(p, {"lr": RATE, decay: DECAY})


# optimizer -> whether its weight decay is decoupled
KNOWN = {
    "amsgrad": (lambda p: torch.optim.Adam(p, RATE, weight_decay=DECAY, amsgrad=True), False),
    "amsgrad, apart": (partial(torch.optim.AdamW, **DECAYED, amsgrad=True), True),
    "NAdam": (lambda p: torch.optim.NAdam(p, RATE, weight_decay=DECAY), False),
    "NAdam, apart": (partial(torch.optim.NAdam, **DECAYED, decoupled_weight_decay=True), True),
    "RAdam": (lambda p: torch.optim.RAdam(p, RATE), False),
    "Adamax": (lambda p: torch.optim.Adamax(p, RATE, maximize=True), False),
    "RMSprop": (lambda p: torch.optim.RMSprop(p, RATE, momentum=0.9, centered=True), False),
    "Adagrad": (lambda p: torch.optim.Adagrad(p, RATE, weight_decay=DECAY), False),
    "Adadelta": (lambda p: torch.optim.Adadelta(p, RATE), False),
    "Adafactor": (lambda p: torch.optim.Adafactor(p, RATE, weight_decay=DECAY), True),
    "Moonlight's Muon": (signs("Muon", "wd"), True),
    "Muon without messages": (signs("SingleDeviceMuon", "weight_decay"), True),
    "the same with Adam": (signs("SingleDeviceMuonWithAuxAdam", "weight_decay"), True),
}
if hasattr(torch.optim, "Muon"):  # torch 2.9 has the first one
    KNOWN["Muon"] = (lambda p: torch.optim.Muon(p, RATE, weight_decay=DECAY), True)


def stepped(optimizer, steps=3):
    """Take steps, and remember the last one; return the weights before and after it."""
    (parameter,) = optimizer.param_groups[0]["params"]
    noise, draw = noise_of([optimizer], {"p": parameter}), torch.Generator().manual_seed(1)
    for _ in range(steps):
        parameter.grad = torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype)
        before = parameter.detach().clone()
        remember(optimizer, noise.steps if noise else {})
        optimizer.step()
    return noise, before, parameter.detach().clone()


def weights(seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.nn.Parameter(torch.randn(5, 7, generator=draw, dtype=torch.float64))


@pytest.mark.parametrize(("make", "apart"), KNOWN.values(), ids=KNOWN)
@pytest.mark.parametrize("share", [0.1, 0.5, 1.0, None])
def test_a_step_is_lengthened_without_the_decay(make, apart, share):
    """With 4 ranks, at least a fourth of the squares remains, even where a few samples suggest less."""
    parameter = weights()
    optimizer = make([parameter])
    noise, before, after = stepped(optimizer)
    state = copy.deepcopy(optimizer.state_dict()["state"])
    noise.shares = {} if share is None else {parameter: share}
    lengthen(optimizer, noise.steps, noise.shares, 4)
    start = before * (1 - RATE * DECAY) if apart else before
    factor = 1.0 if share is None else max(share, 0.25) ** -0.5
    torch.testing.assert_close(parameter.detach(), start + factor * (after - start))
    torch.testing.assert_close(noise.steps[parameter], after - start)
    torch.testing.assert_close(optimizer.state_dict()["state"], state)


UNKNOWN = type("Unknown", (torch.optim.SGD,), {})


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.ASGD, UNKNOWN])
def test_steps_as_long_as_gradients_are_left_alone(kind):
    optimizer = kind([weights()], RATE)
    assert not list(of_own_length(optimizer)) and stepped(optimizer)[0] is None


def test_adams_own_correction_is_the_only_one_of_its_steps():
    parameters = [weights(seed) for seed in range(3)]
    groups = [{"params": parameters[:1]}, {"params": parameters[1:2], "amsgrad": True}]
    several = [torch.optim.Adam(groups), torch.optim.Adamax(parameters[2:])]
    noise = noise_of(several, dict(enumerate(parameters)))
    assert [*map(id, noise.steps)] == [*map(id, parameters[1:])]


def test_other_classes_of_a_name_need_neither_rate_nor_decay():
    """For transformers' Adafactor, which chooses its own rate, neither is known."""

    class Adafactor(torch.optim.Optimizer):
        def step(self):
            for parameter in self.param_groups[0]["params"]:
                parameter.data += 1

    for defaults in ({"lr": None, "weight_decay": DECAY}, {}):
        parameter = weights()
        noise, before, _ = stepped(optimizer := Adafactor([parameter], defaults))
        lengthen(optimizer, noise.steps, {parameter: 0.25}, 4)
        torch.testing.assert_close(parameter.detach(), before + 2)


def test_what_does_not_move_stays():
    parameter = weights()
    optimizer = torch.optim.Adagrad([parameter], lr=0.0)
    noise, before, _ = stepped(optimizer)
    noise.shares = {parameter: 0.25}
    lengthen(optimizer, noise.steps, noise.shares, 4)
    assert torch.equal(parameter.detach(), before)
    unseen = torch.nn.Parameter(torch.ones(6))
    optimizer = torch.optim.RMSprop([unseen], RATE)
    noise = noise_of([optimizer], {"unseen": unseen})
    unseen.grad, noise.shares = torch.tensor([1.0, 0, 0, 0, 0, 0]), {unseen: 0.25}
    remember(optimizer, noise.steps)
    optimizer.step()
    lengthen(optimizer, noise.steps, noise.shares, 4)
    assert unseen[1:].tolist() == [1.0] * 5 and unseen[0] < 1


@pytest.mark.parametrize(("make", "apart"), KNOWN.values(), ids=KNOWN)
def test_a_parameter_that_is_frozen_later_stays_where_it_is(make, apart):
    parameter = weights()
    optimizer = make([parameter])
    noise, *_ = stepped(optimizer)
    parameter.grad, began = None, parameter.detach().clone()
    remember(optimizer, noise.steps)
    optimizer.step()
    lengthen(optimizer, noise.steps, {parameter: 0.25}, 4)
    assert torch.equal(parameter.detach(), began) and not noise.steps[parameter].any()


def test_the_share_is_that_of_steps_however_the_rate_falls():
    """Averaging removes the noise but not the common part; agreement is measured for gradients only."""

    async def program(comm):
        parameters = [torch.nn.Parameter(torch.zeros(40, 50)) for _ in range(2)]
        noise = GradientNoise(dict.fromkeys(parameters, 0.98), parameters)
        for at in range(80):
            rate = 1.0 if at < 40 else 1e-4
            for parameter, seed in zip(parameters, (100 * at + comm.rank, at), strict=True):
                draw = torch.Generator().manual_seed(seed)
                noise.steps[parameter].normal_(generator=draw).mul_(rate)
            if at >= 40:
                noise.steps[parameters[1]].copy_(noise.steps[parameters[0]])
            noise.sample(at)
            total = await comm.allreduce(noise.values.flatten(), "samples")
            noise.values.copy_((total / comm.world_size).view_as(noise.values))
            noise.measure()
        return [noise.shares[one] for one in parameters], noise.agreement

    (shares, agreement), *others = simulate(program, 4).results
    kept = 0.98**40  # the remaining weight of measurements at the larger rate
    assert shares == pytest.approx([1 / 4, (1 / 4 + kept) / (1 + kept)], rel=0.15)
    assert agreement is None and all(theirs == (shares, None) for theirs in others)
