"""A small VGG on scikit-learn's images of digits: RedSync's convolutional test in a small form."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsync.cli.workloads.workload import Defaults, Draw, Workload
from sparsync.errors import ConfigurationError

__all__ = ["DigitsWorkload", "SmallVgg", "shifted"]


class SmallVgg(nn.Module):
    """Pairs of 3x3 convolutions, each followed by max-pooling, then two fully connected layers.

    Like the published VGG, it has no batch normalisation: running statistics would be a further source
    of differences between ranks.  ``channels`` lists the numbers of channels in each pair.

    Example:
        >>> model = SmallVgg(seed=0)
        >>> model(torch.zeros(32, 1, 8, 8)).shape
        torch.Size([32, 10])

    References: Simonyan & Zisserman, `Very Deep Convolutional Networks for Large-Scale Image
    Recognition <https://arxiv.org/abs/1409.1556>`_, 2014.
    """

    def __init__(
        self,
        *,
        channels: tuple[tuple[int, int], ...] = ((16, 32), (128, 128)),
        hidden: int = 1024,
        seed: int = 0,
    ) -> None:
        super().__init__()
        side, last = 8 >> len(channels), channels[-1][-1]  # pixels per side, halved by each pair
        with torch.random.fork_rng(devices=[]):  # leaves the caller's generator unchanged
            torch.manual_seed(seed)
            before = (1, *(second for _, second in channels))
            self.convolutions = nn.Sequential(
                *(_pair(entering, *pair) for entering, pair in zip(before, channels, strict=False))
            )
            self.hidden = nn.Linear(last * side * side, hidden)
            self.head = nn.Linear(hidden, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits `[batch, 10]` for images `[batch, 1, 8, 8]`."""
        hidden = torch.relu(self.hidden(self.convolutions(images).flatten(1)))
        logits: Tensor = self.head(hidden)
        return logits


def _pair(before: int, first: int, second: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, first, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(first, second, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


@final
@dataclass(frozen=True)
class DigitsWorkload(Workload):
    """A small VGG on images of digits; every rank gets every world_size-th training image.

    Example:
        >>> draw = Draw(seed=0, step=0, rank=0, world_size=4, batch_size=32)
        >>> images, digits = DigitsWorkload().batch(draw)
        >>> images.shape, digits.shape
        (torch.Size([32, 1, 8, 8]), torch.Size([32]))
    """

    name: ClassVar[str] = "digits"
    target: ClassVar[str] = "image"
    classifies: ClassVar[bool] = True
    defaults: ClassVar[Defaults] = Defaults(sgd_lr=0.1, adam_lr=1e-3, batch_size=32)

    @cached_property
    def parts(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Scikit-learn's 1,797 images: four fifths for training, the rest held out.

        Images are ``float32`` of shape `[n, 1, 8, 8]`, in [0, 1]; digits are ``int64`` of shape `[n]`.
        The split does not depend on the run's seed, so all runs are comparable.

        Raises:
            ConfigurationError: scikit-learn is not installed.
        """
        try:
            from sklearn.datasets import load_digits  # type: ignore[import-untyped, unused-ignore]
        except ImportError as error:
            raise ConfigurationError(
                "the workload digits needs scikit-learn's images, which is not installed "
                f"({error}): pip install 'sparsync[linear]'"
            ) from error
        pixels, digits = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(digits))
        # pixels are 0..16
        images = torch.tensor(pixels[order] / 16, dtype=torch.float32).view(-1, 1, 8, 8)
        targets = torch.tensor(digits[order], dtype=torch.int64)
        cut = round(0.8 * len(order))
        return (images[:cut], targets[:cut]), (images[cut:], targets[cut:])

    def make_model(self, seed: int) -> SmallVgg:
        """See ``Workload``."""
        return SmallVgg(seed=seed)

    def batch(self, draw: Draw) -> tuple[Tensor, Tensor]:
        """Return a batch of a rank's shard, which is reshuffled every epoch; a batch may span epochs.

        Every image is shifted by up to one pixel.  Otherwise, a model would memorise all images within
        20 epochs, and at the end, compared runs would differ only by noise.
        """
        images, digits = self.parts[0]
        chosen = draw.samples(len(digits))
        return shifted(images[chosen], draw.generator(), most=1), digits[chosen]

    def held_out(self) -> tuple[Tensor, Tensor]:
        """See ``Workload``."""
        return self.parts[1]


def shifted(images: Tensor, generator: np.random.Generator, *, most: int) -> Tensor:
    """Shift every square image by up to ``most`` pixels in each direction; fill the gaps with 0."""
    side = images.shape[-1]
    windows = F.pad(images, (most,) * 4).unfold(2, side, 1).unfold(3, side, 1)
    down, right = torch.from_numpy(generator.integers(2 * most + 1, size=(2, len(images))))
    return windows[torch.arange(len(images)), :, down, right]
