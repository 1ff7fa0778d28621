"""What each collective costs: closed forms in the alpha-beta model of the papers.

A message of L bytes takes ``alpha + beta L`` seconds.  **beta is per byte here**; the papers count
words of 4 bytes, and ``Cost.words`` does too.  An entry takes two words: a 32-bit index and a float32
value.  Every message of entries has a header of 8 bytes, which the papers leave out.

    =========== ============================== ==================== =================================
    collective  words (Ok-Topk, Table 1)       messages             function
    =========== ============================== ==================== =================================
    dense       2 n (P - 1) / P                2 log2 P             ``dense``
    allgather   2 k (P - 1)                    log2 P               ``allgather`` ("TopkA")
    oktopk      [2 k, 6 k] (P - 1) / P         2 P + 2 log2 P       ``oktopk``, ``oktopk_paper``
    =========== ============================== ==================== =================================

References: Li & Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP 2022.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparsync.collectives.quantiles import REFINING_BINS, bins_for
from sparsync.wire.base import HEADER_BYTES

__all__ = [
    "COUNT_BYTES",
    "ENTRY_BYTES",
    "WORD_BYTES",
    "Cost",
    "allgather",
    "allgatherv",
    "allreduce",
    "balance",
    "dense",
    "equation_1",
    "equation_2",
    "equation_3",
    "histogram",
    "lower_bound_words",
    "oktopk",
    "oktopk_bound_words",
    "oktopk_paper",
    "ring_allgatherv",
    "split",
]

WORD_BYTES = 4  # the papers' unit
ENTRY_BYTES = 2 * WORD_BYTES  # index and float32 value
COUNT_BYTES = 8  # counts, lengths and boundaries travel as 64-bit integers


@dataclass(frozen=True)
class Cost:
    """What one collective call costs the busiest rank.

    Attributes:
        messages: that a rank sends, one after the other.
        nbytes: volume, the maximum over ranks of max(sent, received).

    Costs of consecutive phases add up; the sum bounds the volume from above, since the busiest rank
    of one phase need not be that of the next.

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
            >>> round(dense(size=1_000_000, world_size=2).seconds(alpha=50e-6, beta=8e-9), 6)
            0.0321
        """
        return self.messages * alpha + self.nbytes * beta


# ---- bounds of the paper ---------------------------------------------------------------------------


def lower_bound_words(k: int, world_size: int) -> float:
    """Theorem 3.1: ``2 k (P - 1) / P`` words, whatever the algorithm, entries stored in COO.

    Example:
        >>> lower_bound_words(k=1000, world_size=4)
        1500.0
    """
    return 2 * k * (world_size - 1) / world_size


def oktopk_bound_words(k: int, world_size: int, *, exchangeable: bool) -> float:
    """Bound what the preset "oktopk" sends or receives per rank on every step, in words.

    ``6 k (P - 1) / P`` (Equation 3) when the ranks' inputs are exchangeable.  On any inputs
    ``6 k - 4 k / P = 2 k + 4 k (P - 1) / P``: Equation 1 without its assumption that a rank owns
    1 / P of what it selected (it can send all k entries), and Equation 2.

    Headers and histograms are counted, but have no term of their own: they fit where
    ``k / P >= 256``.  Not at P = 2 when one rank's values dominate on disjoint supports: 4 k words
    are the bound and the entries alone take all of it.

    Example:
        >>> oktopk_bound_words(1000, 4, exchangeable=True), oktopk_bound_words(1000, 4, exchangeable=False)
        (4500.0, 5000.0)
    """
    if world_size == 1:
        return 0.0
    if exchangeable:
        return 6 * k * (world_size - 1) / world_size
    return 6 * k - 4 * k / world_size


def equation_1(k: int, world_size: int) -> Cost:
    """Split and reduce as published: ``(P - 1) alpha + 2 k (P - 1) / P beta``."""
    return Cost(world_size - 1, WORD_BYTES * lower_bound_words(k, world_size))


def equation_2(k: int, world_size: int) -> Cost:
    """Balance and allgatherv, at most: ``(P + 2 log P) alpha + 4 k (P - 1) / P beta``."""
    entries = 2 * WORD_BYTES * lower_bound_words(k, world_size)
    return Cost(world_size + 2 * _rounds(world_size), entries)


def equation_3(k: int, world_size: int) -> Cost:
    """Ok-Topk as published, at most: ``(2 P + 2 log P) alpha + 6 k (P - 1) / P beta``.

    It leaves out the exact steps (``oktopk_paper(reduced=...)``), headers, and one message: the two
    equations that it adds up have ``2 P - 1 + 2 log P``.

    Example:
        >>> equation_3(k=1000, world_size=8)
        Cost(messages=22, nbytes=21000.0)
    """
    both = equation_1(k, world_size) + equation_2(k, world_size)
    return Cost(both.messages + 1, both.nbytes)


# ---- primitives --------------------------------------------------------------------------------------


def allreduce(elements: int, world_size: int, element_bytes: int = WORD_BYTES) -> Cost:
    """Reduce-scatter and allgather of dense blocks: ``2 ceil(log2 P)`` messages, 2 (P - 1) blocks.

    A block has ``ceil(elements / P)`` elements.

    Example:
        >>> allreduce(elements=6, world_size=4)
        Cost(messages=4, nbytes=48)
    """
    width = -(-elements // world_size)
    return Cost(2 * _rounds(world_size), 2 * (world_size - 1) * width * element_bytes)


def allgatherv(nbytes: float, world_size: int) -> Cost:
    """Allgather of ``nbytes`` from each rank: ``ceil(log2 P)`` messages, ``(P - 1) nbytes``.

    Example:
        >>> allgatherv(nbytes=10, world_size=5)
        Cost(messages=3, nbytes=40)
    """
    return Cost(_rounds(world_size), (world_size - 1) * nbytes)


def ring_allgatherv(nbytes: float, world_size: int) -> Cost:
    """Allgather of ``nbytes`` in all, however uneven, on a ring: ``P - 1`` messages, ``nbytes``.

    Example:
        >>> ring_allgatherv(nbytes=100, world_size=5)
        Cost(messages=4, nbytes=100)
    """
    return Cost(world_size - 1, nbytes if world_size > 1 else 0)


def histogram(k: int, world_size: int, *, refinements: int = 0) -> Cost:
    """Allreduce of ``clamp(k / 16, 32, 1024)`` bins and two outer ones, then finer ones of 64.

    Args:
        k: number of entries asked for.
        world_size: number of ranks P.
        refinements: how often the marginal bin is divided again (usually 0 or 1).
    """
    cost = allreduce(bins_for(k) + 2, world_size)
    for _ in range(refinements):
        cost += allreduce(REFINING_BINS, world_size)
    return cost


def split(k: int, world_size: int) -> Cost:
    """Split and reduce (Equation 1) with its headers; regions hold equally many entries.

    Example:
        >>> split(k=1000, world_size=4)  # 3 messages of 250 entries
        Cost(messages=3, nbytes=6024.0)
    """
    peers = world_size - 1
    return Cost(peers, peers * (HEADER_BYTES + ENTRY_BYTES * k / world_size))


def balance(k: int, world_size: int) -> Cost:
    """Balance, the extreme case of Equation 2: one rank holds all k entries and hands them over.

    It keeps none, since it knows them already: ``2 k`` words rather than ``2 k (P - 1) / P``.
    """
    peers = world_size - 1
    return Cost(peers, peers * HEADER_BYTES + (ENTRY_BYTES * k if peers else 0))


# ---- collectives -------------------------------------------------------------------------------------


def dense(size: int, world_size: int, element_bytes: int = WORD_BYTES) -> Cost:
    """Table 1, "Dense": ``2 n (P - 1) / P`` words, ``2 log2 P`` messages.

    Example:
        >>> dense(size=1000, world_size=4).words
        1500.0
    """
    return allreduce(size, world_size, element_bytes)


def allgather(k: int, world_size: int) -> Cost:
    """Table 1, "TopkA": ``2 k (P - 1)`` words and P - 1 headers, ``log2 P`` messages.

    Example:
        >>> allgather(k=1000, world_size=4).words
        6006.0
    """
    return allgatherv(HEADER_BYTES + ENTRY_BYTES * k, world_size)


def oktopk(
    k: int,
    world_size: int,
    *,
    repartition: bool = False,
    balanced: bool = False,
    refinements: int = 0,
) -> Cost:
    """Preset "oktopk" on one step, when regions hold equally many entries of every rank.

    Split (Equation 1), a histogram for the threshold, two counts per rank, and the allgatherv of
    Equation 2.  Bounds for other inputs: ``oktopk_bound_words``.

    Args:
        k: number of entries asked for; the cap is 1.
        world_size: number of ranks P.
        repartition: the step cuts regions anew: one more histogram.
        balanced: the step balances: one rank held everything.
        refinements: of the histogram for the threshold.

    Example:
        >>> round(oktopk(k=10_000, world_size=8).words_per(10_000), 2)
        3.62
    """
    cost = split(k, world_size)
    cost += histogram(k, world_size, refinements=refinements)
    cost += allgatherv(2 * COUNT_BYTES, world_size)
    if repartition:
        cost += histogram(k, world_size)
    if balanced:
        cost += balance(k, world_size)
    return cost + allgatherv(HEADER_BYTES + ENTRY_BYTES * k / world_size, world_size)


def oktopk_paper(
    selected: int,
    kept: int,
    world_size: int,
    *,
    reduced: int | None = None,
    repartition: bool = False,
    balanced: bool = False,
) -> Cost:
    """Preset "oktopk-paper" on one step, when regions hold equally many entries.

    Args:
        selected: entries that each rank selected (above a reused threshold: not k).
        kept: entries of the total.
        world_size: number of ranks P.
        reduced: on exact steps, entries after the reduction, over all regions: at most
            ``min(selected * P, n)``; they are allgathered for the threshold (Algorithm 1, line 10),
            which Equation 3 leaves out.  None: the threshold is reused.
        repartition: the step averages boundaries: an allreduce of P - 1 integers (section 3.1.1).
        balanced: the step balances: one rank held everything.

    Example:
        >>> reused = oktopk_paper(1000, 1000, world_size=8).words_per(1000)
        >>> exact = oktopk_paper(1000, 1000, world_size=8, reduced=8000).words_per(1000)
        >>> round(reused, 2), round(exact, 2)  # Equation 3 promises at most 5.25
        (3.54, 17.56)
    """
    cost = split(selected, world_size) + allgatherv(COUNT_BYTES, world_size)
    if repartition:
        cost += allreduce(world_size - 1, world_size, COUNT_BYTES)
    if reduced is not None:
        cost += allgatherv(HEADER_BYTES + ENTRY_BYTES * reduced / world_size, world_size)
    if balanced:
        cost += balance(kept, world_size)
    return cost + allgatherv(HEADER_BYTES + ENTRY_BYTES * kept / world_size, world_size)


def _rounds(world_size: int) -> int:
    """Return ``ceil(log2 P)``."""
    return (world_size - 1).bit_length()
