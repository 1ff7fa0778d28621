"""Workloads on sentence pairs: a Transformer on WMT17, and LSTMs on ATIS and Hansards."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
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
    Draw,
    Evaluation,
    Objective,
    Tensors,
)
from sparsync.errors import ConfigurationError
from sparsync_papers.models.text import EncoderDecoder, Transformer
from sparsync_papers.workloads.folders import (
    FolderWorkload,
    Samples,
    existing,
    padded,
    read_lines,
    seeded,
)
from sparsync_papers.workloads.length_buckets import bucket_lengths, draw_from_bucket
from sparsync_papers.workloads.words import UNKNOWN, Vocabulary

PAD, START, END = "<pad>", "<s>", "</s>"
SPECIAL = (PAD, UNKNOWN, START, END)  # the first words of every vocabulary: numbers 0 to 3

Pair = tuple[Path, Path]  # sources and targets
# vocabularies of the source and the target, possibly the same
Vocabularies = tuple[Vocabulary, Vocabulary]
_HEAD_WIDTH = 64  # width of an attention head (Vaswani et al. 2017)
_NEVER = "\0"  # stands for an unknown word in a translation, so that it matches no reference


@final
class SentencePairs(Samples):
    """Pairs sorted by length; a batch comes from one bucket of similar lengths.

    Raises:
        ConfigurationError: the files have unequal numbers of lines, or no pair is short enough.
    """

    def __init__(
        self,
        files: Pair,  # source file and target file; words are separated by white space
        vocabularies: Vocabularies,  # source and target vocabulary
        *,
        # largest number of tokens in a sentence, including its end token; pairs with longer sentences
        # are dropped; None for any length
        longest: int | None,
        bucket_width: int = 8,  # tokens by which neighbouring buckets' lengths differ
        # the largest number of tokens in a batch, including padding; a larger batch is cut
        max_tokens: int = 8192,
    ) -> None:
        self.longest, self.max_tokens = longest, max_tokens
        tokens = (array("i"), array("i"))  # 4 bytes per token, because WMT17 has 300 million tokens
        ends = (array("q", [0]), array("q", [0]))
        for pair in _aligned(files):
            rows = [v.numbers(s.split()) for v, s in zip(vocabularies, pair, strict=True)]
            if not all(0 < len(row) < (longest or len(row) + 1) for row in rows):
                continue
            for row, flat, end in zip(rows, tokens, ends, strict=True):
                flat.extend(row)
                end.append(len(flat))
        if len(ends[0]) == 1:
            raise ConfigurationError(
                f"{files[0]} and {files[1]} have no pair of 1 to {longest} tokens; give others, or a "
                "larger --context"
            )
        self._tokens = tuple(torch.frombuffer(flat, dtype=torch.int32) for flat in tokens)
        self._ends = tuple(torch.frombuffer(end, dtype=torch.int64) for end in ends)
        lengths = 1 + torch.maximum(*(end.diff() for end in self._ends))
        self._order = lengths.argsort(stable=True)
        self.padded_lengths = bucket_lengths(lengths[self._order], bucket_width)

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self._order)

    def chosen(self, draw: Draw) -> Tensor:
        """Draw pairs from one bucket; a rank owns every ``world_size``-th pair (WAGMA, section 5.3)."""
        mine = self.padded_lengths[draw.rank :: draw.world_size].contiguous()
        if not len(mine):
            raise ConfigurationError(
                f"{draw.world_size} ranks share {len(self)} pairs: rank {draw.rank} has none; use at "
                f"most {len(self)} ranks"
            )
        count = max(1, min(draw.batch_size, self.max_tokens // int(self.padded_lengths[-1])))
        drawn, _ = draw_from_bucket(mine, draw.generator(), count)
        return drawn * draw.world_size + draw.rank

    def batch(self, chosen: Tensor, generator: np.random.Generator | None) -> Batch:
        """Return the chosen pairs as a batch, without randomness; see ``Samples``.

        Returns:
            Inputs and targets, each `[batch, longest]`. The inputs are the source sentences, which
            end with ``END``, and the target sentences, which begin with ``START``; both are padded
            with ``PAD``. The targets are the target sentences, which end with ``END`` and are padded
            with ``PADDING``.
        """
        start, end = (torch.tensor([SPECIAL.index(word)]) for word in (START, END))
        pairs = [self._pair(number) for number in chosen.tolist()]
        sources = padded([torch.cat((source, end)) for source, _ in pairs], SPECIAL.index(PAD))
        before = padded([torch.cat((start, target)) for _, target in pairs], SPECIAL.index(PAD))
        after = padded([torch.cat((target, end)) for _, target in pairs], PADDING)
        return (sources, before), after

    def _pair(self, number: int) -> tuple[Tensor, Tensor]:
        at = int(self._order[number])
        source, target = (
            flat[int(ends[at]) : int(ends[at + 1])].long()
            for flat, ends in zip(self._tokens, self._ends, strict=True)
        )
        return source, target


def _aligned(files: Pair) -> Iterator[tuple[str, str]]:
    for number, (source, target) in enumerate(zip_longest(*map(read_lines, files)), start=1):
        if source is None or target is None:
            shorter = files[source is not None]
            raise ConfigurationError(
                f"{shorter} ends before line {number} of {files[source is None]}; give files whose "
                "lines belong together"
            )
        yield source, target


def _words(paths: Iterable[Path]) -> Iterator[str]:
    return (word for path in paths for line in read_lines(path) for word in line.split())


Words = Sequence[Hashable]


def ngrams(
    candidates: Sequence[Words], references: Sequence[Words], *, longest: int = 4
) -> Counter[str]:
    """Compare each translation with a reference; return the sums, by name, that ``bleu`` needs.

    "c" and "r" count the words of the candidates and of the references. "found 2" counts the
    candidates' bigrams, and "right 2" counts the bigrams that are also in the reference; the same
    holds for all lengths up to ``longest``.

    Example:
        >>> seven = "the the the the the the the".split()  # the paper's example 2: 2 of 7
        >>> ngrams([seven], ["the cat is on the mat".split()], longest=1)
        Counter({'c': 7, 'found 1': 7, 'r': 6, 'right 1': 2})
    """
    sums = Counter(c=sum(map(len, candidates)), r=sum(map(len, references)))
    for candidate, reference in zip(candidates, references, strict=True):
        for n in range(1, longest + 1):
            found = _ngrams(candidate, n)
            sums[f"found {n}"] += found.total()
            sums[f"right {n}"] += (found & _ngrams(reference, n)).total()
    return sums


def bleu(sums: Counter[str], *, longest: int = 4) -> float:
    """Return corpus BLEU: the geometric mean of the precisions, times the brevity penalty.

    The score is in [0, 1] and not smoothed; it is NaN if there are no words.

    References: Papineni et al., `BLEU: a Method for Automatic Evaluation of Machine Translation
    <https://aclanthology.org/P02-1040>`_, 2002.
    """
    if not sums["r"]:
        return math.nan
    if not all(sums[f"right {n}"] for n in range(1, longest + 1)):
        return 0.0
    logs = (math.log(sums[f"right {n}"] / sums[f"found {n}"]) for n in range(1, longest + 1))
    return math.exp(min(0.0, 1 - sums["r"] / sums["c"]) + sum(logs) / longest)


def _ngrams(words: Words, n: int) -> Counter[tuple[Hashable, ...]]:
    return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))


@final
@dataclass(frozen=True)
class Translation(Objective):
    """Cross entropy of every next word, and uncased BLEU-4 of greedy translations."""

    words: tuple[str, ...]  # words of the target's vocabulary
    smoothing: float = 0.0  # smoothing of the labels in training
    # a translation may be this many tokens longer than its source (Vaswani et al. 2017, section
    # 6.1)
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
        references = [self._text(row[row != PADDING], unknown=UNKNOWN) for row in targets]
        more = ngrams(candidates, references)
        return Evaluation(known.loss_sum, known.hits, known.count, more)

    def figures(self, whole: Evaluation) -> dict[str, float]:
        """See ``Objective``."""
        return {"BLEU": bleu(whole.more)}

    def _text(self, numbers: Tensor, *, unknown: str) -> list[str]:
        """Return the words of a sentence, up to its end token."""
        words = [self.words[number] for number in numbers.tolist()]
        words = words[: words.index(END)] if END in words else words
        return joined([unknown if word == UNKNOWN else word for word in words])


def greedy(model: nn.Module, source: Tensor, *, longest: int) -> Tensor:
    """Translate by appending the likeliest next token until every sentence has ended.

    Returns:
        `[batch, tokens]`; tokens after an ``END`` are arbitrary.

    Cost: the model runs once per token, on all previous tokens.
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
    """Join pieces into lower-case words; a piece that ends with "@@" continues in the next piece.

    Example:
        >>> joined(["Ein", "Ver@@", "such", "!"])
        ['ein', 'versuch', '!']

    References: Sennrich et al., `Neural Machine Translation of Rare Words with Subword Units
    <https://arxiv.org/abs/1508.07909>`_, 2016.
    """
    return (" ".join(pieces) + " ").replace("@@ ", "").lower().split()


