"""A speech recogniser like Deep Speech 2: convolutions, LSTM layers, and a letter for every 20 ms."""

from __future__ import annotations

from torch import Tensor, nn

from sparsync.errors import ConfigurationError
from sparsync_papers.models.images import he_


class SpeechLstm(nn.Module):
    """Two convolutions, LSTM layers with batch normalisation, a lookahead layer, and an output layer.

    This is the speech recogniser of Ok-Topk (Table 2, "LSTM") with 27,569,568 parameters.  It maps
    spectrograms `[batch, 1, 161, frames]`, ``float32``, to logits `[batch, (frames + 1) // 2, 29]`.

    Free choices: the structure is Deep Speech 2 in one direction. LSTM layers have torch's two
    biases, the lookahead covers 20 positions with a weight per position and feature, and the last
    layer has no bias. These choices give the paper's parameter count. Convolutions and the last
    layer are initialised by ``he_``; the LSTM and the lookahead keep torch's uniform initial
    weights.

    Differs from the paper: padding after the end of an utterance is treated as silence instead of
    being masked. This affects the statistics of batch normalisation and at most the last 27
    positions.

    Raises:
        ConfigurationError: ``bins`` is less than 41.

    References: Amodei et al., `Deep Speech 2 <https://arxiv.org/abs/1512.02595>`_, 2015, section 3.
    """

    def __init__(
        self,
        *,
        bins: int = 161,  # frequencies of a spectrogram (16 kHz, windows of 20 ms), at least 41
        width: int = 800,  # hidden units per LSTM layer
        layers: int = 5,  # LSTM layers
        channels: int = 32,  # channels of the two convolutions
        lookahead: int = 20,  # future positions that a letter depends on
        letters: int = 29,  # blank, apostrophe, A to Z, space
    ) -> None:
        super().__init__()
        if bins < 41:  # with 21, torch's convolution wrote out of bounds in backward (2.13, CPU)
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
        """Return the logits for CTC at ``positions(frames)`` positions."""
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
        """Return the number of letters for a number of frames; both are ``int64`` of any shape.

        Example:
            >>> import torch
            >>> SpeechLstm.positions(torch.tensor([1, 100, 101]))
            tensor([ 1, 50, 51])
        """
        return (frames + 1) // 2


def _halved(bins: int) -> int:
    return (bins + 1) // 2
