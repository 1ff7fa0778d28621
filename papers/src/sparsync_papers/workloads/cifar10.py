"""CIFAR-10 (60,000 colour images of 32 x 32 pixels in ten classes) and its classifiers.

The files of the Python version are pickles, which can make the reader call any function. So this module
refuses every name except the few that are needed to rebuild an array of bytes.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, final

import numpy as np
import torch
from torch import Tensor, nn

from sparsync.cli.workloads.digits import shifted
from sparsync.cli.workloads.workload import Defaults
from sparsync.errors import ConfigurationError
from sparsync_papers.models.images import (
    resnet20_cifar10,
    resnet44_cifar10,
    resnet110_cifar10,
    vgg16_cifar10,
)
from sparsync_papers.workloads.folders import (
    FolderWorkload,
    Samples,
    existing,
    flipped,
    normalised,
    seeded,
)

_PIXELS = 3 * 32 * 32
# mean and deviation of the training images
_MEAN, _DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
_FOLDERS = ("cifar-10-batches-py", "cifar-10-batches-bin", ".")
_ADVICE = "unpack CIFAR-10's python or binary archive there"


@final
class Cifar10(Samples):
    """CIFAR-10 images and their classes.

    Args:
        pixels: `[n, 3, 32, 32]`, ``uint8``.
        labels: `[n]`, ``int64``.

    Training shifts images by up to four pixels and mirrors half of them (He et al. 2016, section
    4.2).
    """

    def __init__(self, pixels: Tensor, labels: Tensor) -> None:
        self.pixels, self.labels = pixels, labels

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.labels)

    def batch(self, chosen: Tensor, generator: np.random.Generator | None) -> tuple[Tensor, Tensor]:
        """Return images `[batch, 3, 32, 32]`, ``float32``, and classes; see ``Samples``."""
        images = normalised(self.pixels[chosen], _MEAN, _DEVIATION)
        if generator is not None:
            images = flipped(shifted(images, generator, most=4), generator)
        return images, self.labels[chosen]


def _defaults(batch_size: int) -> Defaults:
    return Defaults(sgd_lr=0.1, adam_lr=1e-3, batch_size=batch_size, weight_decay=1e-4)


@dataclass(frozen=True)
class CifarWorkload(FolderWorkload[Cifar10]):
    """A model on CIFAR-10."""

    width: int = 16  # channels of the first stage

    target: ClassVar[str] = "image"
    classifies: ClassVar[bool] = True
    build: ClassVar[Callable[..., nn.Module]]

    @final
    def find(self) -> list[Path]:
        """Return the five files of training images and the file of test images, in either format."""
        what = "the images of CIFAR-10"
        names = [f"{inner}/data_batch_1{end}" for inner in _FOLDERS for end in ("", ".bin")]
        first = existing(self.data, names, what=what, advice=_ADVICE)
        others = [*(f"data_batch_{number}" for number in range(2, 6)), "test_batch"]
        files = [[name + first.suffix] for name in others]
        return [first, *(existing(first.parent, f, what=what, advice=_ADVICE) for f in files)]

    @final
    def load(self) -> tuple[Cifar10, Cifar10]:
        """See ``FolderWorkload``."""
        *training, test = (read_binary(f) if f.suffix else read_python(f) for f in self.find())
        return Cifar10(*(torch.cat(parts) for parts in zip(*training, strict=True))), Cifar10(*test)

    @final
    def make_model(self, seed: int) -> nn.Module:
        """See ``Workload``."""
        return seeded(type(self).build, seed, width=self.width)


@final
@dataclass(frozen=True)
class Vgg16Cifar10(CifarWorkload):
    """VGG-16 as in Ok-Topk, section 5, with its published settings (lr 0.1, momentum 0.9)."""

    width: int = 64

    name = "vgg16-cifar10"
    build = staticmethod(vgg16_cifar10)
    defaults = _defaults(batch_size=16)


@final
class Resnet20Cifar10(CifarWorkload):
    """ResNet-20 as in SparCML, Figure 1, with the batch size of ResNet-110.

    All other settings are from He et al. 2016, section 4.2.
    """

    name = "resnet20-cifar10"
    build = staticmethod(resnet20_cifar10)
    defaults = _defaults(batch_size=32)


@final
class Resnet44Cifar10(CifarWorkload):
    """ResNet-44 as in RedSync, Table 1: 4 ranks with 64 images each.

    All other settings are from He et al. 2016, section 4.2.
    """

    name = "resnet44-cifar10"
    build = staticmethod(resnet44_cifar10)
    defaults = _defaults(batch_size=64)


@final
class Resnet110Cifar10(CifarWorkload):
    """ResNet-110 as in SparCML, Table 3: 256 images on 8 ranks.

    All other settings are from He et al. 2016, section 4.2.
    """

    name = "resnet110-cifar10"
    build = staticmethod(resnet110_cifar10)
    defaults = _defaults(batch_size=32)


def read_binary(path: Path) -> tuple[Tensor, Tensor]:
    """Read records of one byte for the class and 3,072 bytes for the red, green and blue pixels."""
    content = np.fromfile(path, dtype=np.uint8)
    if not len(content) or len(content) % (1 + _PIXELS):
        raise ConfigurationError(
            f"{path} has {len(content):,} bytes, which is not a multiple of {1 + _PIXELS:,}; {_ADVICE} "
            "again"
        )
    records = content.reshape(-1, 1 + _PIXELS)
    return _checked(path, records[:, 1:], records[:, 0])


def read_python(path: Path) -> tuple[Tensor, Tensor]:
    """Read a pickled dictionary with ``data``, `[n, 3072]`, and ``labels``; see the module docstring."""
    try:
        with path.open("rb") as file:
            content = _Unpickler(file, encoding="bytes").load()
        pixels, labels = content[b"data"], np.array(content[b"labels"])
        bytes_ = isinstance(pixels, np.ndarray) and pixels.dtype == np.uint8
        if bytes_ and labels.dtype.kind == "i":
            return _checked(path, pixels, labels)
        why = "data is not an array of unsigned bytes, or labels are not integers"
    except ConfigurationError:
        raise
    except Exception as error:  # a broken pickle may raise almost any exception
        why = f"{type(error).__name__}: {error}"
    raise ConfigurationError(f"{path} is not a batch of CIFAR-10 ({why}); {_ADVICE} again")


def _checked(path: Path, pixels: np.ndarray, labels: np.ndarray) -> tuple[Tensor, Tensor]:
    if pixels.shape != (len(labels), _PIXELS) or not len(labels):
        raise ConfigurationError(
            f"{path} has {len(labels)} labels and pixels {pixels.shape}, expected a row of {_PIXELS} "
            f"per label; {_ADVICE} again"
        )
    if labels.min() < 0 or labels.max() > 9:
        raise ConfigurationError(f"{path} has a label outside of 0 to 9; {_ADVICE} again")
    images = torch.from_numpy(np.array(pixels, order="C")).view(-1, 3, 32, 32)
    return images, torch.from_numpy(labels.astype(np.int64))


# A pickled array of bytes uses these names; numpy's module has an old and a new name.  In old
# protocols, Python 3 writes bytes as a call of ``codecs.encode``, always with latin1.
_REBUILD = np.empty(0).__reduce__()[0]
_ALLOWED = MappingProxyType(
    {
        ("numpy.core.multiarray", "_reconstruct"): _REBUILD,
        ("numpy._core.multiarray", "_reconstruct"): _REBUILD,
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("_codecs", "encode"): lambda text, encoding="latin1": text.encode("latin1"),
    }
)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is refused")
        return _ALLOWED[module, name]
