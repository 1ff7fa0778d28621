"""Text models: a language model, two translators, and BERT."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from sparsync.errors import ConfigurationError

_EPSILON = 1e-12  # epsilon of BERT's layer normalisation (Devlin et al., published code)


class LstmLanguageModel(nn.Module):
    """An LSTM that predicts the next word; embedding and output layer do not share weights.

    This is the LSTM of RedSync (section 6.2 and Table 1).  It has 66,034,000 parameters with the
    10,000 words of the Penn Treebank ("264 MB"), and 135,891,278 with the 33,278 words of
    WikiText-2 ("543 MB").  It maps tokens `[batch, positions]`, ``int64``, to logits `[batch,
    positions, vocabulary]`.

    Free choices: each gate has torch's two biases, and embeddings are as wide as the layers. Both
    sizes of Table 1 require these choices. Initial weights are uniform within 0.1 for the embedding
    and the output layer, whose bias is 0. The LSTM keeps torch's initial weights, which are uniform
    within 1 / sqrt(``width``) = 0.026.

    Differs from the paper: every window starts from a zero state. ``dropout`` is applied before,
    between and after the layers, as in the large network of Zaremba et al.; RedSync mentions no
    dropout.

    References: Press & Wolf, `Using the Output Embedding to Improve Language Models
    <https://arxiv.org/abs/1608.05859>`_, 2016; Zaremba et al., `Recurrent Neural Network
    Regularization <https://arxiv.org/abs/1409.2329>`_, 2014.
    """

    def __init__(
        self, *, vocabulary: int, width: int = 1500, layers: int = 2, dropout: float = 0.65
    ) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.embedding = nn.Embedding(vocabulary, width)
        between = dropout if layers > 1 else 0.0
        self.lstm = nn.LSTM(width, width, layers, batch_first=True, dropout=between)
        self.head = nn.Linear(width, vocabulary)
        for weight in (self.embedding.weight, self.head.weight):
            nn.init.uniform_(weight, -0.1, 0.1)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return, for each word, the logits of the next word."""
        hidden, _ = self.lstm(self.dropout(self.embedding(tokens)))
        logits: Tensor = self.head(self.dropout(hidden))
        return logits


