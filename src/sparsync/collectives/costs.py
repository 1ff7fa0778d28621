"""The collectives' cost model: the job, the cost for the busiest rank, and lower bounds.

A message of L bytes takes ``alpha + beta L`` seconds.  **beta is per byte**; the papers, and
``Cost.words``, count words of 4 bytes.  A coo entry takes two words: a 32-bit index and a float32 value.
Every message of entries has a header, which the papers leave out.

References: Li & Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP 2022;
Renggli et al., SparCML, SC 2019, section 5.3 and appendix B.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

__all__ = [
    "COUNT_BYTES",
    "ENTRY_BYTES",
    "WORD_BYTES",
    "Cost",
    "Job",
    "Result",
    "allgatherv",
    "allreduce",
    "expected_union",
    "lemma_5_1_words",
    "lemma_5_2_speedup",
    "lower_bound_words",
    "sum_bound_words",
]

WORD_BYTES = 4  # the papers' unit
ENTRY_BYTES = 2 * WORD_BYTES  # index and float32 value
COUNT_BYTES = 8  # counts, lengths and boundaries are sent as 64-bit integers

Result = Literal["top-k", "sum", "whole"]
"""A collective's total: the k largest entries of the sum, or a sum of sparse or of whole vectors."""


class Job(NamedTuple):
    """An exchange in which each of P ranks contributes k of n entries.

    ``result`` is the number of entries in the sum over all ranks: k if all ranks select the same
    elements, k P if no two ranks select the same one.  If it is unknown (None), the model assumes that
    every rank selects random elements, independently of the others.  The sum has more entries than that
    only if ranks avoid one another's elements.

    Example:
        >>> Job(1000, 10, 4, result=10).union(2), Job(1000, 10, 4, result=40).union(2)
        (10.0, 20.0)
    """

    size: int
    k: float
    world_size: int
    result: float | None = None

    @property
    def share(self) -> float:
        """(P - 1) / P: the fraction of a vector that other ranks own."""
        return (self.world_size - 1) / self.world_size

    @property
    def rounds(self) -> int:
        """The number of rounds of a logarithmic collective, ``ceil(log2 P)``."""
        return (self.world_size - 1).bit_length()

    @property
    def summed(self) -> float:
        """The number of entries in the sum over all ranks."""
        return self.union(self.world_size)

    def union(self, ranks: int) -> float:
        """Return the expected number of entries in the sum over ``ranks`` of the P ranks.

        If ``result`` is known, the sum of j vectors is taken to have ``k j^a`` entries, where a is such
        that ``k P^a`` is ``result``.
        """
        if self.result is None:
            return expected_union(self.k, self.size, ranks)
        k = max(self.k, 1)
        growth = max(self.result, k) / k
        # growth^(log j / log P) is j^a
        part = math.log2(ranks) / math.log2(self.world_size) if ranks > 1 else 0.0
        return min(self.k * math.pow(growth, part), float(self.size))


@dataclass(frozen=True)
class Cost:
    """The busiest rank's messages, bytes and work in one call of a collective, or in one phase of it.

    The costs of phases can be added.  The sum is an upper bound, because the busiest rank may not be the
    same in all phases.

    Attributes:
        messages: number of messages that a rank sends in sequence.
        nbytes: volume, the maximum over ranks of max(sent, received).
        relayed: bytes in addition to ``nbytes`` that other ranks exchange while a rank waits for them.
        encoded: number of entries packed.
        decoded: number of entries unpacked and merged.
        dense_bytes: bytes of dense vectors added or copied into place.
        turns: number of times that a rank works and then waits for other ranks' entries.
        together: number of messages whose latency overlaps with the latency of a message sent at the
            same time.

    Example:
        >>> (Cost(2, 800.0) + Cost(1, 200.0)).words
        250.0
    """

    messages: float
    nbytes: float
    relayed: float = 0.0
    encoded: float = 0.0
    decoded: float = 0.0
    dense_bytes: float = 0.0
    turns: float = 0.0
    together: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def times(self, factor: float) -> Cost:
        """Return the cost of ``factor`` calls, e.g. 1 / 64 per step for one call in 64 steps."""
        return Cost(*(factor * getattr(self, f.name) for f in fields(self)))

    @property
    def words(self) -> float:
        """The volume in words, the papers' unit of 4 bytes."""
        return self.nbytes / WORD_BYTES

    def seconds(self, alpha: float, beta: float, distance: float = 0.0) -> float:
        """Return the seconds on the links: alpha per message, beta per byte (per word in the papers).

        ``distance`` is the part of alpha that is counted only once for messages sent together.
        """
        latency = self.messages * alpha - self.together * distance
        return latency + (self.nbytes + self.relayed) * beta


