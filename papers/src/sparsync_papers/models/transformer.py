"""The Transformer, as it translates."""

from __future__ import annotations

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
        own = nn.TransformerEncoderLayer(*sizes, batch_first=True, norm_first=True)
        other = nn.TransformerDecoderLayer(*sizes, batch_first=True, norm_first=True)
        for part in (*own.modules(), *other.modules()):
            if isinstance(part, nn.MultiheadAttention):
                part.register_parameter("in_proj_bias", None)
                part.out_proj.register_parameter("bias", None)
        self.encoder = nn.TransformerEncoder(
            own, layers, nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.decoder = nn.TransformerDecoder(other, layers, nn.LayerNorm(width))
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        for name, parameter in (*self.encoder.named_parameters(), *self.decoder.named_parameters()):
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return the logits `[batch, target positions, vocabulary]` of the token after each of target.

        Args:
            source: `[batch, positions]`, ``int64``; tokens equal to ``padding`` are not looked at.
            target: what has been translated, a start token first: `[batch, target positions]`,
                ``int64``; padded at the end only.
        """
        padding = source == self.padding
        later = nn.Transformer.generate_square_subsequent_mask(target.shape[1], target.device)
        memory = self.encoder(self._embedded(source), src_key_padding_mask=padding)
        x = self.decoder(
            self._embedded(target),
            memory,
            tgt_mask=later,
            tgt_is_causal=True,
            memory_key_padding_mask=padding,
        )
        return F.linear(x, self.embedding.weight)

    def _embedded(self, tokens: Tensor) -> Tensor:
        width = self.embedding.embedding_dim
        x = self.embedding(tokens) * width**0.5
        x = x + _sinusoids(tokens.shape[1], width, tokens.device).to(x)
        out: Tensor = self.dropout(x)
        return out


def _sinusoids(positions: int, width: int, device: torch.device) -> Tensor:
    """Return `[positions, width]`: sines, then cosines, of wavelengths from 2 pi to 20,000 pi."""
    rates = 10_000 ** -torch.linspace(0, 1, width // 2, device=device)
    angles = torch.arange(positions, device=device)[:, None] * rates
    return torch.cat((angles.sin(), angles.cos()), -1)
