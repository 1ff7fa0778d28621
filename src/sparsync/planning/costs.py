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
    budgeted    < 2 k (P - 1) / P              2 (P - 1)            ``budgeted`` (ours)
    halving     about 1.6 k (P - 1) / P        2 log2 P             ``halving`` (ours)
    =========== ============================== ==================== =================================

Those of SparCML, the rings and gTop-k: ``sparcml_costs``.

References: Li & Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP 2022.
"""

from __future__ import annotations

from sparsync.collectives.quantiles import REFINING_BINS, bins_for
from sparsync.planning.cost import (
    COUNT_BYTES,
    ENTRY_BYTES,
    WORD_BYTES,
    Cost,
    lower_bound_words,
)
from sparsync.planning.packed_costs import budgeted, halving
from sparsync.wire.base import HEADER_BYTES

__all__ = [
    "COUNT_BYTES",
    "ENTRY_BYTES",
    "WORD_BYTES",
    "Cost",
    "allgather",
    "allgatherv",
    "allreduce",
    "balance_and_allgatherv",
    "budgeted",
    "dense",
    "equation_3",
    "halving",
    "histogram",
    "lower_bound_words",
    "oktopk",
    "oktopk_bound_words",
    "oktopk_paper",
    "split",
]


def oktopk_bound_words(k: int, world_size: int, *, exchangeable: bool) -> float:
    """Bound what the preset "oktopk" sends or receives per rank on every step, in words.

    ``6 k (P - 1) / P`` (Equation 3) when the ranks' inputs are exchangeable.  On any inputs
    ``6 k - 4 k / P = 2 k + 4 k (P - 1) / P``: Equation 1 without its assumption that a rank owns
    1 / P of what it selected (it can send all k entries), and Equation 2.

    Domain: supports that lie where they were on the step before (the paper: for 64 steps).  Headers
    and histograms have no term; they fit where ``k / P >= 256``, except where the entries alone take
    all 4 k words: P = 2, disjoint supports, one rank's values dominating.

    Example:
        >>> [oktopk_bound_words(1000, 4, exchangeable=e) for e in (True, False)]
        [4500.0, 5000.0]
    """
    if world_size == 1:
        return 0.0
    if exchangeable:
        return 6 * k * (world_size - 1) / world_size
    return 6 * k - 4 * k / world_size


def equation_3(k: int, world_size: int) -> Cost:
    """Ok-Topk as published, at most: ``(2 P + 2 log P) alpha + 6 k (P - 1) / P beta``.

    It leaves out headers, histograms and the exact steps (``oktopk_paper(reduced=...)``).

    Example:
        >>> equation_3(k=1000, world_size=8)
        Cost(messages=22, nbytes=21000.0)
    """
    words = 3 * lower_bound_words(k, world_size)
    return Cost(2 * world_size + 2 * _rounds(world_size), WORD_BYTES * words)


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
    """Split and reduce, Equation 1: ``(P - 1) alpha + 2 k (P - 1) / P beta``, and P - 1 headers.

    Supposes regions that hold equally many of every rank's entries.

    Example:
        >>> split(k=1000, world_size=4)  # 3 messages of 250 entries
        Cost(messages=3, nbytes=6024.0)
    """
    peers = world_size - 1
    return Cost(peers, peers * (HEADER_BYTES + ENTRY_BYTES * k / world_size))


def balance_and_allgatherv(k: int, world_size: int, *, balanced: bool = False) -> Cost:
    """Balance and allgatherv, Equation 2: at most ``(P + 2 log P) alpha + 4 k (P - 1) / P beta``.

    Even counts: an allgatherv of ``2 k (P - 1) / P`` words.  ``balanced``, the extreme case: one
    rank holds all k entries.  It hands them over, keeps none (it knows them) and forwards none; the
    others exchange them and return them to it: nobody sends or receives more than ``2 k`` words.

    Example:
        >>> [balance_and_allgatherv(1000, 8, balanced=b).words for b in (False, True)]
        [1764.0, 2016.0]
    """
    if balanced and world_size > 1:
        others = world_size - 1
        return Cost(others + 1 + _rounds(others), HEADER_BYTES * world_size + ENTRY_BYTES * k)
    return allgatherv(HEADER_BYTES + ENTRY_BYTES * k / world_size, world_size)


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

    Split (Equation 1), a histogram for the threshold, three counts per rank, balance and allgatherv
    (Equation 2).  Bounds for other inputs: ``oktopk_bound_words``.

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
    cost += allgatherv(3 * COUNT_BYTES, world_size)
    if repartition:
        cost += histogram(k, world_size)
    return cost + balance_and_allgatherv(k, world_size, balanced=balanced)


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
        (3.56, 17.57)
    """
    cost = split(selected, world_size) + allgatherv(2 * COUNT_BYTES, world_size)
    if repartition:
        cost += allreduce(world_size - 1, world_size, COUNT_BYTES)
    if reduced is not None:
        cost += allgatherv(HEADER_BYTES + ENTRY_BYTES * reduced / world_size, world_size)
    return cost + balance_and_allgatherv(kept, world_size, balanced=balanced)


def _rounds(world_size: int) -> int:
    """Return ``ceil(log2 P)``."""
    return (world_size - 1).bit_length()
