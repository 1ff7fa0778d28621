"""BERT on Wikipedia: pairs of passages with some tokens masked.

A text file has one sentence per line, and empty lines between documents.
"""

from __future__ import annotations

import mmap
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, final

import numpy as np
import torch
from torch import Tensor, nn

from sparsync.cli.workloads.workload import (
    PADDING,
    Batch,
    CrossEntropy,
    Defaults,
    Evaluation,
    Objective,
    Tensors,
    mean,
    outputs_of,
)
from sparsync.errors import ConfigurationError
from sparsync_papers.models.text import Bert
from sparsync_papers.workloads.folders import (
    FolderWorkload,
    Samples,
    existing,
    padded,
    read_lines,
    seeded,
)
from sparsync_papers.workloads.words import Vocabulary

PAD, UNKNOWN, CLASS, SEPARATOR, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"

_WORD = re.compile(r"[^\W_]+|[^\w\s]|_")  # letters and digits, or a single punctuation mark
_ADVICE = "give documents with empty lines between them, a sentence per line, in UTF-8"
_LONGEST_WORD = 100  # characters; longer words count as unknown (Devlin et al., published code)
_HEAD_WIDTH = 64  # width of an attention head (Devlin et al.)
_SHORTEST = 8  # tokens of a sample: three separators, and two passages


def word_pieces(text: str, vocabulary: Vocabulary) -> list[str]:
    """Split a text into the longest pieces of a vocabulary; pieces inside a word begin with ##.

    The text is lower-cased and stripped of accents. A vocabulary of whole words also works.

    Example:
        >>> vocabulary = Vocabulary(["[UNK]", "un", "##able", "##a", "!"], unknown="[UNK]")
        >>> word_pieces("Unable, UNA!", vocabulary)
        ['un', '##able', '[UNK]', 'un', '##a', '!']

    References: Devlin et al., `BERT <https://arxiv.org/abs/1810.04805>`_, 2018; Wu et al., `Google's
    Neural Machine Translation System <https://arxiv.org/abs/1609.08144>`_, 2016.
    """
    plain = unicodedata.normalize("NFD", text.lower())
    plain = "".join(c for c in plain if unicodedata.category(c) != "Mn")
    return [piece for word in _WORD.findall(plain) for piece in _pieces(word, vocabulary)]


def _pieces(word: str, vocabulary: Vocabulary) -> list[str]:
    found: list[str] = []
    start = 0
    while start < len(word) <= _LONGEST_WORD:
        prefix = "##" if start else ""
        ends = range(len(word), start, -1)
        end = next((e for e in ends if prefix + word[start:e] in vocabulary), None)
        if end is None:
            return [UNKNOWN]
        found.append(prefix + word[start:end])
        start = end
    return found or [UNKNOWN]


