"""A decoder-only byte-level transformer: small enough for half a CPU core, real enough to learn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsync.cli.workloads.base import Defaults
from sparsync.cli.workloads.text import TextWorkload
from sparsync.errors import ConfigurationError

__all__ = ["HEAD_WIDTH", "ByteTransformer", "BytesWorkload"]

HEAD_WIDTH = 32  # of an attention head, unless the number of heads is given
_BYTES = 256  # the vocabulary: every value of a byte


class ByteTransformer(nn.Module):
    """Predicts the next byte of a text.  Pre-norm, learned positions, torch's own initial weights.

    Args:
        context: positions that the model can look at.
        width: size of the residual stream.
        layers: number of blocks.
        heads: attention heads per block; divides ``width``.  Default: as many as are 32 wide.
        seed: of the initial weights; the same seed gives the same weights.

    Example:
        >>> model = ByteTransformer(seed=0)
        >>> sum(p.numel() for p in model.parameters())
        1323840
        >>> model(torch.zeros(8, 64, dtype=torch.int64)).shape
        torch.Size([8, 64, 256])
        >>> sum(p.numel() for p in ByteTransformer(width=416).parameters())  # 12 w^2 a layer
        8553792

    References: Radford et al., `Language Models are Unsupervised Multitask Learners
    <https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf>`_,
    2019.
    """

    def __init__(
        self,
        *,
        context: int = 64,
        width: int = 160,
        layers: int = 4,
        heads: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        heads = max(width // HEAD_WIDTH, 1) if heads is None else heads
        if width % heads:
            raise ConfigurationError(
                f"width {width} is not a multiple of heads {heads}; give one that is"
            )
        self.context = context
        with torch.random.fork_rng(devices=[]):  # the caller's generator stays as it is
            torch.manual_seed(seed)
            self.byte_embedding = nn.Embedding(_BYTES, width)
            self.position_embedding = nn.Embedding(context, width)
            self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
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
    """Attention, then a two-layer perceptron, each added to the residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
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
    """The transformer on Python's own source text.

    Attributes:
        width: of the residual stream, a multiple of 32: the width of a head.
        layers: blocks.
    """

    width: int = 160
    layers: int = 4

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
