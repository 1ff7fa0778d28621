"""Image classifiers on ImageNet, or on any other images that are sorted into one folder per class."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, final

import numpy as np
import torch
from torch import Tensor, nn

from sparsync.cli.workloads.workload import CrossEntropy, Defaults
from sparsync.errors import ConfigurationError
from sparsync_papers.models.images import alexnet, resnet18x4, resnet34x4, resnet50, vgg16_imagenet
from sparsync_papers.workloads.folders import (
    FolderWorkload,
    Samples,
    existing,
    flipped,
    normalised,
    seeded,
)

if TYPE_CHECKING:
    from PIL.Image import Image

_SUFFIXES = (".jpeg", ".jpg", ".png")
_BILINEAR = 2  # Pillow's number for this filter
# mean and deviation of ImageNet's training images
_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

Box = tuple[float, float, float, float]  # left, top, right, bottom


@final
class ImageFolders(Samples):
    """Images in folders, decoded on demand.

    Training scales a random part of each image and mirrors half of the images; evaluation scales
    the centre.

    Raises:
        ConfigurationError: a folder is not among the classes, or there is no image.
    """

    def __init__(self, folder: Path, classes: list[str], *, side: int) -> None:
        self.folder, self.classes, self.side = folder, classes, side
        numbers = {name: number for number, name in enumerate(classes)}
        self.files: list[tuple[str, int]] = []  # paths below ``folder``, and classes
        for name in _folders(folder):
            if name not in numbers:
                raise ConfigurationError(
                    f"{folder / name} belongs to a class without training images; remove it, or add some"
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
        """Return the number of images."""
        return len(self.files)

    def batch(self, chosen: Tensor, generator: np.random.Generator | None) -> tuple[Tensor, Tensor]:
        """Return images `[batch, 3, side, side]`, ``float32``, and classes `[batch]`; see ``Samples``."""
        files = [self.files[number] for number in chosen.tolist()]
        pixels = torch.stack([self._pixels(self.folder / name, generator) for name, _ in files])
        images = normalised(pixels, _MEAN, _DEVIATION)
        if generator is not None:
            images = flipped(images, generator)
        return images, torch.tensor([number for _, number in files])

    def _pixels(self, path: Path, generator: np.random.Generator | None) -> Tensor:
        """Decode and scale an image; return `[3, side, side]`, ``uint8``."""
        try:
            from PIL import Image
        except ImportError as error:
            raise ConfigurationError(
                f"images are decoded by Pillow, which is not installed ({error}): "
                "pip install 'sparsync-papers[images]'"
            ) from error
        try:
            with Image.open(path) as image:
                scaled = self._scaled(image.convert("RGB"), generator)
        except (OSError, SyntaxError, ValueError) as error:  # Pillow raises these for broken files
            raise ConfigurationError(
                f"cannot read the image {path} ({error}); replace or remove it"
            ) from error
        return torch.from_numpy(np.array(scaled)).permute(2, 0, 1)

    def _scaled(self, image: Image, generator: np.random.Generator | None) -> Image:
        size = image.size
        box = centre_box(*size) if generator is None else random_box(*size, generator)
        return image.resize((self.side, self.side), _BILINEAR, box)


def random_box(
    width: int,  # width of the image in pixels
    height: int,  # height of the image
    generator: np.random.Generator,  # draws the choices
    *,
    least: float = 0.08,  # least share of the area (the largest is 1)
    slant: float = 4 / 3,  # largest ratio of the longer to the shorter side
    attempts: int = 10,  # attempts to find a box that fits; then the central square is used
) -> Box:
    """Draw a random box in an image, with random area, aspect ratio and position.

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
    """Return the central square whose side is ``share`` times the image's shorter side.

    Example:
        >>> centre_box(300, 256)
        (38.0, 16.0, 262.0, 240.0)
    """
    side = min(width, height) * share
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def _folders(folder: Path) -> list[str]:
    return sorted(inner.name for inner in folder.iterdir() if inner.is_dir())


