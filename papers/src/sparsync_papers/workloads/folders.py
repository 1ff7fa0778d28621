"""A base class for workloads that read files from a folder and divide the samples among ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Generic, TypeVar, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from sparsync.cli.workloads.workload import Batch, Draw, Workload
from sparsync.errors import ConfigurationError


class Samples(ABC):
    """The numbered samples of one part of a data set."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def batch(self, chosen: Tensor, generator: np.random.Generator | None) -> Batch:
        """Return inputs and targets.

        Args:
            chosen: numbers of samples, `[batch]`.
            generator: for random choices in training (crops, masks); None in evaluation, where the
                same samples always give the same batch.
        """

    def chosen(self, draw: Draw) -> Tensor:
        """Return the numbers of the samples that a rank uses in a step."""
        return draw.samples(len(self))


S = TypeVar("S", bound=Samples)


def seeded(build: Callable[..., nn.Module], seed: int, **options: object) -> nn.Module:
    """Build a model whose weights depend only on the seed; leave the global generator unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build(**options)


@dataclass(frozen=True)
class FolderWorkload(Workload, Generic[S]):
    """A workload that reads files; ranks train and evaluate on disjoint shares."""

    reads_folder: ClassVar[bool] = True
    data: Path  # the folder; ``docs/data.md`` describes its content

    def __post_init__(self) -> None:
        if not self.data.is_dir():
            raise ConfigurationError(
                f"{self.name} looks for its data in {self.data}, which is not a folder; give one with "
                "--data DIR (docs/data.md says what it must contain)"
            )
        self.find()  # refuses a folder that lacks files, before anything starts

    @abstractmethod
    def find(self) -> object:
        """Return the files that ``load`` reads, without reading them.

        Raises:
            ConfigurationError: a file is missing.
        """

    @abstractmethod
    def load(self) -> tuple[S, S]:
        """Read the training and the held-out samples.

        Raises:
            ConfigurationError: a file does not have the expected content.
        """

    @final
    @cached_property
    def parts(self) -> tuple[S, S]:
        """The training and the held-out samples, which ``load`` reads on first use."""
        return self.load()

    @final
    def batch(self, draw: Draw) -> Batch:
        """See ``Workload``."""
        training = self.parts[0]
        return training.batch(training.chosen(draw), draw.generator())

    @final
    def held_out_batches(self, *, rank: int, world_size: int, batch_size: int) -> Iterator[Batch]:
        """See ``Workload``."""
        held_out = self.parts[1]
        for start in range(rank, len(held_out), batch_size * world_size):
            end = min(start + batch_size * world_size, len(held_out))
            yield held_out.batch(torch.arange(start, end, world_size), None)


# ---- files and images ----------------------------------------------------------------------------


def existing(folder: Path, names: Sequence[str], *, what: str, advice: str) -> Path:
    """Return the first file or folder of ``names`` that exists.

    Raises:
        ConfigurationError: none of them exists; the message names ``what`` and gives the
            ``advice``.
    """
    for name in names:
        if (folder / name).exists():
            return folder / name
    missing = folder if not folder.is_dir() else f"{' or '.join(names)} in {folder}"
    raise ConfigurationError(f"{what}: there is no {missing}; {advice}")


def read_lines(path: Path) -> Iterator[str]:
    """Read a text file in UTF-8; return its lines without line ends.

    Raises:
        ConfigurationError: the file cannot be read, or is not text.
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
    """Stack rows of unequal length into `[rows, longest]`, padded with ``value``."""
    return pad_sequence(list(rows), batch_first=True, padding_value=value)


def normalised(
    pixels: Tensor, mean: tuple[float, float, float], deviation: tuple[float, float, float]
) -> Tensor:
    """Scale ``uint8`` images `[n, 3, height, width]` to [0, 1], then by mean and deviation."""
    shift, scale = (torch.tensor(values).view(3, 1, 1) for values in (mean, deviation))
    return (pixels.float() / 255 - shift) / scale


def flipped(images: Tensor, generator: np.random.Generator) -> Tensor:
    """Mirror each image from left to right with probability 1/2."""
    mirrored = torch.from_numpy(generator.random(len(images)) < 0.5)
    return torch.where(mirrored[:, None, None, None], images.flip(-1), images)
