"""The ways to train that keep their meaning: one `Case` each, run by every column."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .training import RATE, Case, batch, mean_square, network

__all__ = ["CASES"]


class Tied(nn.Module):
    """One weight, used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.down, self.up = nn.Linear(20, 20), nn.Linear(20, 20)
        self.up.weight = self.down.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x).tanh())[:, :5]


class Branches(nn.Module):
    """``rare`` is used when its rank's batch says so: by none, one or both ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.rare, self.never = (nn.Linear(20, 5) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.always(x) + (self.rare(x) if x[0, 0] > 0 else 0.0)


class Words(nn.Module):
    """An embedding whose gradients are COO."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.rest = nn.Embedding(60, 5, sparse=True), nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(x) + self.words((x[:, 0].abs() * 20).long().clamp(max=59))


class Odd(nn.Module):
    """Parameters of several dtypes, a scalar and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(20, 5)
        self.narrow = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        self.wide = nn.Parameter(torch.ones(5, dtype=torch.float64))
        self.scalar, self.empty = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        scaled = self.first(x) * self.narrow * self.wide.float()
        return scaled * self.scalar + self.empty.sum()


class Image(nn.Module):
    """A convolution whose weight is laid out channels_last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = nn.Conv2d(4, 6, 2), nn.Linear(6, 5)
        self.conv.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        pixels = x[:, :16].reshape(-1, 4, 2, 2).contiguous(memory_format=torch.channels_last)
        return self.head(self.conv(pixels).flatten(1))


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.net, self.reentrant = network(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for part in self.net:
            x = checkpoint(part, x, use_reentrant=self.reentrant)
        return x


def frozen() -> nn.Module:
    net = network()
    net[0].requires_grad_(False)
    return net


def half() -> nn.Module:
    return network().half()


def in_half(model: nn.Module, number: int, rank: int) -> Tensor:
    x, y = batch(number, rank)
    return (model(x.half()).float() - y).pow(2).mean()


def autocast(model: nn.Module, number: int, rank: int) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return mean_square(model, number, rank)


def evaluate(model: nn.Module, rank: int) -> None:
    model.eval()
    with torch.no_grad():
        model(torch.ones(2, 20))
    model.train()


def fail_on_one_rank(model: nn.Module, rank: int) -> None:
    if rank == 1:
        try:
            model(torch.ones(2, 19))
        except RuntimeError:
            return
        raise AssertionError("a batch of the wrong shape went through")


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="aot_eager")


CASES = {
    "plain": Case(),
    "no_sync": Case(micro=2),
    "backward twice": Case(micro=2, no_sync=False),
    "clipped": Case(clip=0.05),
    "tied": Case(Tied),
    "frozen": Case(frozen),
    "unused": Case(Branches, ddp={"find_unused_parameters": True}),
    "COO": Case(Words),
    "static_graph": Case(ddp={"static_graph": True, "bucket_cap_mb": 0.001}),
    "bucket view": Case(
        ddp={"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001}, set_to_none=False
    ),
    "compiled": Case(wrap=compiled),
    "compiled inside": Case(wrap_inner=compiled),
    "autocast": Case(loss=autocast, tolerance=2e-3),
    "dtypes": Case(Odd, tolerance=1e-2),
    "float16": Case(half, in_half, tolerance=2e-3),
    "channels_last": Case(Image),
    "checkpointed": Case(partial(Checkpointed, reentrant=False)),
    "checkpointed, reentrant": Case(
        partial(Checkpointed, reentrant=True), ddp={"bucket_cap_mb": 0.001}
    ),
    "evaluated": Case(before=evaluate),
    "failing forward": Case(before=fail_on_one_rank),
    "momentum": Case(
        optimizer=lambda p: torch.optim.SGD(p, lr=RATE, momentum=0.9, weight_decay=0.01),
        exact=False,
    ),
    "AdamW": Case(optimizer=lambda p: torch.optim.AdamW(p, lr=0.01), tolerance=1e-4, exact=False),
    "Adafactor": Case(optimizer=lambda p: torch.optim.Adafactor(p, lr=0.01), exact=False),
}
