"""Adam on one rank of several: its first moment follows the average, its steps are of less noise."""

import pytest
import torch

from sparsync.averaging import moments
from sparsync.averaging.moments import correct, follow, with_moments

GROUP = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
STEPS = 5


@pytest.fixture(autouse=True, params=[4, 15])
def runs(request, monkeypatch):
    monkeypatch.setattr(moments, "_RUN", request.param)


def trained(kind=torch.optim.AdamW, **options):
    """Return a parameter and its optimizer after some steps, and the weights before the last one."""
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(3, 5, dtype=torch.float64))
    optimizer = kind([parameter], **{**GROUP, **options})
    for _ in range(STEPS):
        before = parameter.detach().clone()
        parameter.grad = torch.randn_like(parameter) + 1
        optimizer.step()
    return parameter, optimizer, before


@pytest.mark.parametrize("ranks", [1, 4])
def test_with_the_followed_moment_the_steps_would_have_been_the_average_s(ranks):
    parameter, optimizer, before = trained()
    correct(optimizer, ranks)
    ((_, state, group),) = with_moments(optimizer)
    moved, average = before - parameter.detach(), torch.randn(3, 5, dtype=torch.float64)
    mean, square = state["exp_avg"] / (1 - 0.9**STEPS), state["exp_avg_sq"] / (1 - 0.99**STEPS)
    root = (mean.square() + (square - mean.square()) / ranks).sqrt() + 1e-8
    follow([(state, group, moved - average)], 1, ranks)
    torch.testing.assert_close(0.1 * state["exp_avg"] / (1 - 0.9**STEPS) / root, average)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize(
    "options", [{}, {"weight_decay": 0.1, "maximize": True}, {"foreach": False}]
)
def test_a_corrected_step_is_that_of_the_averages_second_moment(ranks, options):
    parameter, optimizer, before = trained(**options)
    ((_, state, _),) = with_moments(optimizer)
    correct(optimizer, ranks)
    mean = state["exp_avg"] / (1 - 0.9**STEPS)
    square = state["exp_avg_sq"] / (1 - 0.99**STEPS)
    root = (mean.square() + (square - mean.square()) / ranks).sqrt() + 1e-8
    expected = before * (1 - 0.1 * options.get("weight_decay", 0)) - 0.1 * mean / root
    torch.testing.assert_close(parameter.detach(), expected)


def test_joined_parameters_are_treated_as_each_alone(monkeypatch):
    """With other steps, rates and memory formats among them, bit for bit."""
    shapes = ((3, 5), (7,), (2, 3, 4, 5), (0,), (11,), (4,), (1,))
    ends = []
    for small in (0, 20, 1000):
        monkeypatch.setattr(moments, "_SMALL", small)
        monkeypatch.setattr(moments, "_JOINED", 3)
        torch.manual_seed(0)
        parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
        parameters[2].data = parameters[2].data.to(memory_format=torch.channels_last)
        groups = [{"params": parameters[:5]}, {"params": parameters[5:], "lr": 0.2}]
        optimizer = torch.optim.AdamW(groups, **GROUP)
        for step in range(3):
            for parameter in parameters:
                omitted = step == 1 and parameter.numel() == 11
                parameter.grad = None if omitted else 2 * parameter.detach()
            optimizer.step()
            correct(optimizer, 4)
        stepped = [(s, g, torch.randn(p.shape)) for p, s, g in with_moments(optimizer)]
        follow(stepped, 2, 4)
        ends.append([*parameters, *(state["exp_avg"] for state, _, _ in stepped)])
    for others in ends[1:]:
        assert all(torch.equal(one, other) for one, other in zip(ends[0], others, strict=True))


def test_other_moments_are_left_alone():
    assert not list(with_moments(trained(amsgrad=True)[1]))
    for kind in (torch.optim.NAdam, torch.optim.Adagrad):  # other steps from moments of these names
        optimizer = kind([torch.nn.Parameter(torch.ones(2))])
        optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
        optimizer.step()
        assert not list(with_moments(optimizer))
