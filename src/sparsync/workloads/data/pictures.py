"""What is done to images before a model sees them; random choices come from a generator alone."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["flipped", "normalised", "shifted"]


def normalised(
    pixels: Tensor, mean: tuple[float, float, float], deviation: tuple[float, float, float]
) -> Tensor:
    """Return ``float32`` images `[n, 3, height, width]` of ``uint8`` ones: in [0, 1], then whitened."""
    shift, scale = (torch.tensor(values).view(3, 1, 1) for values in (mean, deviation))
    return (pixels.float() / 255 - shift) / scale


def shifted(images: Tensor, generator: np.random.Generator, *, most: int) -> Tensor:
    """Move every square image by up to ``most`` pixels, each way; what comes in is 0."""
    side = images.shape[-1]
    windows = F.pad(images, (most,) * 4).unfold(2, side, 1).unfold(3, side, 1)
    down, right = torch.from_numpy(generator.integers(2 * most + 1, size=(2, len(images))))
    return windows[torch.arange(len(images)), :, down, right]


def flipped(images: Tensor, generator: np.random.Generator) -> Tensor:
    """Mirror every other image, on average, from left to right."""
    mirrored = torch.from_numpy(generator.random(len(images)) < 0.5)
    return torch.where(mirrored[:, None, None, None], images.flip(-1), images)
