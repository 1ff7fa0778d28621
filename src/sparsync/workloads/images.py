"""The papers' classifiers of images, on CIFAR-10 and on ImageNet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, final

from torch import nn

from sparsync.workloads.base import CrossEntropy, Defaults
from sparsync.workloads.data.cifar10 import Cifar10, find_cifar10, load_cifar10
from sparsync.workloads.data.image_folders import (
    ImageFolders,
    find_image_folders,
    load_image_folders,
)
from sparsync.workloads.folders import FolderWorkload, seeded
from sparsync.workloads.models.alexnet import alexnet
from sparsync.workloads.models.resnet import (
    resnet18x4,
    resnet20_cifar10,
    resnet34x4,
    resnet44_cifar10,
    resnet50,
    resnet110_cifar10,
)
from sparsync.workloads.models.vgg import vgg16_cifar10, vgg16_imagenet

__all__ = [
    "AlexnetImagenet",
    "CifarWorkload",
    "ImagenetWorkload",
    "Resnet110Cifar10",
    "Resnet18x4Imagenet",
    "Resnet20Cifar10",
    "Resnet34x4Imagenet",
    "Resnet44Cifar10",
    "Resnet50Imagenet",
    "Vgg16Cifar10",
    "Vgg16Imagenet",
]

Build = Callable[..., nn.Module]


@dataclass(frozen=True)
class CifarWorkload(FolderWorkload):
    """A model on CIFAR-10.

    Attributes:
        width: channels of the first stage.
    """

    width: int = 16

    target: ClassVar[str] = "image"
    classifies: ClassVar[bool] = True
    build: ClassVar[Build]

    @final
    def find(self) -> list[Path]:
        """See ``FolderWorkload``."""
        return find_cifar10(self.data)

    @final
    def load(self) -> tuple[Cifar10, Cifar10]:
        """See ``FolderWorkload``."""
        return load_cifar10(self.find())

    @final
    def make_model(self, seed: int) -> nn.Module:
        """See ``Workload``."""
        return seeded(type(self).build, seed, width=self.width)


@final
@dataclass(frozen=True)
class Vgg16Cifar10(CifarWorkload):
    """Ok-Topk, section 5, with the settings of its published runs (lr 0.1, momentum 0.9)."""

    width: int = 64

    name: ClassVar[str] = "vgg16-cifar10"
    build: ClassVar[Build] = staticmethod(vgg16_cifar10)
    defaults: ClassVar[Defaults] = Defaults(
        sgd_lr=0.1, adam_lr=1e-3, batch_size=16, weight_decay=1e-4
    )


@final
@dataclass(frozen=True)
class Resnet20Cifar10(CifarWorkload):
    """SparCML, Figure 1; settings of He et al. 2016, section 4.2, batch as of ResNet-110."""

    name: ClassVar[str] = "resnet20-cifar10"
    build: ClassVar[Build] = staticmethod(resnet20_cifar10)
    defaults: ClassVar[Defaults] = Defaults(
        sgd_lr=0.1, adam_lr=1e-3, batch_size=32, weight_decay=1e-4
    )


@final
@dataclass(frozen=True)
class Resnet44Cifar10(CifarWorkload):
    """RedSync, Table 1: 4 ranks with 64 images each; the rest of He et al. 2016, section 4.2."""

    name: ClassVar[str] = "resnet44-cifar10"
    build: ClassVar[Build] = staticmethod(resnet44_cifar10)
    defaults: ClassVar[Defaults] = Defaults(
        sgd_lr=0.1, adam_lr=1e-3, batch_size=64, weight_decay=1e-4
    )


@final
@dataclass(frozen=True)
class Resnet110Cifar10(CifarWorkload):
    """SparCML, Table 3: 256 images on 8 ranks; the rest of He et al. 2016, section 4.2."""

    name: ClassVar[str] = "resnet110-cifar10"
    build: ClassVar[Build] = staticmethod(resnet110_cifar10)
    defaults: ClassVar[Defaults] = Defaults(
        sgd_lr=0.1, adam_lr=1e-3, batch_size=32, weight_decay=1e-4
    )


@dataclass(frozen=True)
class ImagenetWorkload(FolderWorkload):
    """A model on folders of images, as many classes as there are folders; top-5 is reported, too.

    Attributes:
        width: channels of the first stage.
        side: pixels of an image, in height and width.
    """

    width: int = 64
    side: int = 224

    target: ClassVar[str] = "image"
    classifies: ClassVar[bool] = True
    build: ClassVar[Build]

    @property
    def objective(self) -> CrossEntropy:
        """See ``Workload``."""
        return CrossEntropy(top=5)

    @cached_property
    def folders(self) -> tuple[ImageFolders, ImageFolders]:
        """The images, listed when they are first asked for."""
        return load_image_folders(self.find(), side=self.side)

    @final
    def find(self) -> tuple[Path, Path]:
        """See ``FolderWorkload``."""
        return find_image_folders(self.data)

    @final
    def load(self) -> tuple[ImageFolders, ImageFolders]:
        """See ``FolderWorkload``."""
        return self.folders

    def sizes(self) -> dict[str, int]:
        """Return the builder's arguments."""
        return {"width": self.width, "classes": len(self.folders[0].classes)}

    @final
    def make_model(self, seed: int) -> nn.Module:
        """See ``Workload``."""
        return seeded(type(self).build, seed, **self.sizes())


