"""Byte-level language models on text that every machine has: the sources of Python's standard library.

The text depends on the Python version, so losses are only comparable within one version.
"""

from __future__ import annotations

import os
import sysconfig
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsync.cli.workloads.workload import Defaults, Draw, Workload
from sparsync.errors import ConfigurationError

__all__ = [
    "HEAD_WIDTH",
    "ByteLstm",
    "ByteText",
    "ByteTransformer",
    "BytesWorkload",
    "LstmWorkload",
    "TextWorkload",
    "standard_library_files",
]

HEAD_WIDTH = 32  # width of an attention head
_BYTES = 256  # size of the vocabulary: every value of a byte

_SKIPPED_FOLDERS = frozenset(
    # leave out tests, installed packages, and encodings, which are tables of numbers rather than text
    {"test", "tests", "idle_test", "idlelib", "site-packages", "dist-packages", "encodings"}
)


def standard_library_files(root: Path | None = None) -> list[Path]:
    """List the ``*.py`` files below ``root``, sorted by path, without tests and installed packages."""
    root = root or Path(sysconfig.get_path("stdlib"))
    found: list[Path] = []
    for folder, inner, names in os.walk(root):
        inner[:] = {*inner} - _SKIPPED_FOLDERS  # ``walk`` enters only the folders left in this list
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found, key=lambda file: file.relative_to(root).parts)


@dataclass(frozen=True)
class ByteText:
    """A text with a training part and a held-out part, both ``torch.uint8`` of shape `[bytes]`.

    Example:
        >>> text = ByteText.of_standard_library()
        >>> tokens, targets = text.batch(Draw(seed=0, step=0, rank=0, world_size=1, batch_size=8))
        >>> tokens.shape, bool((tokens[:, 1:] == targets[:, :-1]).all())
        (torch.Size([8, 64]), True)
    """

    training: Tensor
    held_out: Tensor  # every twentieth file
    context: int  # bytes of a model's context; a window has one more byte, for the last target

    def __post_init__(self) -> None:
        shortest = min(self.training.numel(), self.held_out.numel())
        if shortest <= self.context:
            raise ConfigurationError(
                f"the text is too short: a part has {shortest} bytes, a window of context "
                f"{self.context} needs {self.context + 1}; this Python has hardly any source files"
            )

    @classmethod
    def of_standard_library(cls, *, context: int = 64, root: Path | None = None) -> ByteText:
        """Read 8 MB of Python's standard library, or of the folder ``root``.

        All processes with the same Python version read the same bytes.
        """
        parts = bytearray(), bytearray()
        left = 8_000_000
        for number, file in enumerate(standard_library_files(root), start=1):
            try:
                content = file.read_bytes()[:left]
            except OSError:  # leave out files that cannot be read, e.g. dangling links
                continue
            left -= len(content)
            parts[number % 20 == 0].extend(content)
        training, held_out = (torch.tensor(part, dtype=torch.uint8) for part in parts)
        return cls(training, held_out, context)

    def batch(self, draw: Draw) -> tuple[Tensor, Tensor]:
        """Draw windows of the training part, independent of the number of ranks.

        Returns:
            Tokens and targets (the next byte of each), both `[batch_size, context]`, ``torch.int64``.
        """
        last = self.training.numel() - self.context
        starts = draw.generator().integers(last, size=draw.batch_size)
        return self._windows(self.training, torch.from_numpy(starts))

    def evaluation(self, windows: int) -> tuple[Tensor, Tensor]:
        """Return evenly spaced windows of the held-out part; see ``batch``."""
        last = self.held_out.numel() - self.context - 1
        return self._windows(self.held_out, torch.arange(windows) * last // max(windows - 1, 1))

    def _windows(self, text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Cut ``context + 1`` bytes at every start; targets are the tokens shifted by one byte."""
        windows = text[starts[:, None] + torch.arange(self.context + 1)].long()
        return windows[:, :-1], windows[:, 1:]


@dataclass(frozen=True)
class TextWorkload(Workload):
    """A workload that trains a language model on the text; a subclass provides the model."""

    context: int = 64  # bytes per window

    target: ClassVar[str] = "byte"
    classifies: ClassVar[bool] = False

    @cached_property
    def text(self) -> ByteText:
        """The text, read on first use."""
        return ByteText.of_standard_library(context=self.context)

    def batch(self, draw: Draw) -> tuple[Tensor, Tensor]:
        """See ``Workload``."""
        return self.text.batch(draw)

    def held_out(self) -> tuple[Tensor, Tensor]:
        """See ``Workload``."""
        return self.text.evaluation(1024)


# ---- models ------------------------------------------------------------------------------------------


class ByteTransformer(nn.Module):
    """A transformer that predicts the next byte; pre-norm, learned positions, torch's initial weights.

    The residual stream has ``width`` elements, a multiple of 32, which is the width of an attention
    head.

    Example:
        >>> model = ByteTransformer(seed=0)
        >>> model(torch.zeros(8, 64, dtype=torch.int64)).shape
        torch.Size([8, 64, 256])
        >>> sum(p.numel() for p in ByteTransformer(width=416).parameters())  # 12 w^2 a layer
        8553792

    References: Radford et al., `Language Models are Unsupervised Multitask Learners
    <https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf>`_,
    2019.
    """

    def __init__(
        self, *, context: int = 64, width: int = 160, layers: int = 4, seed: int = 0
    ) -> None:
        super().__init__()
        self.context = context
        with torch.random.fork_rng(devices=[]):  # restores the caller's generator
            torch.manual_seed(seed)
            self.byte_embedding = nn.Embedding(_BYTES, width)
            self.position_embedding = nn.Embedding(context, width)
            self.blocks = nn.ModuleList(_Block(width) for _ in range(layers))
            self.final_norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, _BYTES, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits `[batch, positions, 256]` for tokens `[batch, positions]`, ``torch.int64``."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.byte_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.final_norm(x))
        return logits


class _Block(nn.Module):
    """Attention, then a two-layer perceptron; the output of each is added to the residual stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // HEAD_WIDTH
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(self.attention_norm(x))
        out: Tensor = x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))
        return out

    def _attend(self, x: Tensor) -> Tensor:
        batch, positions, width = x.shape
        split = self.attention_in(x).view(batch, positions, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each [batch, heads, positions, ...]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(x.shape))
        return out


