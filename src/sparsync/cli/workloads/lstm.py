"""A two-layer LSTM language model of bytes: RedSync's recurrent test case at this size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor, nn

from sparsync.cli.workloads.base import Defaults
from sparsync.cli.workloads.text import TextWorkload

__all__ = ["ByteLstm", "LstmWorkload"]

_BYTES = 256  # the vocabulary: every value of a byte


class ByteLstm(nn.Module):
    """Predicts the next byte of a text; embedding and output layer are not tied (as in the paper).

    Args:
        width: hidden units per layer.
        layers: stacked LSTM layers.
        embedding_width: of a byte's vector.
        seed: of the initial weights (torch's own); the same seed gives the same weights.

    Example:
        >>> model = ByteLstm(seed=0)
        >>> sum(p.numel() for p in model.parameters())
        737024
        >>> model(torch.zeros(8, 32, dtype=torch.int64)).shape
        torch.Size([8, 32, 256])

    Differs from the paper: bytes, not words; 224 hidden units per layer, not 1500; no dropout.

    References: Press & Wolf, `Using the Output Embedding to Improve Language Models
    <https://arxiv.org/abs/1608.05859>`_, 2016; RedSync, section 6.2.
    """

    def __init__(
        self, *, width: int = 224, layers: int = 2, embedding_width: int = 64, seed: int = 0
    ) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):  # the caller's generator stays as it is
            torch.manual_seed(seed)
            self.byte_embedding = nn.Embedding(_BYTES, embedding_width)
            self.lstm = nn.LSTM(embedding_width, width, layers, batch_first=True)
            self.head = nn.Linear(width, _BYTES)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits `[batch, positions, 256]` for tokens `[batch, positions]`, ``torch.int64``.

        Every window starts from a state of zeros: the gradient is truncated where the window begins.
        """
        hidden, _ = self.lstm(self.byte_embedding(tokens))
        logits: Tensor = self.head(hidden)
        return logits


@final
@dataclass(frozen=True)
class LstmWorkload(TextWorkload):
    """A two-layer LSTM on Python's own source text.

    Attributes:
        context: bytes per window.
        width: hidden units per layer.
        layers: stacked LSTM layers.

    Example:
        >>> LstmWorkload(width=32).make_model(seed=0).lstm
        LSTM(64, 32, num_layers=2, batch_first=True)
    """

    context: int = 32
    width: int = 224
    layers: int = 2

    name: ClassVar[str] = "lstm"
    defaults: ClassVar[Defaults] = Defaults(sgd_lr=4.0, adam_lr=3e-3, batch_size=8, clip=0.25)

    def make_model(self, seed: int) -> ByteLstm:
        """See ``Workload``."""
        return ByteLstm(width=self.width, layers=self.layers, seed=seed)