@final
class MaskedPairs(Samples):
    """Pairs of passages with ``context`` tokens; in half of them, the second passage follows the first.

    15 % of a sample's tokens must be predicted: of these, 80 % are masked, 10 % replaced by random
    tokens, and 10 % kept (BERT, section 3.1). Each sample begins in a different document, at a random
    position.

    Args:
        path: a text file of documents, which are read on demand.
        vocabulary: a vocabulary with ``PAD``, ``CLASS``, ``SEPARATOR`` and ``MASK``.
        context: tokens per sample, at least 8.
        share: share of the tokens that must be predicted.

    Raises:
        ConfigurationError: there are fewer than two documents, or the file cannot be read.

    Differs from BERT: passages are cut where the sample is full, even in the middle of a sentence;
    Chinese characters are not split.
    """

    def __init__(
        self, path: Path, vocabulary: Vocabulary, *, context: int, share: float = 0.15
    ) -> None:
        self.vocabulary, self.context, self.share = vocabulary, context, share
        try:
            with path.open("rb") as file:
                self.content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # an empty file cannot be mapped
            raise ConfigurationError(f"cannot read {path} ({error}); {_ADVICE}") from error
        self.places = np.array(list(_blocks(self.content)), dtype=np.int64)
        if len(self.places) < 2:
            raise ConfigurationError(f"{path} has fewer than two documents; {_ADVICE}")
        special = vocabulary.numbers([PAD, CLASS, SEPARATOR, MASK])
        self.padding, self.first, self.separator, self.mask = special

    def __len__(self) -> int:
        """Return the number of samples, one per document."""
        return len(self.places)

    def sentences(self, document: int) -> list[str]:
        """Return the lines of a document."""
        start, end = self.places[document]
        lines = self.content[start:end].decode("utf-8", errors="replace").split("\n")
        return [line for line in lines if line.strip()]

    def batch(self, chosen: Tensor, generator: np.random.Generator | None) -> Batch:
        """See ``Samples``.

        Returns:
            Tokens and their segments (0 or 1), `[batch, context]`; the tokens to predict, of the same
            shape, with ``PADDING`` elsewhere; and whether the two passages come from different
            documents, `[batch]`.
        """
        samples = [
            self._sample(document, generator or np.random.default_rng([document]))
            for document in chosen.tolist()
        ]
        tokens, segments, words, others = zip(*samples, strict=True)
        inputs = self._filled(tokens, self.padding), self._filled(segments, 0)
        return inputs, (self._filled(words, PADDING), torch.tensor(others))

    def _filled(self, rows: Sequence[Tensor], value: int) -> Tensor:
        rows = [*rows, torch.full((self.context,), value)]
        return padded(rows, value)[:-1]

    def _sample(
        self, document: int, generator: np.random.Generator
    ) -> tuple[Tensor, Tensor, Tensor, int]:
        room = self.context - 3
        sentences = self.sentences(document)
        cut = int(generator.integers(1, len(sentences))) if len(sentences) > 1 else 1
        before = self._numbers(reversed(sentences[:cut]), room // 2, from_end=True)
        other = len(sentences) == 1 or generator.random() < 0.5
        if other:
            step = 1 + int(generator.integers(len(self) - 1))
            sentences = self.sentences((document + step) % len(self))
            cut = int(generator.integers(len(sentences)))
        after = self._numbers(iter(sentences[cut:]), room - len(before))
        row = [self.first, *before, self.separator, *after, self.separator]
        tokens, segments = torch.tensor(row), torch.zeros(len(row), dtype=torch.int64)
        segments[len(before) + 2 :] = 1
        ordinary = torch.ones(len(row), dtype=torch.bool)
        ordinary[[0, len(before) + 1, len(row) - 1]] = False
        masked, words = self._masked(tokens, ordinary.nonzero().flatten(), generator)
        return masked, segments, words, int(other)

    def _numbers(self, lines: Iterator[str], most: int, *, from_end: bool = False) -> list[int]:
        """Return the first ``most`` tokens of ``lines``; with ``from_end``, the last ones.

        With ``from_end``, the lines must come in reverse order.
        """
        found: list[int] = []
        while len(found) < most and (line := next(lines, None)) is not None:
            more = self.vocabulary.numbers(word_pieces(line, self.vocabulary))
            found = [*more, *found] if from_end else [*found, *more]
        return found[-most:] if from_end else found[:most]

    def _masked(
        self, tokens: Tensor, places: Tensor, generator: np.random.Generator
    ) -> tuple[Tensor, Tensor]:
        words = torch.full_like(tokens, PADDING)
        if not len(places):
            return tokens, words
        count = max(1, round(self.share * len(places)))
        drawn = generator.permutation(len(places))[:count]
        chosen = places[torch.from_numpy(drawn)]
        words[chosen] = tokens[chosen]
        kind = torch.from_numpy(generator.random(count))
        random = torch.from_numpy(generator.integers(len(self.vocabulary), size=count))
        masked = tokens.clone()
        masked[chosen] = torch.where(
            kind < 0.8, self.mask, torch.where(kind < 0.9, random, tokens[chosen])
        )
        return masked, words


def _blocks(content: mmap.mmap) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each document, i.e. of each block of lines between empty lines."""
    start, size = 0, len(content)
    while start < size:
        found = content.find(b"\n\n", start)
        end = size if found < 0 else found
        if content[start:end].strip():
            yield start, end
        start = end + 2


@final
class MaskedWords(Objective):
    """The sum of the mean cross entropies of masked words and of next-passage prediction.

    The evaluation reports the loss, hits and perplexity of the words alone, and the share of
    correctly classified passages.
    """

    def loss(self, outputs: Tensors, targets: Tensors) -> Tensor:
        """See ``Objective``."""
        words, passages = (CrossEntropy().loss(outputs[head], targets[head]) for head in (0, 1))
        return words + passages

    def judge(self, model: nn.Module, inputs: Tensors, targets: Tensors) -> Evaluation:
        """See ``Objective``."""
        outputs = outputs_of(model, inputs)
        words = CrossEntropy().judge_outputs(outputs[0], targets[0])
        passages = CrossEntropy().judge_outputs(outputs[1], targets[1])
        told = Counter(told=passages.hits, passages=passages.count)
        return Evaluation(words.loss_sum, words.hits, words.count, told)

    def figures(self, whole: Evaluation) -> dict[str, float]:
        """See ``Objective``."""
        told = mean(whole.more["told"], whole.more["passages"])
        return {**CrossEntropy(perplexity=True).figures(whole), "next sentence": told}


@final
@dataclass(frozen=True)
class BertWikipedia(FolderWorkload[MaskedPairs]):
    """BERT as in Ok-Topk, section 5: Adam with decoupled decay 0.01; use ``--lr-schedule linear``."""

    width: int = 768  # numbers per position; a multiple of 64, which is the width of a head
    layers: int = 12  # blocks
    context: int = 128  # tokens per sample

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

    def find(self) -> tuple[Path, Path, Path]:
        """Return ``train.txt``, ``valid.txt`` and ``vocab.txt`` (one token per line)."""
        training, held_out = (
            existing(self.data, [name], what="the documents", advice=_ADVICE)
            for name in ("train.txt", "valid.txt")
        )
        advice = "put BERT's there, a token per line"
        vocabulary = existing(self.data, ["vocab.txt"], what="the tokens", advice=advice)
        return training, held_out, vocabulary

    def load(self) -> tuple[MaskedPairs, MaskedPairs]:
        """Open the documents (at least two) and the vocabulary, which must have the special tokens."""
        *texts, tokens = self.find()
        vocabulary = Vocabulary(list(read_lines(tokens)), unknown=UNKNOWN)
        missing = [word for word in (PAD, CLASS, SEPARATOR, MASK) if word not in vocabulary]
        if missing:
            raise ConfigurationError(f"{tokens} has no {missing[0]}; add a line with it")
        training, held_out = (MaskedPairs(path, vocabulary, context=self.context) for path in texts)
        return training, held_out

    def make_model(self, seed: int) -> nn.Module:
        """Make the model for the vocabulary of ``vocab.txt``; see ``Workload``."""
        vocabulary = self.parts[0].vocabulary
        return seeded(
            Bert,
            seed,
            vocabulary=len(vocabulary),
            width=self.width,
            layers=self.layers,
            heads=self.width // _HEAD_WIDTH,
            inner=4 * self.width,
            positions=max(512, self.context),
            padding=vocabulary.numbers([PAD])[0],
        )
