"""Two LSTM layers that read a sentence, and two that write another."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence


class EncoderDecoder(nn.Module):
    """The state in which the encoder stops is the one in which the decoder starts.

    The "encoder-decoder network consisting of two LSTM cells each" of SparCML (section 8.3).  Pairs of
    tokens `[batch, positions]`, ``int64``, to logits `[batch, target positions, target_vocabulary]`.

    19,821,440 parameters for ATIS, with CNTK's 944 words and padding, 127 labels and a start; 88,048,944
    for Hansards, with 30,000 words of each language (its size is not published).

    Free choices: 768 wide, which gives ATIS 19.8 M parameters and 79 MB ("approximately 20M", "80
    MB"); no attention.  SparCML names CNTK's defaults otherwise.  Initial weights: torch's own (normal
    for embeddings, uniform within 1 / sqrt(``width``) for the rest).

    References: Sutskever et al., `Sequence to Sequence Learning with Neural Networks
    <https://arxiv.org/abs/1409.3215>`_, 2014.
    """

    def __init__(
        self,
        *,
        source_vocabulary: int,  # tokens that are read, with padding
        target_vocabulary: int,  # tokens that are written, with a start token
        width: int = 768,  # of the embeddings, and hidden units per layer
        layers: int = 2,  # of the encoder, and of the decoder
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
        """Return logits `[batch, target positions, target_vocabulary]` of what follows each of target.

        Args:
            source: `[batch, positions]`, ``int64``; what is ``padding``, at the end, is not read.
            target: what has been written, a start token first: `[batch, target positions]`, ``int64``.
        """
        lengths = (source != self.padding).sum(1).clamp(min=1).cpu()
        read = pack_padded_sequence(
            self.source_embedding(source), lengths, batch_first=True, enforce_sorted=False
        )
        _, state = self.encoder(read)
        hidden, _ = self.decoder(self.target_embedding(target), state)
        logits: Tensor = self.head(hidden)
        return logits
