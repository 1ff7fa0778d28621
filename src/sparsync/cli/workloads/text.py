"""Text that every machine has: the source of Python's own standard library, as bytes.

Its content depends on the Python version, so losses compare within one version.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from sparsync.cli.workloads.base import HeldInMemory
from sparsync.errors import ConfigurationError

__all__ = ["ByteText", "TextWorkload", "standard_library_files"]

_SKIPPED_FOLDERS = frozenset(
    # tests and installed packages; encodings are tables of numbers, not text
    {"test", "tests", "idle_test", "idlelib", "site-packages", "dist-packages", "encodings"}
)


def standard_library_files(root: Path | None = None) -> list[Path]:
    """List the ``*.py`` files below ``root``, sorted by path, tests and installed packages left out.

    Args:
        root: default: where this Python keeps its standard library.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    files = ((file.relative_to(root).parts, file) for file in root.rglob("*.py"))
    return [file for parts, file in sorted(files) if not _SKIPPED_FOLDERS.intersection(parts)]


@dataclass(frozen=True)
class ByteText:
    """A text cut in two: one part to train on, one held out.

    Attributes:
        training: `[bytes]` with ``torch.uint8``.
        held_out: `[bytes]` with ``torch.uint8``, of other files.
        context: bytes that a model sees at once; a window is one byte longer: the last target.

    Example:
        >>> text = ByteText.of_standard_library()
        >>> tokens, targets = text.batch(seed=0, step=0, rank=0, batch_size=8)
        >>> tokens.shape, bool((tokens[:, 1:] == targets[:, :-1]).all())
        (torch.Size([8, 64]), True)
    """

    training: Tensor
    held_out: Tensor
    context: int

    def __post_init__(self) -> None:
        shortest = min(self.training.numel(), self.held_out.numel())
        if shortest <= self.context:
            raise ConfigurationError(
                f"the text is too short: a part has {shortest} bytes, a window of context "
                f"{self.context} needs {self.context + 1}; this Python has hardly any source files"
            )

    @classmethod
    def of_standard_library(
        cls,
        *,
        max_bytes: int = 8_000_000,
        held_out_every: int = 20,
        context: int = 64,
        root: Path | None = None,
    ) -> ByteText:
        """Read Python's standard library; the same bytes in every process with this Python.

        Args:
            max_bytes: where to stop; the whole is about 10 MB, by Python version.
            held_out_every: of this many files one is held out.
            context: see ``ByteText``.
            root: see ``standard_library_files``.

        Raises:
            ConfigurationError: there is no readable source.
        """
        parts: tuple[list[bytes], list[bytes]] = ([], [])
        left = max_bytes
        for number, file in enumerate(standard_library_files(root), start=1):
            try:
                content = file.read_bytes()[:left]
            except OSError:  # e.g. a dangling link: what cannot be read is not part of the text
                continue
            left -= len(content)
            parts[number % held_out_every == 0].append(content)
            if not left:
                break
        training, held_out = (_tensor(b"".join(part)) for part in parts)
        return cls(training, held_out, context)

    def batch(self, *, seed: int, step: int, rank: int, batch_size: int) -> tuple[Tensor, Tensor]:
        """Draw windows of the training part: a function of the arguments and nothing else.

        Returns:
            Tokens and targets (the next byte of each), both `[batch_size, context]`, ``torch.int64``.
        """
        generator = np.random.default_rng([seed, step, rank])
        starts = generator.integers(self.training.numel() - self.context, size=batch_size)
        return _windows(self.training, torch.from_numpy(starts), self.context)

    def evaluation(self, windows: int) -> tuple[Tensor, Tensor]:
        """Return evenly spaced windows of the held-out part, whatever the seed; see ``batch``."""
        last = self.held_out.numel() - self.context - 1
        starts = torch.arange(windows) * last // max(windows - 1, 1)
        return _windows(self.held_out, starts, self.context)


@dataclass(frozen=True)
class TextWorkload(HeldInMemory):
    """The text's side of a language model's workload; the model is a subclass's.

    Attributes:
        context: bytes per window.
    """

    context: int = 64

    target: ClassVar[str] = "byte"
    classifies: ClassVar[bool] = False

    @cached_property
    def text(self) -> ByteText:
        """The data, read when it is first asked for."""
        return ByteText.of_standard_library(context=self.context)

    def batch(
        self, *, seed: int, step: int, rank: int, world_size: int, batch_size: int
    ) -> tuple[Tensor, Tensor]:
        """See ``Workload``: every rank draws from the whole text, whatever ``world_size``."""
        return self.text.batch(seed=seed, step=step, rank=rank, batch_size=batch_size)

    def held_out(self, *, windows: int = 1024) -> tuple[Tensor, Tensor]:
        """See ``Workload``."""
        return self.text.evaluation(windows)


def _tensor(content: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy())


def _windows(text: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Cut ``context + 1`` bytes at every start; targets lie one byte behind tokens."""
    windows = text[starts[:, None] + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]