@dataclass(frozen=True)
class ImagenetWorkload(FolderWorkload[ImageFolders]):
    """A classifier of images in folders, one class per folder; also reports the top-5 accuracy."""

    width: int = 64  # channels of the first stage
    side: int = 224  # pixels of an image, in height and width

    target: ClassVar[str] = "image"
    classifies: ClassVar[bool] = True
    build: ClassVar[Callable[..., nn.Module]]

    @property
    def objective(self) -> CrossEntropy:
        """See ``Workload``."""
        return CrossEntropy(top=5)

    @final
    def find(self) -> list[Path]:
        """Return the folders ``train`` and ``val``."""
        advice = "unpack ImageNet there, with a folder per class (in val as well)"
        return [
            existing(self.data, [name], what="the images", advice=advice)
            for name in ("train", "val")
        ]

    @final
    def load(self) -> tuple[ImageFolders, ImageFolders]:
        """List the images; the classes are the training folders in alphabetical order."""
        training, held_out = self.find()
        classes = _folders(training)
        return (
            ImageFolders(training, classes, side=self.side),
            ImageFolders(held_out, classes, side=self.side),
        )

    def sizes(self) -> dict[str, int]:
        """Return the arguments of the function that builds the model."""
        return {"width": self.width, "classes": len(self.parts[0].classes)}

    @final
    def make_model(self, seed: int) -> nn.Module:
        """See ``Workload``."""
        return seeded(type(self).build, seed, **self.sizes())


@final
class Resnet50Imagenet(ImagenetWorkload):
    """ResNet-50 as in WAGMA, section 5.2: 64 ranks with 64 images each.

    The learning rate for 256 images is from Goyal et al. 2017. The model has one class
    ("background") in addition to the folders. This gives the paper's parameter count.
    """

    name = "resnet50-imagenet"
    build = staticmethod(resnet50)
    defaults = Defaults(sgd_lr=0.1, adam_lr=1e-3, batch_size=64, weight_decay=1e-4)

    def sizes(self) -> dict[str, int]:
        """See ``ImagenetWorkload``."""
        return {"width": self.width, "classes": len(self.parts[0].classes) + 1}


class _WithHiddenLayers(ImagenetWorkload):
    """A model whose fully connected layers scale in proportion to ``--width``."""

    defaults = Defaults(sgd_lr=0.01, adam_lr=1e-4, batch_size=32, weight_decay=5e-4)

    def sizes(self) -> dict[str, int]:
        return {**super().sizes(), "hidden": 64 * self.width}


@final
class AlexnetImagenet(_WithHiddenLayers):
    """AlexNet as in RedSync, Table 1: 6 ranks with 32 images each.

    All other settings are from Krizhevsky et al. 2012, section 5.
    """

    name = "alexnet-imagenet"
    build = staticmethod(alexnet)


@final
class Vgg16Imagenet(_WithHiddenLayers):
    """VGG-16 as in RedSync, Table 1: 6 ranks with 32 images each.

    All other settings are from Simonyan & Zisserman, section 3.1.
    """

    name = "vgg16-imagenet"
    build = staticmethod(vgg16_imagenet)


@dataclass(frozen=True)
class _Wide(ImagenetWorkload):
    """The wide networks of SparCML, section 8.4: 64 ranks with 8 images each.

    The paper's learning rate of 1 is for CNTK, where momentum is a weighted average of gradients rather
    than a sum. With momentum 0.9, this rate corresponds to 0.1 in torch.
    """

    width: int = 256

    defaults = Defaults(sgd_lr=0.1, adam_lr=1e-3, batch_size=8, weight_decay=1e-4)


@final
class Resnet18x4Imagenet(_Wide):
    """See ``_Wide``."""

    name = "resnet18x4-imagenet"
    build = staticmethod(resnet18x4)


@final
class Resnet34x4Imagenet(_Wide):
    """See ``_Wide``."""

    name = "resnet34x4-imagenet"
    build = staticmethod(resnet34x4)