def allreduce(elements: int, world_size: int, element_bytes: int = WORD_BYTES) -> Cost:
    """Return the cost of an allreduce: ``2 ceil(log2 P)`` messages, 2 (P - 1) dense blocks.

    A block has ``ceil(elements / P)`` elements.
    """
    # assume that every rank sends the widest block, as the busiest one does
    width = -(-elements // world_size)
    rounds = (world_size - 1).bit_length()
    return Cost(2 * rounds, 2 * (world_size - 1) * width * element_bytes)


def allgatherv(nbytes: float, world_size: int) -> Cost:
    """Return the cost of an allgather: ``ceil(log2 P)`` messages, ``(P - 1) nbytes``."""
    return Cost((world_size - 1).bit_length(), (world_size - 1) * nbytes)


def expected_union(k: float, size: int, ranks: int) -> float:
    """Return E[K], the expected size of the union of P uniformly random supports of k of N indices.

    This is ``N sum_i (-1)^(i-1) C(P, i) (k / N)^i``, which equals ``N (1 - (1 - k / N)^P)`` (SparCML,
    appendix B.1).

    Example:
        >>> round(expected_union(10, 512, 2), 2), expected_union(512, 512, 3)
        (19.8, 512.0)
    """
    if size == 0 or k <= 0:
        return 0.0
    if k >= size:
        return float(size)
    # at small densities, 1 - (1 - k / N)^P would suffer from cancellation.  So would the sum in the
    # paper, because its large terms alternate in sign.
    return -size * math.expm1(ranks * math.log1p(-k / size))


# ---- lower bounds -----------------------------------------------------------------------------------
# Theorem 3.1 counts two words of 4 bytes per entry (coo); Lemma 5.1 counts only one, for the value.
# Lemma 5.2 counts two words per entry and one per element of a dense message.  A format with shorter
# indices or values, such as packed, may need fewer words than a bound.


def lower_bound_words(k: float, world_size: int) -> float:
    """Return the lower bound of Ok-Topk's Theorem 3.1 for entries in COO: ``2 k (P - 1) / P`` words."""
    return 2 * k * (world_size - 1) / world_size


def lemma_5_1_words(k: float, world_size: int, *, disjoint: bool) -> float:
    """Return SparCML's Lemma 5.1, a lower bound on any sparse allreduce's words; only values count.

    It is ``(P - 1) k`` for disjoint supports, and ``2 k (P - 1) / P`` for equal ones.
    """
    return float((world_size - 1) * k) if disjoint else lower_bound_words(k, world_size)


def lemma_5_2_speedup(index_bytes: int = 4, value_bytes: int = WORD_BYTES) -> float:
    """Return ``2 / kappa``, the largest speedup by sparsity alone (SparCML, after Lemma 5.2).

    This limit holds for sums that become dense.  kappa is delta / N, the density above which a dense
    message is shorter than a sparse one: ``value_bytes / (index_bytes + value_bytes)``.

    Example:
        >>> lemma_5_2_speedup()
        4.0
    """
    return 2 * (index_bytes + value_bytes) / value_bytes


def sum_bound_words(job: Job) -> float:
    """Return a lower bound on the words per rank of any lossless sum (SparCML, Lemmas 5.1 and 5.2).

    A sum of K entries takes ``k + K (P - 2) / P`` values, averaged over ranks: an index that c ranks
    hold takes c - 1 transfers to be summed and P - 1 to be distributed.  The two cases of Lemma 5.1 are
    K = k and K = k P; the paper states no bound for values of K in between.

    If the sum is dense, the bound is delta words, including the indices of entries sent in COO.  Here
    delta is the number of entries above which a vector is dense (Lemma 5.2).

    Example:
        >>> [sum_bound_words(Job(10**6, 1000, 8, result=K)) for K in (8000, 1000)]
        [7000.0, 1750.0]
        >>> sum_bound_words(Job(10**6, 300_000, 8))
        500000.0
    """
    # delta = N i / (c + i) (section 5.1); with 4 bytes per index (c) and per value (i), this is half of
    # the elements
    limit = job.size * WORD_BYTES // ENTRY_BYTES
    if job.summed > limit:
        return float(limit) if job.world_size > 1 else 0.0
    return job.k + job.summed * (job.world_size - 2) / job.world_size
