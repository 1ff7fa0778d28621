"""The Transformer, as it translates."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsync.errors import ConfigurationError


class Transformer(nn.Module):
    """An encoder of one sentence and a decoder of another, with one table of embeddings.

    The "standard-sized" one of WAGMA (section 5.3): 61,362,176 parameters.  Pairs of tokens `[batch,
    positions]`, ``int64``, to logits `[batch, target positions, vocabulary]`.

    Free choices: one vocabulary of 33,708 subwords, one table for both languages and the output; no
    biases in attention; every part is normalised before, and once at the end (TensorFlow's reference
    model).  This gives the count.  Initial weights: Glorot's uniform, embeddings normal with variance
    1 / ``width``.

    Raises:
        ConfigurationError: ``width`` is odd.

    References: Vaswani et al., `Attention Is All You Need <https://arxiv.org/abs/1706.03762>`_, 2017.
    """

    def __init__(
        self,
        *,
        vocabulary: int = 33_708,  # subwords of both languages
        width: int = 512,  # numbers per position; even
        layers: int = 6,  # blocks of the encoder, and of the decoder
        heads: int = 8,  # of attention; divides ``width``
        inner: int = 2048,  # units between the two linear layers of a block
        dropout: float = 0.1,  # dropout rate
        padding: int = 0,  # the token that fills short sentences
    ) -> None:
        super().__init__()
        if width % 2:
            raise ConfigurationError(
                f"width is {width}, expected an even one: a sine and a cosine each"
            )
        self.padding = padding
        self.embedding = nn.Embedding(vocabulary, width)
        self.dropout = nn.Dropout(dropout)
        sizes = (width, heads, inner, dropout)
        self.encoder = nn.ModuleList(_Block(*sizes, decodes=False) for _ in range(layers))
        self.encoder_norm = nn.LayerNorm(width)
        self.decoder = nn.ModuleList(_Block(*sizes, decodes=True) for _ in range(layers))
        self.decoder_norm = nn.LayerNorm(width)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        for part in self.modules():
            if isinstance(
                part, nn.Linear
            ):  # also the output of an attention, whose inputs start so
                nn.init.xavier_uniform_(part.weight)
                if part.bias is not None:
                    nn.init.zeros_(part.bias)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return the logits `[batch, target positions, vocabulary]` of the token after each of target.

        Args:
            source: `[batch, positions]`, ``int64``; tokens equal to ``padding`` are not looked at.
            target: what has been translated, a start token first: `[batch, target positions]`,
                ``int64``; padded at the end only.
        """
        padding = source == self.padding
        memory = self._embedded(source)
        for block in self.encoder:
            memory = block(memory, padding=padding)
        memory = self.encoder_norm(memory)
        x = self._embedded(target)
        for block in self.decoder:
            x = block(x, memory, padding=padding)
        return F.linear(self.decoder_norm(x), self.embedding.weight)

    def _embedded(self, tokens: Tensor) -> Tensor:
        width = self.embedding.embedding_dim
        x = self.embedding(tokens) * width**0.5
        x = x + _sinusoids(tokens.shape[1], width, tokens.device).to(x)
        out: Tensor = self.dropout(x)
        return out


class _Block(nn.Module):
    """Attention to itself, a decoder's to the memory, two linear layers; each normalised first."""

    def __init__(
        self, width: int, heads: int, inner: int, dropout: float, *, decodes: bool
    ) -> None:
        super().__init__()
        self.decodes = decodes
        self.own_norm = nn.LayerNorm(width)
        attention = partial(
            nn.MultiheadAttention, width, heads, dropout, bias=False, batch_first=True
        )
        self.own = attention()
        if decodes:
            self.memory_norm = nn.LayerNorm(width)
            self.memory = attention()
        self.inner_norm = nn.LayerNorm(width)
        self.inner_in = nn.Linear(width, inner)
        self.inner_out = nn.Linear(inner, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, memory: Tensor | None = None, *, padding: Tensor) -> Tensor:
        own = self.own_norm(x)
        if self.decodes:  # each position sees those up to it, then the memory
            later = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device)
            seen, _ = self.own(own, own, own, attn_mask=later, is_causal=True, need_weights=False)
            x = x + self.dropout(seen)
            asked = self.memory_norm(x)
            seen, _ = self.memory(asked, memory, memory, padding, need_weights=False)
        else:
            seen, _ = self.own(own, own, own, padding, need_weights=False)
        x = x + self.dropout(seen)
        inner = self.dropout(F.relu(self.inner_in(self.inner_norm(x))))
        out: Tensor = x + self.dropout(self.inner_out(inner))
        return out


def _sinusoids(positions: int, width: int, device: torch.device) -> Tensor:
    """Return `[positions, width]`: sines, then cosines, of wavelengths from 2 pi to 20,000 pi."""
    rates = 10_000 ** -torch.linspace(0, 1, width // 2, device=device)
    angles = torch.arange(positions, device=device)[:, None] * rates
    return torch.cat((angles.sin(), angles.cos()), -1)
