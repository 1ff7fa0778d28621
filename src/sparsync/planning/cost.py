"""The unit of account of the cost model: messages and bytes of the busiest rank."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["COUNT_BYTES", "ENTRY_BYTES", "WORD_BYTES", "Cost", "lower_bound_words"]

WORD_BYTES = 4  # the papers' unit
ENTRY_BYTES = 2 * WORD_BYTES  # index and float32 value
COUNT_BYTES = 8  # counts, lengths and boundaries travel as 64-bit integers


@dataclass(frozen=True)
class Cost:
    """What one collective call costs the busiest rank.

    Attributes:
        messages: that a rank sends, one after the other.
        nbytes: volume, the maximum over ranks of max(sent, received).

    Phases add up; the sum is an upper bound, for the busiest rank may change from phase to phase.

    Example:
        >>> (Cost(2, 800.0) + Cost(1, 200.0)).words
        250.0
    """

    messages: float
    nbytes: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.messages + other.messages, self.nbytes + other.nbytes)

    @property
    def words(self) -> float:
        """Volume in the papers' unit of 4 bytes."""
        return self.nbytes / WORD_BYTES

    def words_per(self, k: int) -> float:
        """Volume in words per requested entry; 0 when none is requested."""
        return self.words / k if k else 0.0

    def seconds(self, alpha: float, beta: float) -> float:
        """Return ``messages * alpha + nbytes * beta``.

        Args:
            alpha: seconds per message.
            beta: seconds per byte (the papers: per word).

        Example:
            >>> round(Cost(2, 4_000_000).seconds(alpha=50e-6, beta=8e-9), 6)
            0.0321
        """
        return self.messages * alpha + self.nbytes * beta


def lower_bound_words(k: int, world_size: int) -> float:
    """Theorem 3.1: ``2 k (P - 1) / P`` words, whatever the algorithm, entries stored in COO.

    Example:
        >>> lower_bound_words(k=1000, world_size=4)
        1500.0
    """
    return 2 * k * (world_size - 1) / world_size
