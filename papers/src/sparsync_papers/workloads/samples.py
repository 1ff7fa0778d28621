"""Samples by number, dealt to ranks; files by name; transformations of images."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sparsync.cli.workloads.base import Batch
from sparsync.cli.workloads.digits import chosen_samples
from sparsync.errors import ConfigurationError

__all__ = ["Samples", "existing", "flipped", "normalised", "padded", "read_lines"]


class Samples(ABC):
    """Numbered samples of a data set's part."""

    @abstractmethod
    def __len__(self) -> int:
        """How many there are."""

    @abstractmethod
    def batch(self, chosen: Tensor, generator: np.random.Generator | None) -> Batch:
        """Return inputs and targets.

        Args:
            chosen: numbers of samples, `[batch]`.
            generator: for what is random while training (crops, masks); None: to evaluate on, where
                the same samples always give the same batch.
        """

    def chosen(
        self, *, seed: int, step: int, rank: int, world_size: int, batch_size: int
    ) -> Tensor:
        """Return the numbers of a rank's samples of a step; here as ``chosen_samples`` does."""
        return chosen_samples(
            len(self),
            seed=seed,
            step=step,
            rank=rank,
            world_size=world_size,
            batch_size=batch_size,
        )


def existing(folder: Path, names: Sequence[str], *, what: str, advice: str) -> Path:
    """Return the first of some files or folders that is there.

    Args:
        folder: where to look.
        names: paths in it, the preferred first.
        what: is looked for, as "the training images of CIFAR-10".
        advice: what to do where none is there.

    Raises:
        ConfigurationError: none is.
    """
    for name in names:
        if (folder / name).exists():
            return folder / name
    missing = folder if not folder.is_dir() else f"{' or '.join(names)} in {folder}"
    raise ConfigurationError(f"{what}: there is no {missing}; {advice}")


def read_lines(path: Path) -> Iterator[str]:
    """Read a text file in UTF-8, line by line; lines come without their ends.

    Raises:
        ConfigurationError: it cannot be read, or is not text.
    """
    try:
        with path.open(encoding="utf-8", newline="\n") as lines:
            for line in lines:
                yield line.rstrip("\r\n")
    except OSError as error:
        raise ConfigurationError(
            f"cannot read {path} ({error.strerror}); give a folder that you may read"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is not text in UTF-8; unpack or convert it") from error


def padded(rows: Sequence[Tensor], value: float) -> Tensor:
    """Stack rows of unequal length, `[rows, longest]`."""
    return pad_sequence(list(rows), batch_first=True, padding_value=value)


def normalised(
    pixels: Tensor, mean: tuple[float, float, float], deviation: tuple[float, float, float]
) -> Tensor:
    """Return ``float32`` images `[n, 3, height, width]` of ``uint8`` ones: in [0, 1], then whitened."""
    shift, scale = (torch.tensor(values).view(3, 1, 1) for values in (mean, deviation))
    return (pixels.float() / 255 - shift) / scale


def flipped(images: Tensor, generator: np.random.Generator) -> Tensor:
    """Mirror every other image, on average, from left to right."""
    mirrored = torch.from_numpy(generator.random(len(images)) < 0.5)
    return torch.where(mirrored[:, None, None, None], images.flip(-1), images)
