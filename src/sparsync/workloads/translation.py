"""Sentences to sentences: the Transformer on WMT17, two LSTMs on ATIS and Hansards."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, final

import torch
from torch import Tensor, nn

from sparsync.errors import ConfigurationError
from sparsync.workloads.base import (
    PADDING,
    CrossEntropy,
    Defaults,
    Evaluation,
    Objective,
    Tensors,
)
from sparsync.workloads.data.pairs import (
    END,
    PAD,
    SPECIAL,
    START,
    Pair,
    SentencePairs,
    Vocabularies,
    find_pairs,
    load_pairs,
    load_vocabularies,
)
from sparsync.workloads.data.words import UNKNOWN
from sparsync.workloads.folders import FolderWorkload, seeded
from sparsync.workloads.metrics import bleu
from sparsync.workloads.models.encoder_decoder import encoder_decoder_hansards, encoder_decoder_lstm
from sparsync.workloads.models.transformer import transformer_wmt17

__all__ = [
    "Atis",
    "Hansards",
    "PairsWorkload",
    "TransformerWmt17",
    "Translation",
    "greedy",
    "joined",
]

_HEAD_WIDTH = 64  # of an attention head (Vaswani et al. 2017)
_NEVER = "\0"  # an unknown word that a model writes is not the one that a person wrote


@final
@dataclass(frozen=True)
class Translation(Objective):
    """Cross entropy of every next word; uncased BLEU-4 of what a model writes, word by word.

    Attributes:
        words: of the target's vocabulary.
        smoothing: of the labels, while training.
        longer: a translation has at most so many tokens more than its source (Vaswani et al. 2017,
            section 6.1).
    """

    words: tuple[str, ...]
    smoothing: float = 0.0
    longer: int = 50

    def loss(self, outputs: Tensors, targets: Tensors) -> Tensor:
        """See ``Objective``."""
        return CrossEntropy(smoothing=self.smoothing).loss(outputs, targets)

    def judge(self, model: nn.Module, inputs: Tensors, targets: Tensors) -> Evaluation:
        """See ``Objective``."""
        assert isinstance(targets, Tensor)
        source, before = inputs
        known = CrossEntropy().judge_outputs(model(source, before), targets)
        written = greedy(model, source, longest=source.shape[1] + self.longer)
        candidates = [self._text(row, unknown=_NEVER) for row in written]
        references = [[self._text(row[row != PADDING], unknown=UNKNOWN)] for row in targets]
        metrics = {"BLEU": bleu(candidates, references)}
        return Evaluation(known.loss_sum, known.hits, known.count, metrics)

    def _text(self, numbers: Tensor, *, unknown: str) -> list[str]:
        """Return the words up to the end."""
        words = [self.words[number] for number in numbers.tolist()]
        words = words[: words.index(END)] if END in words else words
        return joined([unknown if word == UNKNOWN else word for word in words])


def greedy(model: nn.Module, source: Tensor, *, longest: int) -> Tensor:
    """Write the likeliest token after each, until every sentence has ended.

    Args:
        model: of (source, target so far).
        source: `[batch, positions]`.
        longest: tokens to write.

    Returns:
        `[batch, tokens]`; behind an ``END`` anything.

    Cost: a run of the model per token, on all tokens so far.
    """
    written = torch.full((len(source), 1), SPECIAL.index(START))
    ended = torch.zeros(len(source), dtype=torch.bool)
    for _ in range(longest):
        best = model(source, written)[:, -1].argmax(-1)
        written = torch.cat((written, best[:, None]), 1)
        ended |= best == SPECIAL.index(END)
        if ended.all():
            break
    return written[:, 1:]


def joined(pieces: list[str]) -> list[str]:
    """Return lower-case words of pieces: one that ends with "@@" goes on in the next one.

    Example:
        >>> joined(["Ein", "Ver@@", "such", "!"])
        ['ein', 'versuch', '!']

    References: Sennrich et al., `Neural Machine Translation of Rare Words with Subword Units
    <https://arxiv.org/abs/1508.07909>`_, 2016.
    """
    return (" ".join(pieces) + " ").replace("@@ ", "").lower().split()


@dataclass(frozen=True)
class PairsWorkload(FolderWorkload):
    """Pairs of sentences in length buckets: steps cost unequal times (WAGMA, section 5.3).

    Attributes:
        width: numbers per position, or hidden units.
        layers: of the encoder, and of the decoder.
        context: tokens of the longest sentence to train on.
    """

    width: int = 768
    layers: int = 2
    context: int = 128

    target: ClassVar[str] = "token"
    classifies: ClassVar[bool] = False
    suffixes: ClassVar[tuple[str, str]]
    joint: ClassVar[bool] = False
    words: ClassVar[int | None] = None

    @property
    def objective(self) -> Translation:
        """See ``Workload``."""
        return Translation(self.vocabularies[1].words)

    @cached_property
    def vocabularies(self) -> Vocabularies:
        """Those of the sources and the targets, read when they are first asked for."""
        return load_vocabularies(self.find()[0], joint=self.joint, most=self.words)

    @final
    def find(self) -> tuple[Pair, Pair]:
        """See ``FolderWorkload``."""
        return find_pairs(self.data, self.suffixes)

    @final
    def load(self) -> tuple[SentencePairs, SentencePairs]:
        """See ``FolderWorkload``."""
        return load_pairs(self.find(), self.vocabularies, context=self.context)

    @abstractmethod
    def make_model(self, seed: int) -> nn.Module:
        """See ``Workload``; the vocabularies are those of the data."""


@final
@dataclass(frozen=True)
class TransformerWmt17(PairsWorkload):
    """WAGMA, section 5.3: English to German, batches of at most 8,192 tokens; else Vaswani et al. 2017.

    The learning rate is the largest of theirs, which has 4,000 steps of warm-up.
    """

    width: int = 512
    layers: int = 6

    name: ClassVar[str] = "transformer-wmt17"
    suffixes: ClassVar[tuple[str, str]] = ("en", "de")
    joint: ClassVar[bool] = True
    words: ClassVar[int | None] = 33_708
    defaults: ClassVar[Defaults] = Defaults(
        sgd_lr=0.1, adam_lr=7e-4, batch_size=64, optimizer="adam"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % _HEAD_WIDTH:
            raise ConfigurationError(
                f"width is {self.width}; give a multiple of {_HEAD_WIDTH}, the width of a head"
            )

    @property
    def objective(self) -> Translation:
        """See ``Workload``; labels are smoothed by 0.1 (Vaswani et al. 2017, section 5.4)."""
        return Translation(self.vocabularies[1].words, smoothing=0.1)

    def make_model(self, seed: int) -> nn.Module:
        """See ``PairsWorkload``."""
        return seeded(
            transformer_wmt17,
            seed,
            vocabulary=len(self.vocabularies[0]),
            width=self.width,
            layers=self.layers,
            heads=self.width // _HEAD_WIDTH,
            inner=4 * self.width,
            padding=SPECIAL.index(PAD),
        )


@final
@dataclass(frozen=True)
class Atis(PairsWorkload):
    """SparCML, Table 3: 560 sentences on 8 ranks; words to their slots.  Learning rates are ours."""

    context: int = 64

    name: ClassVar[str] = "atis"
    suffixes: ClassVar[tuple[str, str]] = ("in", "out")
    defaults: ClassVar[Defaults] = Defaults(
        sgd_lr=0.1, adam_lr=1e-3, batch_size=70, optimizer="adam"
    )

    def make_model(self, seed: int) -> nn.Module:
        """See ``PairsWorkload``."""
        return seeded(encoder_decoder_lstm, seed, **_lstm_sizes(self))


@final
@dataclass(frozen=True)
class Hansards(PairsWorkload):
    """SparCML, Table 3: 256 sentences on 8 ranks; English to French.  Learning rates are ours."""

    context: int = 64

    name: ClassVar[str] = "hansards"
    suffixes: ClassVar[tuple[str, str]] = ("en", "fr")
    words: ClassVar[int | None] = 30_000
    defaults: ClassVar[Defaults] = Defaults(
        sgd_lr=0.1, adam_lr=1e-3, batch_size=32, optimizer="adam"
    )

    def make_model(self, seed: int) -> nn.Module:
        """See ``PairsWorkload``."""
        return seeded(encoder_decoder_hansards, seed, **_lstm_sizes(self))


def _lstm_sizes(workload: PairsWorkload) -> dict[str, int]:
    source, target = workload.vocabularies
    return {
        "source_vocabulary": len(source),
        "target_vocabulary": len(target),
        "width": workload.width,
        "layers": workload.layers,
        "padding": SPECIAL.index(PAD),
    }
