"""BERT-base, with the two heads of its pre-training."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparsync.errors import ConfigurationError

_EPSILON = 1e-12  # of layer normalisation (Devlin et al., published code)


class Bert(nn.Module):
    """Embeddings, blocks, a head for masked words, one for "is this the next sentence?".

    The BERT of Ok-Topk (Table 2), BERT-base for pre-training: 133,547,324 parameters.  Tokens and
    segments `[batch, positions]`, ``int64``, to the logits of the masked words `[batch, positions,
    vocabulary]` and of the next sentence `[batch, 2]`; both losses are added.

    Free choices: the uncased vocabulary, and an output layer of its own: tied to the embedding, as
    BERT was published, it would be 110,106,428.  Initial weights: normal with 0.02, biases 0
    (as usual in PyTorch; BERT's own are cut at 0.04, which takes half a minute to draw).  PyTorch's
    block has one dropout more, between its two linear layers.

    References: Devlin et al., `BERT <https://arxiv.org/abs/1810.04805>`_, 2018.
    """

    def __init__(
        self,
        *,
        vocabulary: int = 30_522,  # how many tokens there are
        width: int = 768,  # numbers per position
        layers: int = 12,  # how many blocks
        heads: int = 12,  # of attention, per block; divides ``width``
        inner: int = 3072,  # units between the two linear layers of a block
        positions: int = 512,  # longest sequence (Ok-Topk trains on 128)
        dropout: float = 0.1,  # dropout rate
        padding: int = 0,  # the token that fills short sequences; not the first of any
    ) -> None:
        super().__init__()
        self.padding = padding
        self.token_embedding = nn.Embedding(vocabulary, width)
        self.position_embedding = nn.Embedding(positions, width)
        self.segment_embedding = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, eps=_EPSILON)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, inner, dropout, "gelu", layer_norm_eps=_EPSILON, batch_first=True
            )
            for _ in range(layers)
        )
        self.pooler = nn.Linear(width, width)
        self.next_sentence = nn.Linear(width, 2)
        self.transform = nn.Sequential(
            nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width, eps=_EPSILON)
        )
        self.head = nn.Linear(width, vocabulary)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, segments: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the words' logits `[batch, positions, vocabulary]` and the sentences' `[batch, 2]`.

        Args:
            tokens: `[batch, positions]`, ``int64``; those equal to ``padding`` are not looked at.
            segments: 0 or 1, the sentence that a token is of, as ``tokens``; None: all of the first.

        Raises:
            ConfigurationError: there are more positions than were asked for.
        """
        length = tokens.shape[1]
        if length > self.position_embedding.num_embeddings:
            raise ConfigurationError(
                f"{length} tokens per sample, expected at most "
                f"{self.position_embedding.num_embeddings}: cut them, or build it with positions={length}"
            )
        if segments is None:
            segments = torch.zeros_like(tokens)
        x = self.token_embedding(tokens) + self.segment_embedding(segments)
        x = x + self.position_embedding.weight[:length]
        x = self.dropout(self.norm(x))
        for block in self.blocks:
            x = block(x, src_key_padding_mask=tokens == self.padding)
        first = torch.tanh(self.pooler(x[:, 0]))
        return self.head(self.transform(x)), self.next_sentence(self.dropout(first))
