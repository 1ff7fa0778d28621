"""Two LSTM layers read a sentence, two write another: slots of ATIS, translations of Hansards."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

__all__ = ["EncoderDecoder", "encoder_decoder_hansards", "encoder_decoder_lstm"]


class EncoderDecoder(nn.Module):
    """The state in which the encoder stops is the one in which the decoder starts.

    The "encoder-decoder network consisting of two LSTM cells each" of SparCML (section 8.3).  Pairs of
    tokens `[batch, positions]`, ``int64``, to logits `[batch, target positions, target_vocabulary]`.

    Free choices: 768 wide, which gives ATIS 19.8 M parameters and 79 MB ("approximately 20M", "80
    MB"); no attention.  SparCML names CNTK's defaults otherwise.  Initial weights: torch's own (normal
    for embeddings, uniform within 1 / sqrt(``width``) for the rest).

    Args:
        source_vocabulary: tokens that are read, with padding.
        target_vocabulary: tokens that are written, with a start token.
        width: of the embeddings, and hidden units per layer.
        layers: of the encoder, and of the decoder.
        padding: the token that fills short sources.

    References: Sutskever et al., `Sequence to Sequence Learning with Neural Networks
    <https://arxiv.org/abs/1409.3215>`_, 2014.
    """

    def __init__(
        self,
        *,
        source_vocabulary: int,
        target_vocabulary: int,
        width: int = 768,
        layers: int = 2,
        padding: int = 0,
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


def encoder_decoder_lstm(
    *, source_vocabulary: int = 945, target_vocabulary: int = 128, **options: Any
) -> EncoderDecoder:
    """Build the encoder-decoder of SparCML (section 8.3) for ATIS: 19,821,440 parameters.

    Args:
        source_vocabulary: CNTK's 944 words, and padding.
        target_vocabulary: the 128 classes of SparCML's Table 1: CNTK's 127 labels, and a start.
        options: the others of ``EncoderDecoder``.
    """
    return EncoderDecoder(
        source_vocabulary=source_vocabulary, target_vocabulary=target_vocabulary, **options
    )


def encoder_decoder_hansards(
    *, source_vocabulary: int = 30_000, target_vocabulary: int = 30_000, **options: Any
) -> EncoderDecoder:
    """Build the encoder-decoder of SparCML (section 8.3) for Hansards: 88,048,944 parameters.

    Its size is not published.

    Args:
        source_vocabulary: tokens that are read, with padding (ours).
        target_vocabulary: tokens that are written, with a start token (ours).
        options: the others of ``EncoderDecoder``.
    """
    return EncoderDecoder(
        source_vocabulary=source_vocabulary, target_vocabulary=target_vocabulary, **options
    )
