"""The LSTM language model of words, on the Penn Treebank and WikiText-2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, final

from torch import nn

from sparsync.workloads.base import CrossEntropy, Defaults
from sparsync.workloads.data.words import Vocabulary, Windows, find_words, load_words
from sparsync.workloads.folders import FolderWorkload, seeded
from sparsync.workloads.models.language import lstm_ptb, lstm_wikitext2

__all__ = ["LstmPtb", "LstmWikitext2", "WordsWorkload"]

Build = Callable[..., nn.Module]


@dataclass(frozen=True)
class WordsWorkload(FolderWorkload):
    """RedSync, section 6.2: 4 ranks with 5 windows each, clipped gradients; perplexity is reported.

    Every window starts from a state of zeros, while training and in the evaluation.  The learning
    rate, with momentum 0.9, is that of plain SGD with 20, as is usual for this model (RedSync gives
    none); ``--momentum 0 --lr 20`` is the paper's plain SGD.

    Attributes:
        width: of the embedding, and hidden units per layer.
        layers: stacked LSTM layers.
        context: words per window (Zaremba et al. 2014: 35).
    """

    width: int = 1500
    layers: int = 2
    context: int = 35

    target: ClassVar[str] = "word"
    classifies: ClassVar[bool] = False
    defaults: ClassVar[Defaults] = Defaults(sgd_lr=2.0, adam_lr=1e-3, batch_size=5, clip=0.25)
    build: ClassVar[Build]

    @property
    def objective(self) -> CrossEntropy:
        """See ``Workload``."""
        return CrossEntropy(perplexity=True)

    @cached_property
    def text(self) -> tuple[Windows, Windows, Vocabulary]:
        """The text and its vocabulary, read when they are first asked for."""
        return load_words(self.find(), context=self.context)

    @final
    def find(self) -> tuple[Path, Path]:
        """See ``FolderWorkload``."""
        return find_words(self.data)

    @final
    def load(self) -> tuple[Windows, Windows]:
        """See ``FolderWorkload``."""
        return self.text[:2]

    @final
    def make_model(self, seed: int) -> nn.Module:
        """See ``Workload``; the vocabulary is that of the training text."""
        return seeded(
            type(self).build,
            seed,
            vocabulary=len(self.text[2]),
            width=self.width,
            layers=self.layers,
        )


@final
@dataclass(frozen=True)
class LstmPtb(WordsWorkload):
    """The Penn Treebank."""

    name: ClassVar[str] = "lstm-ptb"
    build: ClassVar[Build] = staticmethod(lstm_ptb)


@final
@dataclass(frozen=True)
class LstmWikitext2(WordsWorkload):
    """WikiText-2."""

    name: ClassVar[str] = "lstm-wikitext2"
    build: ClassVar[Build] = staticmethod(lstm_wikitext2)
