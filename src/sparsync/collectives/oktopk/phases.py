"""Closed forms of Ok-Topk's phases, and the bounds of the whole (Equations 1 to 3).

Entries are in coo.  ``OkTopk.cost`` adds up what its settings use.

References: Li & Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP 2022.
"""

from __future__ import annotations

from sparsync.collectives.costs import (
    COUNT_BYTES,
    ENTRY_BYTES,
    WORD_BYTES,
    Cost,
    allgatherv,
    allreduce,
    lower_bound_words,
)
from sparsync.collectives.oktopk.quantiles import REFINING_BINS, bins_for
from sparsync.wire.base import HEADER_BYTES

__all__ = ["averaged_cuts", "bound_words", "counts", "equation_3", "gather", "histogram", "split"]


def bound_words(k: float, world_size: int, *, exchangeable: bool) -> float:
    """Bound what the preset "oktopk" sends or receives per rank on every step, in words.

    ``6 k (P - 1) / P`` (Equation 3) when the ranks' inputs are exchangeable.  On any inputs
    ``6 k - 4 k / P = 2 k + 4 k (P - 1) / P``: Equation 1 without its assumption that a rank owns
    1 / P of what it selected (it can send all k entries), and Equation 2.

    Domain: supports that lie where they were on the step before (the paper: for 64 steps).  Headers
    and histograms have no term; they fit where ``k / P >= 256``, except where the entries alone take
    all 4 k words: P = 2, disjoint supports, one rank's values dominating.

    Example:
        >>> [bound_words(1000, 4, exchangeable=e) for e in (True, False)]
        [4500.0, 5000.0]
    """
    if world_size == 1:
        return 0.0
    if exchangeable:
        return 6 * k * (world_size - 1) / world_size
    return 6 * k - 4 * k / world_size


def equation_3(k: float, world_size: int) -> Cost:
    """Ok-Topk as published, at most: ``(2 P + 2 log P) alpha + 6 k (P - 1) / P beta``.

    It leaves out headers, histograms and the exact steps, which allgather all reduced entries.

    Example:
        >>> cost = equation_3(k=1000, world_size=8)
        >>> cost.messages, cost.words
        (22, 5250.0)
    """
    words = 3 * lower_bound_words(k, world_size)
    return Cost(2 * world_size + 2 * (world_size - 1).bit_length(), WORD_BYTES * words)


def split(k: float, world_size: int) -> Cost:
    """Split and reduce, Equation 1: ``(P - 1) alpha + 2 k (P - 1) / P beta``, and P - 1 headers.

    Supposes regions that hold equally many of every rank's entries.

    Example:
        >>> cost = split(k=1000, world_size=4)  # 3 messages of 250 entries
        >>> cost.messages, cost.nbytes
        (3, 6024.0)
    """
    peers = world_size - 1
    return Cost(peers, peers * (HEADER_BYTES + ENTRY_BYTES * k / world_size))


def gather(k: float, world_size: int, *, balanced: bool = False) -> Cost:
    """Balance and allgatherv, Equation 2: at most ``(P + 2 log P) alpha + 4 k (P - 1) / P beta``.

    Even counts: an allgatherv of ``2 k (P - 1) / P`` words.  ``balanced``, the extreme case: one
    rank holds all k entries.  It hands them over, keeps none (it knows them) and forwards none; the
    others exchange them and return them to it: nobody sends or receives more than ``2 k`` words.

    Example:
        >>> [gather(1000, 8, balanced=b).words for b in (False, True)]
        [1764.0, 2016.0]
    """
    if balanced and world_size > 1:
        others = world_size - 1
        rounds = (others - 1).bit_length()
        return Cost(others + 1 + rounds, HEADER_BYTES * world_size + ENTRY_BYTES * k)
    return allgatherv(HEADER_BYTES + ENTRY_BYTES * k / world_size, world_size)


def histogram(k: int, world_size: int, *, refinements: int = 0) -> Cost:
    """Allreduce of ``clamp(k / 16, 32, 1024)`` bins and two outer ones, then finer ones of 64.

    Args:
        k: number of entries asked for.
        world_size: number of ranks P.
        refinements: how often the marginal bin is divided again (usually 0 or 1).
    """
    finer = allreduce(REFINING_BINS, world_size).times(refinements)
    return allreduce(bins_for(k) + 2, world_size) + finer


def counts(numbers: int, world_size: int) -> Cost:
    """Allgather of some integers per rank: what it keeps, and how full its region was."""
    return allgatherv(numbers * COUNT_BYTES, world_size)


def averaged_cuts(world_size: int) -> Cost:
    """Allreduce of P - 1 boundaries (section 3.1.1)."""
    return allreduce(world_size - 1, world_size, COUNT_BYTES)
