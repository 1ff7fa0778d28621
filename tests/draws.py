"""Noise that is the same in every run."""

import torch
from torch import Tensor

__all__ = ["noise", "seeded"]


def seeded(seed: int) -> torch.Generator:
    """Return a generator of its own."""
    return torch.Generator().manual_seed(seed)


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Return normal noise."""
    return torch.randn(shape, generator=seeded(seed))
