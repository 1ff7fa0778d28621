"""Table 1 of Ok-Topk: six allreduces under the plain latency-bandwidth model.

A message of L words of 4 bytes takes ``alpha + beta L`` seconds.  In this module beta is seconds per
**word**, as in the paper.  Selection, packing and headers cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from sparsync.errors import require

__all__ = ["TABLE_1", "Interval", "PublishedCost"]

Interval = tuple[float, float]
"""A lower and an upper bound; equal if the paper states one number."""


@dataclass(frozen=True)
class PublishedCost:
    """A row of the table.

    Attributes:
        title: the paper's name of the algorithm.
        bandwidth: the bandwidth term in words, as text.
        latency: the latency term in messages, as text.
        words: the bandwidth term as a function of n, k and P.
        messages: the latency term as a function of P; log P is ``ceil(log2 P)``, which matches the paper
            for powers of two.

    Example:
        >>> row = TABLE_1["oktopk"]
        >>> row.latency, row.messages(16), row.words(10**6, 10**4, 16)
        ('2 P + 2 log P', 40, (18750.0, 56250.0))
    """

    title: str
    bandwidth: str
    latency: str
    words: Callable[[int, int, int], Interval]
    messages: Callable[[int], int]

    def seconds(self, size: int, k: int, world_size: int, alpha: float, beta: float) -> Interval:
        """Return the time of one allreduce; zero for a single rank.

        Args:
            size: n, elements of the gradient.
            k: number of entries selected.
            world_size: P.
            alpha: seconds per message.
            beta: seconds per word of 4 bytes.

        Raises:
            ConfigurationError: a number is out of range.

        Example:
            >>> least, most = TABLE_1["oktopk"].seconds(10**6, 10**4, 16, alpha=1e-6, beta=1e-9)
            >>> round(1e6 * least, 2), round(1e6 * most, 2)
            (58.75, 96.25)
        """
        good = 0 <= k <= size and world_size >= 1 and alpha >= 0 and beta >= 0
        given = f"n = {size}, k = {k}, P = {world_size}, alpha = {alpha}, beta = {beta}"
        require(good, f"Table 1: {given}; give 0 <= k <= n, P >= 1 and seconds >= 0")
        if world_size == 1:
            return 0.0, 0.0
        late = alpha * self.messages(world_size)
        least, most = self.words(size, k, world_size)
        return late + beta * least, late + beta * most


def _log(ranks: int) -> int:
    return (ranks - 1).bit_length()


def _one(words: Callable[[int, int, int], float]) -> Callable[[int, int, int], Interval]:
    """Turn a term with a single value into a term with an interval: both ends are this value."""
    return lambda n, k, p: (float(words(n, k, p)),) * 2


TABLE_1: Final[Mapping[str, PublishedCost]] = MappingProxyType(
    {
        "dense": PublishedCost(
            "Dense",
            "2 n (P - 1) / P",
            "2 log P",
            _one(lambda n, k, p: 2 * n * (p - 1) / p),
            lambda p: 2 * _log(p),
        ),
        "allgather": PublishedCost(
            "TopkA", "2 k (P - 1)", "log P", _one(lambda n, k, p: 2 * k * (p - 1)), _log
        ),
        "topkdsa": PublishedCost(
            "TopkDSA",
            "[4 k (P - 1) / P, (2 k + n) (P - 1) / P]",
            "P + 2 log P",
            lambda n, k, p: (4 * k * (p - 1) / p, (2 * k + n) * (p - 1) / p),
            lambda p: p + 2 * _log(p),
        ),
        "gtopk": PublishedCost(
            "gTopk",
            "4 k log P",
            "2 log P",
            _one(lambda n, k, p: 4 * k * _log(p)),
            lambda p: 2 * _log(p),
        ),
        "gaussiank": PublishedCost(
            "Gaussiank",
            "2 k (P - 1)",
            "2 log P",
            _one(lambda n, k, p: 2 * k * (p - 1)),
            lambda p: 2 * _log(p),
        ),
        "oktopk": PublishedCost(
            "Ok-Topk",
            "[2 k (P - 1) / P, 6 k (P - 1) / P]",
            "2 P + 2 log P",
            lambda n, k, p: (2 * k * (p - 1) / p, 6 * k * (p - 1) / p),
            lambda p: 2 * p + 2 * _log(p),
        ),
    }
)
"""The rows in the paper's order, keyed by the names of the corresponding presets."""