@dataclass(frozen=True)
class PairsWorkload(FolderWorkload[SentencePairs]):
    """Sentence pairs in length buckets, so steps take unequal times (WAGMA, section 5.3)."""

    width: int = 768  # numbers per position, or hidden units
    layers: int = 2  # layers of the encoder, and of the decoder
    context: int = 128  # largest number of tokens in a sentence to train on

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
        """The source and target vocabularies, from ``vocab.txt`` (one word per line) or the texts."""
        training = self.find()[0]
        file = self.data / "vocab.txt"
        if self.joint and file.exists():
            words = [word for word in read_lines(file) if word not in SPECIAL]
            both = Vocabulary([*SPECIAL, *words])
            return both, both
        if self.joint:
            both = Vocabulary.of_words(_words(training), special=SPECIAL, most=self.words)
            return both, both
        source, target = (
            Vocabulary.of_words(_words([path]), special=SPECIAL, most=self.words)
            for path in training
        )
        return source, target

    @final
    def find(self) -> tuple[Pair, Pair]:
        """Return the training and the held-out files, e.g. ``train.en`` and ``train.de``."""
        advice = "put files there whose lines belong together"
        training, held_out = (
            [
                existing(self.data, [f"{part}.{s}"], what="sentences", advice=advice)
                for s in self.suffixes
            ]
            for part in ("train", "valid")
        )
        return (training[0], training[1]), (held_out[0], held_out[1])

    @final
    def load(self) -> tuple[SentencePairs, SentencePairs]:
        """Read the pairs; keep held-out pairs of all lengths."""
        training, held_out = self.find()
        return (
            SentencePairs(training, self.vocabularies, longest=self.context),
            SentencePairs(held_out, self.vocabularies, longest=None),
        )

    def make_model(self, seed: int) -> nn.Module:
        """Make the model for the data's vocabularies; see ``Workload``."""
        source, target = self.vocabularies
        return seeded(
            EncoderDecoder,
            seed,
            source_vocabulary=len(source),
            target_vocabulary=len(target),
            width=self.width,
            layers=self.layers,
            padding=SPECIAL.index(PAD),
        )


