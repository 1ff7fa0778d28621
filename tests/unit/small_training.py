"""A small model on one rank, and its training."""

from __future__ import annotations

import torch
from torch import nn

STEPS = 30


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def backward(net: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(5, 6, generator=generator)
    net.zero_grad()
    (net(x) - x[:, :3].sin()).pow(2).mean().backward()


def flat(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def trained(make, steps: int = STEPS) -> torch.Tensor:
    net = model()
    optimizer = make(net)
    for step in range(steps):
        backward(net, step)
        optimizer.step()
    return flat(net)
