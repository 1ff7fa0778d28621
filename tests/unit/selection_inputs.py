"""Awkward inputs for selectors."""

import math

import torch
from torch import Tensor

from .strategies import smallest

INF, NAN = float("inf"), float("nan")
SIZE = 1000
SOME_K = (0, 1, 10, 300, SIZE, 2 * SIZE)


def noise(seed: int = 0, size: int = SIZE) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def uniform() -> Tensor:
    return torch.rand(SIZE, generator=torch.Generator().manual_seed(1))


def inputs(dtype: torch.dtype) -> dict[str, Tensor]:
    base, limits = noise().double(), torch.finfo(dtype)
    named = {
        "normal": base,
        "uniform": uniform().double(),  # Figure 3
        "constant": torch.full((SIZE,), -0.7),
        "one-hot": torch.eye(SIZE)[3],
        "denormal": (3 * base).round() * smallest(dtype),
        "zero": torch.zeros(SIZE),
        "heavy tail": torch.tan(math.pi * (uniform().double() - 0.5)),  # Cauchy
        "two modes": torch.where(base > 1.5, 100 + base, base / 100),
        "integers": (3 * base).round(),
        "huge": base.sign() * limits.max,
        "one peak": torch.cat([torch.tensor([limits.max]), base[1:]]),  # the rest below any ratio
        "halving": 0.5 ** torch.arange(SIZE, dtype=torch.float64),  # each ratio reaches one more
        "nan": torch.cat([torch.tensor([NAN, -NAN]), base[2:]]),
        "inf": torch.cat([torch.tensor([INF, NAN, -INF]), base[3:]]),
    }
    return {name: values.to(dtype) for name, values in named.items()}


NAMES = list(inputs(torch.float32))