@final
@dataclass(frozen=True)
class TransformerWmt17(PairsWorkload):
    """The Transformer as in WAGMA, section 5.3: English to German, batches of up to 8,192 tokens.

    All other settings are from Vaswani et al. 2017. The learning rate is the peak of Vaswani et
    al.'s schedule, after 4,000 warm-up steps.
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
            Transformer,
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
    """ATIS as in SparCML, Table 3: 560 sentences on 8 ranks, words to slots.

    The learning rate is a choice made here.
    """

    context: int = 64

    name: ClassVar[str] = "atis"
    suffixes: ClassVar[tuple[str, str]] = ("in", "out")
    defaults: ClassVar[Defaults] = Defaults(
        sgd_lr=0.1, adam_lr=1e-3, batch_size=70, optimizer="adam"
    )


@final
@dataclass(frozen=True)
class Hansards(PairsWorkload):
    """Hansards as in SparCML, Table 3: 256 sentences on 8 ranks, English to French.

    The learning rate is a choice made here.
    """

    context: int = 64

    name: ClassVar[str] = "hansards"
    suffixes: ClassVar[tuple[str, str]] = ("en", "fr")
    words: ClassVar[int | None] = 30_000
    defaults: ClassVar[Defaults] = Defaults(
        sgd_lr=0.1, adam_lr=1e-3, batch_size=32, optimizer="adam"
    )
