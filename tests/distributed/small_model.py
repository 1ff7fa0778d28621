"""A small model under DDP, how to train it, and what all ranks say."""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def model(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 30), torch.nn.Linear(30, 5)
    )


def batch(step: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10_000 * seed + 100 * step + dist.get_rank())
    x = torch.randn(8, 20, generator=generator)
    return x, x[:, :5].sin()


def flat(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()]).clone()


def same_everywhere(tensor: torch.Tensor) -> bool:
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, tensor)
    return all(torch.equal(t, tensor) for t in everyone)


def gathered(mine: Any) -> list[Any]:
    """Return every rank's object."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def train(
    ddp: DistributedDataParallel, steps: range, optimizer: torch.optim.Optimizer | None = None
) -> float:
    optimizer = optimizer or torch.optim.SGD(ddp.parameters(), lr=0.1)
    loss = torch.zeros(())
    for step in steps:
        x, y = batch(step)
        optimizer.zero_grad()
        loss = (ddp(x) - y).pow(2).mean()
        loss.backward()
        optimizer.step()
    return float(loss)
