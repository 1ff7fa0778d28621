"""Texts of words, as the Penn Treebank and WikiText: a vocabulary, and windows of a long sequence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import final

import numpy as np
import torch
from torch import Tensor

from sparsync.errors import ConfigurationError
from sparsync.workloads.data.base import Samples, existing, read_lines

__all__ = ["END_OF_LINE", "UNKNOWN", "Vocabulary", "Windows", "find_words", "load_words"]

UNKNOWN, END_OF_LINE = "<unk>", "<eos>"

_FILES = MappingProxyType(
    {
        "ptb.train.txt": "ptb.valid.txt",
        "wiki.train.tokens": "wiki.valid.tokens",
        "train.txt": "valid.txt",
    }
)


@final
class Vocabulary:
    """Words and their numbers.

    Args:
        words: distinct; a word's place is its number.
        unknown: the one that stands for all others.

    Raises:
        ConfigurationError: a word is there twice, or ``unknown`` is not there.

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
                f"the vocabulary has no {unknown!r}, which stands for what it has not; add it"
            )
        self.unknown = self._number[unknown]

    def __len__(self) -> int:
        """How many words there are."""
        return len(self.words)

    def __contains__(self, word: str) -> bool:
        """Tell whether a word is there."""
        return word in self._number

    def numbers(self, words: Iterable[str]) -> list[int]:
        """Return the numbers of words."""
        return [self._number.get(word, self.unknown) for word in words]

    @classmethod
    def of_words(
        cls, words: Iterable[str], *, special: Sequence[str] = (UNKNOWN,), most: int | None = None
    ) -> Vocabulary:
        """Build it: first what is special, then words, the most frequent first, ties by the alphabet.

        Args:
            words: of a text.
            special: words to have in any case; ``UNKNOWN`` among them.
            most: words to keep, the special ones included; None: all.
        """
        counts = Counter(words)
        for word in special:
            counts.pop(word, None)
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        return cls([*special, *ranked][:most])


@final
class Windows(Samples):
    """A long sequence of words in windows that do not overlap; each word is predicted from those before.

    What is left at the end, shorter than a window, is left out.

    Args:
        numbers: of the words, `[words]`, ``int64``.
        context: words of a window.

    Raises:
        ConfigurationError: there is no whole window.
    """

    def __init__(self, numbers: Tensor, *, context: int) -> None:
        if len(numbers) <= context:
            raise ConfigurationError(
                f"the text has {len(numbers)} words, a window of context {context} needs {context + 1}; "
                "give a smaller --context"
            )
        self.numbers, self.context = numbers, context

    def __len__(self) -> int:
        """How many windows there are."""
        return (len(self.numbers) - 1) // self.context

    def batch(self, chosen: Tensor, generator: np.random.Generator | None) -> tuple[Tensor, Tensor]:
        """See ``Samples``: tokens and the next of each, `[batch, context]`; nothing is random."""
        windows = self.numbers[chosen[:, None] * self.context + torch.arange(self.context + 1)]
        return windows[:, :-1], windows[:, 1:]


def find_words(folder: Path) -> tuple[Path, Path]:
    """Return the training text and the validation text.

    Args:
        folder: has ``ptb.train.txt`` and ``ptb.valid.txt``, or the like of WikiText.

    Raises:
        ConfigurationError: one is missing.
    """
    advice = "unpack the Penn Treebank (Mikolov's) or WikiText-2 there"
    first = existing(folder, list(_FILES), what="the training text", advice=advice)
    other = _FILES[first.name]
    return first, existing(folder, [other], what="the validation text", advice=advice)


def load_words(files: tuple[Path, Path], *, context: int) -> tuple[Windows, Windows, Vocabulary]:
    """Read a training and a validation text; the vocabulary is that of the training text.

    Lines are split at white space, and end with ``END_OF_LINE``.

    Args:
        files: see ``find_words``.
        context: words of a window.

    Raises:
        ConfigurationError: a text is too short.
    """
    training, held_out = (_words(path) for path in files)
    vocabulary = Vocabulary.of_words(training, special=(UNKNOWN, END_OF_LINE))
    first, second = (
        Windows(torch.tensor(vocabulary.numbers(words)), context=context)
        for words in (training, held_out)
    )
    return first, second, vocabulary


def _words(path: Path) -> list[str]:
    return [word for line in read_lines(path) for word in (*line.split(), END_OF_LINE)]