@final
@dataclass(frozen=True)
class BytesWorkload(TextWorkload):
    """The transformer on Python's own source text."""

    width: int = 160  # width of the residual stream, a multiple of a head's width
    layers: int = 4  # blocks

    name: ClassVar[str] = "bytes"
    defaults: ClassVar[Defaults] = Defaults(sgd_lr=0.1, adam_lr=1e-3, batch_size=8)

    def __post_init__(self) -> None:
        if self.width % HEAD_WIDTH:
            raise ConfigurationError(
                f"width is {self.width}; give a multiple of {HEAD_WIDTH}, the width of a head"
            )

    def make_model(self, seed: int) -> ByteTransformer:
        """See ``Workload``."""
        return ByteTransformer(
            context=self.context, width=self.width, layers=self.layers, seed=seed
        )


class ByteLstm(nn.Module):
    """An LSTM that predicts the next byte of a text: RedSync's recurrent test case in a small form.

    The weights of the embedding and the output layer are not tied (as in the paper).  Every window
    starts from a zero state, so the gradient is truncated at the start of the window.

    Example:
        >>> model = ByteLstm(seed=0)
        >>> model(torch.zeros(8, 32, dtype=torch.int64)).shape
        torch.Size([8, 32, 256])

    Differs from the paper: bytes, not words; 224 hidden units per layer, not 1500; no dropout.

    References: Press & Wolf, `Using the Output Embedding to Improve Language Models
    <https://arxiv.org/abs/1608.05859>`_, 2016; RedSync, section 6.2.
    """

    def __init__(self, *, width: int = 224, layers: int = 2, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):  # restores the caller's generator
            torch.manual_seed(seed)
            self.byte_embedding = nn.Embedding(_BYTES, 64)
            self.lstm = nn.LSTM(64, width, layers, batch_first=True)
            self.head = nn.Linear(width, _BYTES)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits `[batch, positions, 256]` for tokens `[batch, positions]`, ``torch.int64``."""
        hidden, _ = self.lstm(self.byte_embedding(tokens))
        logits: Tensor = self.head(hidden)
        return logits


@final
@dataclass(frozen=True)
class LstmWorkload(TextWorkload):
    """A two-layer LSTM on Python's own source text."""

    context: int = 32
    width: int = 224  # hidden units per layer
    layers: int = 2

    name: ClassVar[str] = "lstm"
    defaults: ClassVar[Defaults] = Defaults(sgd_lr=4.0, adam_lr=3e-3, batch_size=8, clip=0.25)

    def make_model(self, seed: int) -> ByteLstm:
        """See ``Workload``."""
        return ByteLstm(width=self.width, layers=self.layers, seed=seed)
