"""Small models for threads that act as ranks, and a scheme with memory."""

from typing import final

import pytest
import torch
from torch import nn

from sparsync.averaging.averager import Averager, mean


@final
class Smoothed(Averager):
    """A scheme with memory: models move halfway to the previous step's mean of all models."""

    async def begin(self, comm, vector, step):
        self.memory.setdefault("last", vector)

    async def average(self, comm, vector, step):
        last, self.memory["last"] = self.memory["last"], vector
        return (vector + await mean(comm, last)) / 2


def linear(seed=0, **options):
    """Return a model with equal weights on all ranks, i.e. threads that share torch's generator."""
    model, generator = nn.Linear(2, 1, **options), torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=generator)
    return model


def add_(model, value):
    """Take a local step whose result is easy to compute."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += value


def train_(model, optimizer, rank, steps, averager):
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * rank + step)
        optimizer.zero_grad()
        model(torch.randn(8, 2, generator=generator)).square().sum().backward()
        optimizer.step()
        averager.step()


def failure(kind, call, *args, **options):
    with pytest.raises(kind) as caught:
        call(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)
