"""Networks for digits that train in seconds: a ResNet and a vision transformer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsync.cli.workloads.digits import DigitsWorkload


class ResNet(nn.Module):
    """Three residual blocks with batch normalisation, on images `[batch, 1, 8, 8]`: 77,754 parameters."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.blocks = nn.Sequential(
            ResidualBlock(width, width, 1),
            ResidualBlock(width, 2 * width, 2),
            ResidualBlock(2 * width, 4 * width, 2),
        )
        self.head = nn.Linear(4 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits `[batch, 10]`."""
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


class ResidualBlock(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.around = nn.Sequential()
        if (before, stride) != (after, 1):
            self.around = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        return F.relu(self.body(x) + self.around(x))


class VisionTransformer(nn.Module):
    """A transformer of torch's own layers over sixteen patches of images `[batch, 1, 8, 8]`."""

    def __init__(self, width: int = 64, layers: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, 2)
        self.places = nn.Parameter(torch.randn(16, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits `[batch, 10]`."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        return self.head(self.norm(self.body(x)).mean(1))


def held_out_digits() -> tuple[Tensor, Tensor]:
    """Return the held-out images with all nine shifts by up to a pixel, and their digits.

    Without the shifts, two or three of the 359 images would dominate a trained network's loss.
    """
    images, digits = DigitsWorkload().held_out()
    padded = F.pad(images, (1, 1, 1, 1))
    moved = [padded[:, :, y : y + 8, x : x + 8] for y in range(3) for x in range(3)]
    return torch.cat(moved), digits.repeat(9)
