"""Workloads that read their data from a folder."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Generic, TypeVar, final

import numpy as np
import torch
from torch import nn

from sparsync.cli.workloads.base import Batch, Workload
from sparsync.errors import ConfigurationError
from sparsync_papers.workloads.samples import Samples

S = TypeVar("S", bound=Samples)


def seeded(build: Callable[..., nn.Module], seed: int, **options: object) -> nn.Module:
    """Build a model whose initial weights depend on the seed alone; the caller's generator stays."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build(**options)


@dataclass(frozen=True)
class FolderWorkload(Workload, Generic[S]):
    """A workload of files; ranks train and evaluate on disjoint shares."""

    reads_folder: ClassVar[bool] = True
    data: Path  # the folder; ``docs/data.md`` says what is expected there

    def __post_init__(self) -> None:
        if not self.data.is_dir():
            raise ConfigurationError(
                f"{self.name} looks for its data in {self.data}, which is no folder; give one with "
                "--data DIR (docs/data.md says what it has to have)"
            )
        self.find()  # refuses a folder without the files, before anything starts

    @abstractmethod
    def find(self) -> object:
        """Return the files that ``load`` reads; quick.

        Raises:
            ConfigurationError: one is missing.
        """

    @abstractmethod
    def load(self) -> tuple[S, S]:
        """Read the training samples and the held-out ones.

        Raises:
            ConfigurationError: a file is not as expected.
        """

    @final
    @cached_property
    def parts(self) -> tuple[S, S]:
        """The result of ``load``, read on first use."""
        return self.load()

    @final
    def batch(self, *, seed: int, step: int, rank: int, world_size: int, batch_size: int) -> Batch:
        """See ``Workload``."""
        training = self.parts[0]
        chosen = training.chosen(
            seed=seed, step=step, rank=rank, world_size=world_size, batch_size=batch_size
        )
        return training.batch(chosen, np.random.default_rng([seed, step, rank]))

    @final
    def held_out_batches(self, *, rank: int, world_size: int, batch_size: int) -> Iterator[Batch]:
        """See ``Workload``."""
        held_out = self.parts[1]
        for start in range(rank, len(held_out), batch_size * world_size):
            end = min(start + batch_size * world_size, len(held_out))
            yield held_out.batch(torch.arange(start, end, world_size), None)