@final
@dataclass(frozen=True)
class Resnet50Imagenet(ImagenetWorkload):
    """WAGMA, section 5.2: 64 ranks with 64 images each; lr of Goyal et al. 2017 for 256 images.

    One class more than there are folders: "background", which gives the paper's number of parameters.
    """

    name: ClassVar[str] = "resnet50-imagenet"
    build: ClassVar[Build] = staticmethod(resnet50)
    defaults: ClassVar[Defaults] = Defaults(
        sgd_lr=0.1, adam_lr=1e-3, batch_size=64, weight_decay=1e-4
    )

    def sizes(self) -> dict[str, int]:
        """See ``ImagenetWorkload``."""
        return {"width": self.width, "classes": len(self.folders[0].classes) + 1}


@final
@dataclass(frozen=True)
class AlexnetImagenet(ImagenetWorkload):
    """RedSync, Table 1: 6 ranks with 32 images each; the rest of Krizhevsky et al. 2012, section 5."""

    name: ClassVar[str] = "alexnet-imagenet"
    build: ClassVar[Build] = staticmethod(alexnet)
    defaults: ClassVar[Defaults] = Defaults(
        sgd_lr=0.01, adam_lr=1e-4, batch_size=32, weight_decay=5e-4
    )

    def sizes(self) -> dict[str, int]:
        """See ``ImagenetWorkload``: fully connected layers are as wide in proportion."""
        return {**super().sizes(), "hidden": 64 * self.width}


@final
@dataclass(frozen=True)
class Vgg16Imagenet(ImagenetWorkload):
    """RedSync, Table 1: 6 ranks with 32 images each; the rest of Simonyan & Zisserman, section 3.1."""

    name: ClassVar[str] = "vgg16-imagenet"
    build: ClassVar[Build] = staticmethod(vgg16_imagenet)
    defaults: ClassVar[Defaults] = Defaults(
        sgd_lr=0.01, adam_lr=1e-4, batch_size=32, weight_decay=5e-4
    )

    def sizes(self) -> dict[str, int]:
        """See ``ImagenetWorkload``: fully connected layers are as wide in proportion."""
        return {**super().sizes(), "hidden": 64 * self.width}


@final
@dataclass(frozen=True)
class Resnet18x4Imagenet(ImagenetWorkload):
    """SparCML, section 8.4: 64 ranks with 8 images each.

    Its learning rate of 1 is CNTK's, whose momentum averages: with momentum 0.9, torch's 0.1.
    """

    width: int = 256

    name: ClassVar[str] = "resnet18x4-imagenet"
    build: ClassVar[Build] = staticmethod(resnet18x4)
    defaults: ClassVar[Defaults] = Defaults(
        sgd_lr=0.1, adam_lr=1e-3, batch_size=8, weight_decay=1e-4
    )


@final
@dataclass(frozen=True)
class Resnet34x4Imagenet(ImagenetWorkload):
    """SparCML, section 8.4: as ``Resnet18x4Imagenet``."""

    width: int = 256

    name: ClassVar[str] = "resnet34x4-imagenet"
    build: ClassVar[Build] = staticmethod(resnet34x4)
    defaults: ClassVar[Defaults] = Resnet18x4Imagenet.defaults
