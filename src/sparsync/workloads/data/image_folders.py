"""Folders of images, one per class, as ImageNet is unpacked; Pillow decodes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, final

import numpy as np
import torch
from torch import Tensor

from sparsync.errors import ConfigurationError
from sparsync.workloads.data.base import Samples, existing
from sparsync.workloads.data.pictures import flipped, normalised

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["ImageFolders", "centre_box", "find_image_folders", "load_image_folders", "random_box"]

_SUFFIXES = (".jpeg", ".jpg", ".png")
_BILINEAR = 2  # Pillow's number of that filter
_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's training images

Box = tuple[float, float, float, float]  # left, top, right, bottom


@final
class ImageFolders(Samples):
    """Images, decoded when they are asked for.

    While training, a random part of an image is scaled, and every other is mirrored; else the centre
    is.

    Args:
        folder: has one folder per class.
        classes: their names; a class's place is its number.
        side: pixels of what comes out, in height and width.

    Raises:
        ConfigurationError: it has another class, or no image.
    """

    def __init__(self, folder: Path, classes: list[str], *, side: int) -> None:
        self.folder, self.classes, self.side = folder, classes, side
        numbers = {name: number for number, name in enumerate(classes)}
        self.files: list[tuple[str, int]] = []  # names below ``folder``, and classes
        for name in _folders(folder):
            if name not in numbers:
                raise ConfigurationError(
                    f"{folder / name} is of a class that has no training images; remove it, or add some"
                )
            images = sorted(
                file.name for file in (folder / name).iterdir() if file.suffix.lower() in _SUFFIXES
            )
            self.files += [(f"{name}/{image}", numbers[name]) for image in images]
        if not self.files:
            raise ConfigurationError(
                f"there is no image in {folder}; give folders of {', '.join(_SUFFIXES)}, one per class"
            )

    def __len__(self) -> int:
        """How many there are."""
        return len(self.files)

    def batch(self, chosen: Tensor, generator: np.random.Generator | None) -> tuple[Tensor, Tensor]:
        """See ``Samples``: images `[batch, 3, side, side]`, ``float32``, and classes `[batch]`."""
        files = [self.files[number] for number in chosen.tolist()]
        pixels = torch.stack([self._pixels(self.folder / name, generator) for name, _ in files])
        images = normalised(pixels, _MEAN, _DEVIATION)
        if generator is not None:
            images = flipped(images, generator)
        return images, torch.tensor([number for _, number in files])

    def _pixels(self, path: Path, generator: np.random.Generator | None) -> Tensor:
        """Decode and scale, `[3, side, side]` with ``uint8``."""
        try:
            from PIL import Image
        except ImportError as error:
            raise ConfigurationError(
                f"images are decoded by Pillow, which is not installed ({error}): "
                "pip install 'sparsync[images]'"
            ) from error
        try:
            with Image.open(path) as image:
                scaled = self._scaled(image.convert("RGB"), generator)
        except (OSError, SyntaxError, ValueError) as error:  # what Pillow raises for broken files
            raise ConfigurationError(
                f"cannot read the image {path} ({error}); replace or remove it"
            ) from error
        return torch.from_numpy(np.array(scaled)).permute(2, 0, 1)

    def _scaled(self, image: Image, generator: np.random.Generator | None) -> Image:
        size = image.size
        box = centre_box(*size) if generator is None else random_box(*size, generator)
        return image.resize((self.side, self.side), _BILINEAR, box)


def random_box(
    width: int,
    height: int,
    generator: np.random.Generator,
    *,
    least: float = 0.08,
    slant: float = 4 / 3,
    attempts: int = 10,
) -> Box:
    """Draw a part of an image: its share of the area, its aspect ratio, its place.

    Args:
        width: of the image, in pixels.
        height: of the image.
        generator: of the choices.
        least: share of the area (the most is all of it).
        slant: largest ratio of the sides, either way.
        attempts: to find one that fits; else it is the whole centre.

    References: Szegedy et al., `Going Deeper with Convolutions <https://arxiv.org/abs/1409.4842>`_,
    2014, section 6.
    """
    for _ in range(attempts):
        area = width * height * generator.uniform(least, 1)
        ratio = math.exp(generator.uniform(-math.log(slant), math.log(slant)))
        wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < high <= height:
            left = int(generator.integers(width - wide + 1))
            top = int(generator.integers(height - high + 1))
            return left, top, left + wide, top + high
    return centre_box(width, height, share=1)


def centre_box(width: int, height: int, *, share: float = 224 / 256) -> Box:
    """Return the square in the middle of an image.

    Args:
        width: of the image, in pixels.
        height: of the image.
        share: of the shorter side (Krizhevsky et al. 2012, section 2: 224 of 256).

    Example:
        >>> centre_box(300, 256)
        (38.0, 16.0, 262.0, 240.0)
    """
    side = min(width, height) * share
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def find_image_folders(folder: Path) -> tuple[Path, Path]:
    """Return ``train`` and ``val``.

    Args:
        folder: has both.

    Raises:
        ConfigurationError: one is missing.
    """
    advice = "unpack ImageNet there, with a folder per class (in val, too)"
    training, held_out = (
        existing(folder, [name], what="the images", advice=advice) for name in ("train", "val")
    )
    return training, held_out


def load_image_folders(
    folders: tuple[Path, Path], *, side: int
) -> tuple[ImageFolders, ImageFolders]:
    """List the images; the classes are the folders of the first, by the alphabet.

    Args:
        folders: see ``find_image_folders``.
        side: pixels of what comes out.

    Raises:
        ConfigurationError: one of them has no image.
    """
    classes = _folders(folders[0])
    training, held_out = (ImageFolders(folder, classes, side=side) for folder in folders)
    return training, held_out


def _folders(folder: Path) -> list[str]:
    return sorted(inner.name for inner in folder.iterdir() if inner.is_dir())