class EncoderDecoder(nn.Module):
    """Two LSTMs for sequence to sequence: the encoder's final state is the decoder's initial state.

    This is the "encoder-decoder network consisting of two LSTM cells each" of SparCML (section
    8.3).  It maps pairs of tokens `[batch, positions]`, ``int64``, to logits `[batch, target
    positions, target_vocabulary]`.

    For ATIS, it has 19,821,440 parameters: the sources are CNTK's 944 words and padding, the
    targets 127 labels and a start token. For Hansards, with 30,000 words of each language, it has
    88,048,944 parameters (the paper states no size).

    Free choices: there is no attention, and the width is 768. For ATIS, this gives 19.8 M
    parameters and 79 MB ("approximately 20M", "80 MB"). For everything else, SparCML refers to
    CNTK's defaults.  Initial weights are torch's own (normal for embeddings, uniform within
    1 / sqrt(``width``) for the rest).

    References: Sutskever et al., `Sequence to Sequence Learning with Neural Networks
    <https://arxiv.org/abs/1409.3215>`_, 2014.
    """

    def __init__(
        self,
        *,
        source_vocabulary: int,  # source tokens, with padding
        target_vocabulary: int,  # target tokens, with a start token
        width: int = 768,  # width of the embeddings, and hidden units per layer
        layers: int = 2,  # layers of the encoder, and of the decoder
        padding: int = 0,  # the token that fills short sources
    ) -> None:
        super().__init__()
        self.padding = padding
        self.source_embedding = nn.Embedding(source_vocabulary, width)
        self.encoder = nn.LSTM(width, width, layers, batch_first=True)
        self.target_embedding = nn.Embedding(target_vocabulary, width)
        self.decoder = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, target_vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return logits `[batch, target positions, target_vocabulary]` of each target's next token.

        ``padding`` at the end of the source is ignored.  The target consists of a start token and
        the output so far.
        """
        lengths = (source != self.padding).sum(1).clamp(min=1).cpu()
        read = pack_padded_sequence(
            self.source_embedding(source), lengths, batch_first=True, enforce_sorted=False
        )
        _, state = self.encoder(read)
        hidden, _ = self.decoder(self.target_embedding(target), state)
        logits: Tensor = self.head(hidden)
        return logits


class Transformer(nn.Module):
    """A Transformer that translates sentences; encoder and decoder share one embedding table.

    This is the "standard-sized" Transformer of WAGMA (section 5.3), with 61,362,176 parameters.  It
    maps pairs of tokens `[batch, positions]`, ``int64``, to logits `[batch, target positions,
    vocabulary]`.

    Free choices: both languages share a vocabulary of 33,708 subwords, and their embedding table
    is also the output layer. Attention has no biases. Normalisation comes before every sublayer and
    once at the end, as in TensorFlow's reference model. These choices give the paper's parameter
    count. Initial weights are Glorot uniform; embeddings are normal with variance 1 / ``width``.

    Raises:
        ConfigurationError: ``width`` is odd.

    References: Vaswani et al., `Attention Is All You Need <https://arxiv.org/abs/1706.03762>`_, 2017.
    """

    def __init__(
        self,
        *,
        vocabulary: int = 33_708,  # number of subwords of both languages
        width: int = 512,  # numbers per position; even
        layers: int = 6,  # blocks of the encoder, and of the decoder
        heads: int = 8,  # attention heads; divides ``width``
        inner: int = 2048,  # units between the two linear layers of a block
        dropout: float = 0.1,  # dropout rate
        padding: int = 0,  # the token that fills short sentences
    ) -> None:
        super().__init__()
        if width % 2:
            raise ConfigurationError(
                f"width is {width}, expected an even number: half are sines and half cosines"
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
        """Return the logits `[batch, target positions, vocabulary]` of each target's next token.

        The source's ``padding`` is masked.  The target consists of a start token and the
        translation so far, and is padded only at the end.
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


class Bert(nn.Module):
    """BERT for pre-training, with a head for masked words and a head for next-sentence prediction.

    This is the BERT of Ok-Topk (Table 2), i.e. BERT-base, with 133,547,324 parameters.  It maps
    tokens and segments `[batch, positions]`, ``int64``, to logits for the masked words `[batch,
    positions, vocabulary]` and for the next sentence `[batch, 2]`.  Training adds both losses.

    Free choices: the vocabulary is the uncased one, and the output layer has its own weights. With
    the output layer tied to the embedding, as in the BERT paper, there would be 110,106,428
    parameters. Initial weights are normal with standard deviation 0.02, and biases are 0, as is
    usual in PyTorch. (BERT truncates the distribution at 0.04, but drawing such weights takes half
    a minute.) PyTorch's block has one more dropout, between its two linear layers.

    References: Devlin et al., `BERT <https://arxiv.org/abs/1810.04805>`_, 2018.
    """

    def __init__(
        self,
        *,
        vocabulary: int = 30_522,  # number of tokens
        width: int = 768,  # numbers per position
        layers: int = 12,  # number of blocks
        heads: int = 12,  # attention heads per block; divides ``width``
        inner: int = 3072,  # units between the two linear layers of a block
        positions: int = 512,  # longest sequence (Ok-Topk trains on 128)
        dropout: float = 0.1,  # dropout rate
        padding: int = 0,  # the token that fills short sequences; never the first token of one
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
        """Return word logits `[batch, positions, vocabulary]` and next-sentence logits `[batch, 2]`.

        Tokens equal to ``padding`` are masked.  Without segments, all tokens belong to the first
        sentence.

        Raises:
            ConfigurationError: there are more tokens than ``positions``.
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
