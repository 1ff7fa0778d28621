"""A speech recogniser like Deep Speech 2: convolutions, LSTM layers, a letter for every 20 ms."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from sparsync.errors import ConfigurationError
from sparsync.workloads.models.images import he_

__all__ = ["SpeechLstm", "lstm_an4"]


class SpeechLstm(nn.Module):
    """Two convolutions, LSTM layers with batch normalisation between, lookahead, letters.

    The speech recogniser of Ok-Topk (Table 2, "LSTM"): 27,569,568 parameters.  Spectrograms
    `[batch, 1, 161, frames]`, ``float32``, to logits `[batch, (frames + 1) // 2, 29]`.

    Free choices: the structure of Deep Speech 2 in one direction; the LSTM's layers have torch's two
    biases; a lookahead of 20 positions, one weight each and feature; no bias in the last layer.  This
    gives the count.  Initial weights: ``he_`` for convolutions and the last layer, torch's own
    uniform ones for the LSTM and the lookahead.

    Differs from the paper: padding after the end of an utterance is heard as silence, not masked; it
    reaches 27 positions back at most, and the statistics of batch normalisation.

    Args:
        bins: frequencies of a spectrogram (16 kHz, windows of 20 ms), at least 41.
        width: hidden units per LSTM layer.
        layers: LSTM layers.
        channels: of the two convolutions.
        lookahead: positions of the future that a letter depends on.
        letters: blank, apostrophe, A to Z, space.

    Raises:
        ConfigurationError: ``bins`` is less than 41.

    References: Amodei et al., `Deep Speech 2 <https://arxiv.org/abs/1512.02595>`_, 2015, section 3.
    """

    def __init__(
        self,
        *,
        bins: int = 161,
        width: int = 800,
        layers: int = 5,
        channels: int = 32,
        lookahead: int = 20,
        letters: int = 29,
    ) -> None:
        super().__init__()
        if bins < 41:  # backward of torch's convolution wrote out of bounds at 21 (2.13, CPU)
            raise ConfigurationError(
                f"bins is {bins}, expected at least 41, the height of the first convolution"
            )
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, channels, (41, 11), stride=(2, 2), padding=(20, 5)),
            nn.BatchNorm2d(channels),
            nn.Hardtanh(0, 20),
            nn.Conv2d(channels, channels, (21, 11), stride=(2, 1), padding=(10, 5)),
            nn.BatchNorm2d(channels),
            nn.Hardtanh(0, 20),
        )
        heard = channels * _halved(_halved(bins))
        self.lstms = nn.ModuleList(
            nn.LSTM(width if layer else heard, width, batch_first=True) for layer in range(layers)
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(layers))
        self.lookahead = nn.Sequential(
            nn.ConstantPad1d((0, lookahead), 0),
            nn.Conv1d(width, width, lookahead + 1, groups=width, bias=False),
            nn.Hardtanh(0, 20),
        )
        self.head = nn.Linear(width, letters, bias=False)
        he_(self)

    def forward(self, spectrograms: Tensor) -> Tensor:
        """Return logits `[batch, positions, letters]`, for CTC.

        Args:
            spectrograms: `[batch, 1, bins, frames]`, ``float32``; ``positions(frames)`` come out.
        """
        heard = self.convolutions(spectrograms).flatten(1, 2)  # [batch, channels, positions]
        *between, last = self.norms
        for layer, lstm in enumerate(self.lstms):
            if layer:
                heard = between[layer - 1](heard)
            heard = lstm(heard.transpose(1, 2))[0].transpose(1, 2)
        logits: Tensor = self.head(last(self.lookahead(heard)).transpose(1, 2))
        return logits

    @staticmethod
    def positions(frames: Tensor) -> Tensor:
        """Return how many letters come out for how many frames, ``int64`` both, of any shape.

        Example:
            >>> import torch
            >>> SpeechLstm.positions(torch.tensor([1, 100, 101]))
            tensor([ 1, 50, 51])
        """
        return (frames + 1) // 2


def lstm_an4(**options: Any) -> SpeechLstm:
    """Build the LSTM of Ok-Topk (Table 2) for AN4: 27,569,568 parameters; see ``SpeechLstm``.

    Example:
        >>> import torch
        >>> from sparsync.workloads.models.size import parameter_count
        >>> with torch.device("meta"):
        ...     parameter_count(lstm_an4())
        27569568
    """
    return SpeechLstm(**options)


def _halved(bins: int) -> int:
    return (bins + 1) // 2
