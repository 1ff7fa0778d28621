"""Word-level texts (the Penn Treebank and WikiText-2), and the LSTM that predicts them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, final

import numpy as np
import torch
from torch import Tensor, nn

from sparsync.cli.workloads.workload import CrossEntropy, Defaults
from sparsync.errors import ConfigurationError
from sparsync_papers.models.text import LstmLanguageModel
from sparsync_papers.workloads.folders import FolderWorkload, Samples, existing, read_lines, seeded

UNKNOWN, END_OF_LINE = "<unk>", "<eos>"

_FILES = {  # training file -> validation file
    "ptb.train.txt": "ptb.valid.txt",
    "wiki.train.tokens": "wiki.valid.tokens",
    "train.txt": "valid.txt",
}


@final
class Vocabulary:
    """Words and their numbers.

    Args:
        words: distinct words; a word's position is its number.
        unknown: the word that replaces all words that are not in ``words``.

    Raises:
        ConfigurationError: a word occurs twice, or ``unknown`` is missing.

    Example:
        >>> vocabulary = Vocabulary.of_words("b a b c".split(), special=["<unk>"], most=3)
        >>> vocabulary.words, vocabulary.numbers(["a", "b", "z"])
        (('<unk>', 'b', 'a'), [2, 1, 0])
    """

    def __init__(self, words: Sequence[str], *, unknown: str = UNKNOWN) -> None:
        self.words = tuple(words)
        self._number = {word: number for number, word in enumerate(self.words)}
        if len(self._number) < len(self.words):
            twice = Counter(self.words).most_common(1)[0][0]
            raise ConfigurationError(f"the vocabulary has {twice!r} more than once; remove one")
        if unknown not in self._number:
            raise ConfigurationError(
                f"the vocabulary has no {unknown!r}, which stands for unknown words; add it"
            )
        self.unknown = self._number[unknown]

    def __len__(self) -> int:
        """Return the number of words."""
        return len(self.words)

    def __contains__(self, word: str) -> bool:
        """Return whether the vocabulary contains a word."""
        return word in self._number

    def numbers(self, words: Iterable[str]) -> list[int]:
        """Return the numbers of words."""
        return [self._number.get(word, self.unknown) for word in words]

    @classmethod
    def of_words(
        cls, words: Iterable[str], *, special: Sequence[str] = (UNKNOWN,), most: int | None = None
    ) -> Vocabulary:
        """Build a vocabulary of up to ``most`` words: ``special``, then the most frequent ones.

        Equally frequent words are in alphabetical order.
        """
        counts = Counter(words)
        for word in special:
            counts.pop(word, None)
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        return cls([*special, *ranked][:most])


@final
class Windows(Samples):
    """A long sequence of words, cut into windows; each word is predicted from the words before it.

    Words that do not fill the last window are dropped.

    Raises:
        ConfigurationError: there are too few words to fill a window.
    """

    def __init__(self, words: Sequence[str], vocabulary: Vocabulary, *, context: int) -> None:
        if len(words) <= context:
            raise ConfigurationError(
                f"the text has {len(words)} words, a window of context {context} needs {context + 1}; "
                "give a smaller --context"
            )
        self.numbers = torch.tensor(vocabulary.numbers(words))
        self.vocabulary, self.context = vocabulary, context

    def __len__(self) -> int:
        """Return the number of windows."""
        return (len(self.numbers) - 1) // self.context

    def batch(self, chosen: Tensor, generator: np.random.Generator | None) -> tuple[Tensor, Tensor]:
        """Return tokens and next tokens, `[batch, context]`, without randomness; see ``Samples``."""
        windows = self.numbers[chosen[:, None] * self.context + torch.arange(self.context + 1)]
        return windows[:, :-1], windows[:, 1:]


@dataclass(frozen=True)
class WordsWorkload(FolderWorkload[Windows]):
    """The LSTM of RedSync, section 6.2: 4 ranks with 5 windows each, and clipped gradients.

    The evaluation reports the perplexity. Every window starts from a zero state, in training and in
    evaluation. With momentum 0.9, the learning rate corresponds to plain SGD with rate 20, which is
    usual for this model (RedSync states no rate). ``--momentum 0 --lr 20`` gives the paper's plain
    SGD.
    """

    width: int = 1500  # width of the embedding, and hidden units per layer
    layers: int = 2  # stacked LSTM layers
    context: int = 35  # words per window (Zaremba et al. 2014: 35)

    target: ClassVar[str] = "word"
    classifies: ClassVar[bool] = False
    defaults: ClassVar[Defaults] = Defaults(sgd_lr=2.0, adam_lr=1e-3, batch_size=5, clip=0.25)

    @property
    def objective(self) -> CrossEntropy:
        """See ``Workload``."""
        return CrossEntropy(perplexity=True)

    @final
    def find(self) -> tuple[Path, Path]:
        """Return the training text and the validation text."""
        advice = "unpack the Penn Treebank (Mikolov's) or WikiText-2 there"
        first = existing(self.data, list(_FILES), what="the training text", advice=advice)
        other = [_FILES[first.name]]
        return first, existing(self.data, other, what="the validation text", advice=advice)

    @final
    def load(self) -> tuple[Windows, Windows]:
        """Read both texts; lines are split at white space and end with ``END_OF_LINE``."""
        training, held_out = (
            [word for line in read_lines(path) for word in (*line.split(), END_OF_LINE)]
            for path in self.find()
        )
        vocabulary = Vocabulary.of_words(training, special=(UNKNOWN, END_OF_LINE))
        return (
            Windows(training, vocabulary, context=self.context),
            Windows(held_out, vocabulary, context=self.context),
        )

    @final
    def make_model(self, seed: int) -> nn.Module:
        """Make the model for the training text's vocabulary; see ``Workload``."""
        words = len(self.parts[0].vocabulary)
        sizes = {"vocabulary": words, "width": self.width, "layers": self.layers}
        return seeded(LstmLanguageModel, seed, **sizes)


@final
class LstmPtb(WordsWorkload):
    """The LSTM of RedSync on the Penn Treebank."""

    name = "lstm-ptb"


@final
class LstmWikitext2(WordsWorkload):
    """The LSTM of RedSync on WikiText-2."""

    name = "lstm-wikitext2"
