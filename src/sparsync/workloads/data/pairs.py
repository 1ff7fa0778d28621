"""Pairs of sentences, in two files whose lines belong together: translations, or words and slots."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor

from sparsync.errors import ConfigurationError
from sparsync.workloads.base import PADDING, Batch
from sparsync.workloads.data.base import Samples, existing, padded, read_lines
from sparsync.workloads.data.words import UNKNOWN, Vocabulary
from sparsync.workloads.lengths import bucket_lengths, draw_from_bucket

__all__ = [
    "END",
    "PAD",
    "SPECIAL",
    "START",
    "Pair",
    "SentencePairs",
    "Vocabularies",
    "find_pairs",
    "load_pairs",
    "load_vocabularies",
]

PAD, START, END = "<pad>", "<s>", "</s>"
SPECIAL = (PAD, UNKNOWN, START, END)  # the first words of every vocabulary: numbers 0 to 3

Pair = tuple[Path, Path]  # sources and targets
Vocabularies = tuple[Vocabulary, Vocabulary]  # of the source and of the target; may be the same


@final
class SentencePairs(Samples):
    """Pairs, sorted by length; a batch is of one bucket of similar lengths.

    Args:
        files: of the sources and of the targets; words are split at white space.
        vocabularies: of the sources and of the targets.
        longest: tokens of a sentence, its end included; pairs with a longer one are left out.  None:
            any.
        bucket_width: difference of the lengths that share a bucket.
        max_tokens: of a batch, padding included; larger ones are cut so that the longest bucket's
            fits.

    Raises:
        ConfigurationError: the files have unequal numbers of lines, or no pair is short enough.
    """

    def __init__(
        self,
        files: Pair,
        vocabularies: Vocabularies,
        *,
        longest: int | None,
        bucket_width: int = 8,
        max_tokens: int = 8192,
    ) -> None:
        self.longest, self.max_tokens = longest, max_tokens
        tokens = (array("i"), array("i"))  # 4 bytes each: WMT17 has 300 million
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
        """How many there are."""
        return len(self._order)

    def chosen(
        self, *, seed: int, step: int, rank: int, world_size: int, batch_size: int
    ) -> Tensor:
        """Draw a rank's pairs of one bucket; every ``world_size``-th pair is the rank's (WAGMA, 5.3)."""
        mine = self.padded_lengths[rank::world_size].contiguous()
        if not len(mine):
            raise ConfigurationError(
                f"{world_size} ranks share {len(self)} pairs: rank {rank} has none; use at most "
                f"{len(self)} ranks"
            )
        count = max(1, min(batch_size, self.max_tokens // int(self.padded_lengths[-1])))
        drawn, _ = draw_from_bucket(mine, np.random.default_rng([seed, step, rank]), count)
        return drawn * world_size + rank

    def batch(self, chosen: Tensor, generator: np.random.Generator | None) -> Batch:
        """See ``Samples``; nothing is random.

        Returns:
            Sources that end with ``END``, and targets that begin with ``START``, padded with ``PAD``;
            and those targets with ``END``, padded with ``PADDING``: `[batch, longest]` each.
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


def find_pairs(folder: Path, suffixes: tuple[str, str]) -> tuple[Pair, Pair]:
    """Return the files to train on, and those that are held out: ``train.en`` and ``train.de``, say.

    Args:
        folder: has them.
        suffixes: of the sources' and the targets' files.

    Raises:
        ConfigurationError: one is missing.
    """
    advice = "put files there whose lines belong together"
    training, held_out = (
        [existing(folder, [f"{part}.{s}"], what="sentences", advice=advice) for s in suffixes]
        for part in ("train", "valid")
    )
    return (training[0], training[1]), (held_out[0], held_out[1])


def load_vocabularies(training: Pair, *, joint: bool, most: int | None) -> Vocabularies:
    """Read ``vocab.txt``, a word per line; or build vocabularies from the training texts.

    Args:
        training: the two texts; ``vocab.txt`` lies beside them.
        joint: one vocabulary of both; only then a file is read.
        most: words of each vocabulary that is built.
    """
    file = training[0].with_name("vocab.txt")
    if joint and file.exists():
        words = [word for word in read_lines(file) if word not in SPECIAL]
        both = Vocabulary([*SPECIAL, *words])
        return both, both
    if joint:
        both = Vocabulary.of_words(_words(training), special=SPECIAL, most=most)
        return both, both
    source, target = (
        Vocabulary.of_words(_words([path]), special=SPECIAL, most=most) for path in training
    )
    return source, target


def load_pairs(
    files: tuple[Pair, Pair], vocabularies: Vocabularies, *, context: int
) -> tuple[SentencePairs, SentencePairs]:
    """Read what to train on and what is held out, of which all lengths are kept.

    Args:
        files: see ``find_pairs``.
        vocabularies: of the sources and of the targets.
        context: tokens of the longest sentence to train on.

    Raises:
        ConfigurationError: lines do not belong together, or none is short enough.
    """
    training, held_out = files
    return (
        SentencePairs(training, vocabularies, longest=context),
        SentencePairs(held_out, vocabularies, longest=None),
    )
