"""What results are judged by: top-k, perplexity, WER, CER, BLEU, SPL; as sums that add up over ranks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

__all__ = [
    "Bleu",
    "Mean",
    "Metric",
    "Perplexity",
    "bleu",
    "edit_distance",
    "error_rate",
    "success_by_path_length",
    "top_hits",
]

Words = Sequence[Hashable]


class Metric(ABC):
    """Sums over samples; those of disjoint shares add up to those of the whole."""

    @property
    @abstractmethod
    def value(self) -> float:
        """The figure; NaN of no samples."""

    @abstractmethod
    def __add__(self, other: Any) -> Any:
        """Return the sums over both shares; ``other`` is of the same kind."""


@final
@dataclass(frozen=True)
class Mean(Metric):
    """A sum per counted thing: an accuracy, an error rate, a mean score.

    Attributes:
        total: what is counted or summed.
        count: over so many.

    Example:
        >>> (Mean(3, 4) + Mean(0, 2)).value
        0.5
    """

    total: float
    count: int

    @property
    def value(self) -> float:
        """Total per count."""
        return self.total / self.count if self.count else math.nan

    def __add__(self, other: Mean) -> Mean:
        """See ``Metric``."""
        return Mean(self.total + other.total, self.count + other.count)


@final
@dataclass(frozen=True)
class Perplexity(Metric):
    """How many equally likely choices a model's uncertainty amounts to.

    Attributes:
        nats: cross entropy, summed over targets.
        count: targets.

    Example:
        >>> round((Perplexity(math.log(2), 1) + Perplexity(math.log(8), 1)).value, 9)
        4.0
    """

    nats: float
    count: int

    @property
    def value(self) -> float:
        """The exponential of the mean; infinite where that is too large a number."""
        if not self.count:
            return math.nan
        mean = self.nats / self.count
        return math.exp(mean) if mean < 700 else math.inf  # e^709 is the largest float64

    def __add__(self, other: Perplexity) -> Perplexity:
        """See ``Metric``."""
        return Perplexity(self.nats + other.nats, self.count + other.count)


@final
@dataclass(frozen=True)
class Bleu(Metric):
    """Corpus BLEU, from what is summed over sentences.

    Attributes:
        matches: n-grams that a reference has too, for n = 1, 2, ...
        possible: n-grams of the candidates.
        length: words of the candidates, c.
        reference_length: words of the references nearest to them in length, r.

    References: Papineni et al., `BLEU: a Method for Automatic Evaluation of Machine Translation
    <https://aclanthology.org/P02-1040>`_, 2002.
    """

    matches: tuple[int, ...]
    possible: tuple[int, ...]
    length: int
    reference_length: int

    @property
    def value(self) -> float:
        """The geometric mean of the precisions, times the brevity penalty: in [0, 1]; not smoothed."""
        if not self.reference_length:
            return math.nan
        if not all(self.matches):
            return 0.0
        precisions = zip(self.matches, self.possible, strict=True)
        mean_log = sum(math.log(m / p) for m, p in precisions) / len(self.matches)
        brevity = min(0.0, 1 - self.reference_length / self.length)
        return math.exp(brevity + mean_log)

    def __add__(self, other: Bleu) -> Bleu:
        """See ``Metric``."""
        return Bleu(
            tuple(a + b for a, b in zip(self.matches, other.matches, strict=True)),
            tuple(a + b for a, b in zip(self.possible, other.possible, strict=True)),
            self.length + other.length,
            self.reference_length + other.reference_length,
        )


def bleu(
    candidates: Sequence[Words], references: Sequence[Sequence[Words]], *, longest: int = 4
) -> Bleu:
    """Compare translations with what people wrote.

    Args:
        candidates: words of every translation; compare uncased by giving lower case.
        references: for each of them one or several translations that are right.
        longest: n-grams to count (the paper's N).

    Example:
        >>> seven = "the the the the the the the".split()  # the paper's example 2: 2 of 7
        >>> references = ["the cat is on the mat".split(), "there is a cat on the mat".split()]
        >>> bleu([seven], [references], longest=1)
        Bleu(matches=(2,), possible=(7,), length=7, reference_length=7)
    """
    matches, possible = [0] * longest, [0] * longest
    length = reference_length = 0
    for candidate, known in zip(candidates, references, strict=True):
        length += len(candidate)
        reference_length += min(
            (len(reference) for reference in known),
            key=lambda words: (abs(words - len(candidate)), words),
        )
        for n in range(1, longest + 1):
            found = _ngrams(candidate, n)
            allowed: Counter[tuple[Hashable, ...]] = Counter()
            for reference in known:
                allowed |= _ngrams(reference, n)  # the larger count of each
            matches[n - 1] += (found & allowed).total()
            possible[n - 1] += found.total()
    return Bleu(tuple(matches), tuple(possible), length, reference_length)


def _ngrams(words: Words, n: int) -> Counter[tuple[Hashable, ...]]:
    return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))


def edit_distance(hypothesis: Words, reference: Words) -> int:
    """Return the fewest insertions, deletions and substitutions between two sequences (Levenshtein).

    Example:
        >>> edit_distance("kitten", "sitting")
        3

    Cost: a step of Python per pair of elements.
    """
    row = list(range(len(reference) + 1))
    for i, heard in enumerate(hypothesis, start=1):
        diagonal, row[0] = row[0], i
        for j, said in enumerate(reference, start=1):
            substituted = diagonal + (heard != said)
            diagonal, row[j] = row[j], min(substituted, row[j] + 1, row[j - 1] + 1)
    return row[-1]


def error_rate(hypotheses: Sequence[Words], references: Sequence[Words]) -> Mean:
    """Return edits per element of the references: WER of words, CER of characters; may exceed 1.

    Example:
        >>> heard, said = "the cat sat", "a cat sat down"
        >>> error_rate([heard.split()], [said.split()]).value  # one substituted, one missing, of 4
        0.5
    """
    pairs = zip(hypotheses, references, strict=True)
    return Mean(sum(edit_distance(h, r) for h, r in pairs), sum(map(len, references)))


def success_by_path_length(
    successes: Sequence[bool], shortest: Sequence[float], taken: Sequence[float]
) -> Mean:
    """Return SPL, success weighted by path length: the mean of success * shortest / max(taken, shortest).

    Args:
        successes: whether each episode reached its goal.
        shortest: length of the shortest path to it, > 0.
        taken: length of the agent's path.

    Example:
        >>> success_by_path_length([True, True, False], [2.0, 3.0, 1.0], [4.0, 3.0, 1.0]).value
        0.5

    References: Anderson et al., `On Evaluation of Embodied Navigation Agents
    <https://arxiv.org/abs/1807.06757>`_, 2018.
    """
    episodes = zip(successes, shortest, taken, strict=True)
    scores = [reached * best / max(path, best) for reached, best, path in episodes]
    return Mean(sum(scores), len(scores))


def top_hits(logits: Tensor, targets: Tensor, k: int) -> int:
    """Count targets `[n]` among the k classes of largest logits `[n, classes]`.

    Example:
        >>> import torch
        >>> logits = torch.tensor([[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]])
        >>> [top_hits(logits, torch.tensor([1, 0]), k) for k in (1, 2, 3)]
        [0, 1, 2]
    """
    best = logits.topk(min(k, logits.shape[-1]), dim=-1).indices
    return int((best == targets[:, None]).sum())
