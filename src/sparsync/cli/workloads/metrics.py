"""Metrics as sums that add up over ranks: means, perplexity, top-k hits."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

__all__ = ["Mean", "Metric", "Perplexity", "top_hits"]


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
        count: of how many.

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
