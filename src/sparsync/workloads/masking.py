"""BERT, on documents of Wikipedia."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, final

from torch import Tensor, nn

from sparsync.errors import ConfigurationError
from sparsync.workloads.base import (
    CrossEntropy,
    Defaults,
    Evaluation,
    Objective,
    Tensors,
    outputs_of,
)
from sparsync.workloads.data.documents import PAD, MaskedPairs, find_documents, load_documents
from sparsync.workloads.data.words import Vocabulary
from sparsync.workloads.folders import FolderWorkload, seeded
from sparsync.workloads.metrics import Mean
from sparsync.workloads.models.bert import bert

__all__ = ["BertWikipedia", "MaskedWords"]

_HEAD_WIDTH = 64  # of an attention head (Devlin et al.)
_SHORTEST = 8  # tokens of a sample: three that separate, and two passages


@final
class MaskedWords(Objective):
    """The mean cross entropies of masked words and of "is the second passage another's?", added up.

    What is evaluated: the loss and the hits are those of the words alone; their perplexity, and how
    many of the passages are told right.
    """

    def loss(self, outputs: Tensors, targets: Tensors) -> Tensor:
        """See ``Objective``."""
        words, passages = (CrossEntropy().loss(outputs[head], targets[head]) for head in (0, 1))
        return words + passages

    def judge(self, model: nn.Module, inputs: Tensors, targets: Tensors) -> Evaluation:
        """See ``Objective``."""
        outputs = outputs_of(model, inputs)
        words = CrossEntropy(perplexity=True).judge_outputs(outputs[0], targets[0])
        passages = CrossEntropy().judge_outputs(outputs[1], targets[1])
        told = {"next sentence": Mean(passages.hits, passages.count)}
        return Evaluation(words.loss_sum, words.hits, words.count, {**words.metrics, **told})


@final
@dataclass(frozen=True)
class BertWikipedia(FolderWorkload):
    """Ok-Topk, section 5: Adam with decoupled weight decay 0.01; add ``--lr-decay`` for its linear decay.

    Attributes:
        width: numbers per position, a multiple of 64: the width of a head.
        layers: blocks.
        context: tokens per sample.
    """

    width: int = 768
    layers: int = 12
    context: int = 128

    name: ClassVar[str] = "bert-wikipedia"
    target: ClassVar[str] = "masked word"
    classifies: ClassVar[bool] = False
    defaults: ClassVar[Defaults] = Defaults(
        sgd_lr=0.1, adam_lr=2e-4, batch_size=8, optimizer="adamw"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % _HEAD_WIDTH:
            raise ConfigurationError(
                f"width is {self.width}; give a multiple of {_HEAD_WIDTH}, the width of a head"
            )
        if self.context < _SHORTEST:
            raise ConfigurationError(f"context is {self.context}; give at least {_SHORTEST}")

    @property
    def objective(self) -> MaskedWords:
        """See ``Workload``."""
        return MaskedWords()

    @cached_property
    def documents(self) -> tuple[MaskedPairs, MaskedPairs, Vocabulary]:
        """The documents and their vocabulary, opened when they are first asked for."""
        return load_documents(self.find(), context=self.context)

    def find(self) -> tuple[Path, Path, Path]:
        """See ``FolderWorkload``."""
        return find_documents(self.data)

    def load(self) -> tuple[MaskedPairs, MaskedPairs]:
        """See ``FolderWorkload``."""
        return self.documents[:2]

    def make_model(self, seed: int) -> nn.Module:
        """See ``Workload``; the vocabulary is that of ``vocab.txt``."""
        vocabulary = self.documents[2]
        return seeded(
            bert,
            seed,
            vocabulary=len(vocabulary),
            width=self.width,
            layers=self.layers,
            heads=self.width // _HEAD_WIDTH,
            inner=4 * self.width,
            positions=max(512, self.context),
            padding=vocabulary.numbers([PAD])[0],
        )
