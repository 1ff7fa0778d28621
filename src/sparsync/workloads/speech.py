"""The LSTM that hears letters, on AN4."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, final

import torch.nn.functional as F
from torch import Tensor, nn

from sparsync.workloads.base import Defaults, Evaluation, Objective, Tensors, outputs_of
from sparsync.workloads.data.an4 import BLANK, LETTERS, Spoken, find_an4, load_an4
from sparsync.workloads.folders import FolderWorkload, seeded
from sparsync.workloads.metrics import error_rate
from sparsync.workloads.models.speech import SpeechLstm, lstm_an4

__all__ = ["Ctc", "LstmAn4", "heard_texts"]


@final
@dataclass(frozen=True)
class Ctc(Objective):
    """Connectionist temporal classification: nats per utterance; WER and CER of the likeliest letters.

    Targets are letters `[batch, longest]`, how many they are, and how many frames an utterance has.
    One that is too short for its letters counts as 0 nats.

    References: Graves et al., `Connectionist Temporal Classification
    <https://www.cs.toronto.edu/~graves/icml_2006.pdf>`_, 2006.
    """

    def loss(self, outputs: Tensors, targets: Tensors) -> Tensor:
        """See ``Objective``."""
        assert isinstance(outputs, Tensor)
        return self._nats(outputs, targets) / len(outputs)

    def judge(self, model: nn.Module, inputs: Tensors, targets: Tensors) -> Evaluation:
        """See ``Objective``; a hit is an utterance without any error."""
        logits, (letters, counts, frames) = outputs_of(model, inputs), targets
        assert isinstance(logits, Tensor)
        said = [
            _text(row[:count]) for row, count in zip(letters.tolist(), counts.tolist(), strict=True)
        ]
        heard = heard_texts(logits, SpeechLstm.positions(frames))
        hits = sum(one == other for one, other in zip(heard, said, strict=True))
        metrics = {
            "WER": error_rate([text.split() for text in heard], [text.split() for text in said]),
            "CER": error_rate(heard, said),
        }
        return Evaluation(self._nats(logits, targets).item(), hits, len(said), metrics)

    def _nats(self, logits: Tensor, targets: Tensors) -> Tensor:
        letters, counts, frames = targets
        return F.ctc_loss(
            logits.log_softmax(-1).transpose(0, 1),
            letters,
            SpeechLstm.positions(frames),
            counts,
            blank=BLANK,
            reduction="sum",
            zero_infinity=True,
        )


def heard_texts(logits: Tensor, positions: Tensor) -> list[str]:
    """Return the likeliest letter of every position, repeated ones once, without blanks.

    Args:
        logits: `[batch, positions, letters]`.
        positions: how many count, `[batch]`.
    """
    texts = []
    for row, count in zip(logits.argmax(-1), positions.tolist(), strict=True):
        best = row[:count].unique_consecutive()
        texts.append(_text(best[best != BLANK].tolist()))
    return texts


def _text(letters: list[int]) -> str:
    return "".join(LETTERS[letter] for letter in letters)


@final
@dataclass(frozen=True)
class LstmAn4(FolderWorkload):
    """Ok-Topk, section 5, with the settings of its published runs (density 0.02).

    Attributes:
        width: hidden units per layer.
        layers: stacked LSTM layers.
    """

    width: int = 800
    layers: int = 5

    name: ClassVar[str] = "lstm-an4"
    target: ClassVar[str] = "utterance"
    classifies: ClassVar[bool] = False
    defaults: ClassVar[Defaults] = Defaults(sgd_lr=1e-3, adam_lr=3e-4, batch_size=2)

    @property
    def objective(self) -> Ctc:
        """See ``Workload``."""
        return Ctc()

    def find(self) -> tuple[Path, Path]:
        """See ``FolderWorkload``."""
        return find_an4(self.data)

    def load(self) -> tuple[Spoken, Spoken]:
        """See ``FolderWorkload``."""
        return load_an4(self.find())

    def make_model(self, seed: int) -> nn.Module:
        """See ``Workload``."""
        return seeded(lstm_an4, seed, width=self.width, layers=self.layers)
