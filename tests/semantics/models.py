"""Models with unusual parameters, equal on all ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Seeded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.build()


class Branches(Seeded):
    """A model in which none, one or both ranks use the layer ``rare``, depending on their batches."""

    def build(self) -> None:
        self.always, self.rare, self.never = (nn.Linear(20, 5) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.always(x) + (self.rare(x) if x[0, 0] > 0 else 0.0)


class Words(Seeded):
    """An embedding with COO gradients."""

    def build(self) -> None:
        self.words, self.rest = nn.Embedding(60, 5, sparse=True), nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(x) + self.words((x[:, 0].abs() * 20).long().clamp(max=59))


class Odd(Seeded):
    """A module with parameters of several dtypes, a scalar, and one without elements."""

    def build(self) -> None:
        self.first = nn.Linear(20, 5)
        self.narrow = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        self.wide = nn.Parameter(torch.ones(5, dtype=torch.float64))
        self.scalar, self.empty = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        scaled = self.first(x) * self.narrow * self.wide.float()
        return scaled * self.scalar + self.empty.sum()


def tied() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 20), nn.Linear(20, 5))
    net[2].weight = net[0].weight
    return net


def channels_last() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Unflatten(1, (5, 2, 2)), nn.Conv2d(5, 6, 2), nn.Flatten(), nn.Linear(6, 5)
    )
    return net.to(memory_format=torch.channels_last)


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(20), nn.Linear(20, 5))
