"""The seam of readers: samples by number, how they are dealt to ranks, and how files are asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sparsync.errors import ConfigurationError
from sparsync.workloads.base import Batch

__all__ = ["Samples", "chosen_samples", "existing", "padded", "read_lines"]


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


def chosen_samples(
    count: int, *, seed: int, step: int, rank: int, world_size: int, batch_size: int
) -> Tensor:
    """Return the numbers of a rank's samples of a step, `[batch_size]`.

    Every rank has every ``world_size``-th of ``count`` samples, reshuffled each epoch; a batch may span
    several epochs.

    Raises:
        ConfigurationError: this rank has none.

    Example:
        >>> place = {"seed": 0, "step": 0, "world_size": 2, "batch_size": 4}
        >>> sorted(chosen_samples(8, rank=1, **place).tolist())
        [1, 3, 5, 7]

    Cost: a permutation of the rank's share for each batch.
    """
    shard = np.arange(rank, count, world_size)
    if not len(shard):
        raise ConfigurationError(
            f"{world_size} ranks share {count} training samples: rank {rank} has none; use at most "
            f"{count} ranks"
        )
    epoch, start = divmod(step * batch_size, len(shard))
    epochs = range(epoch, epoch + -(-(start + batch_size) // len(shard)))
    order = [np.random.default_rng([seed, e, rank]).permutation(shard) for e in epochs]
    return torch.from_numpy(np.concatenate(order)[start : start + batch_size])


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
