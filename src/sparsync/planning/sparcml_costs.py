"""What the collectives of SparCML and its kin cost, and what none of them can beat.

Messages of entries are coo: 8 bytes of header, 8 per float32 entry (the papers' beta_s, two words).

    ================== ============================ ======================= =======================
    collective         words, between               and                     messages
    ================== ============================ ======================= =======================
    recursive doubling 2 k log2 P                   2 k (P - 1)             log2 P
    split + allgather  4 k (P - 1) / P              2 k P                   P - 1 + log2 P
    dynamic            n (P - 1) / P                2 k + n (P - 1) / P     P - 1 + log2 P
    ring               4 k (P - 1) / P              2 k (P - 1) + (P - 1) k 2 (P - 1)
    gTop-k             4 k log2 P                   the same                2 log2 P
    ================== ============================ ======================= =======================

The papers' latencies of split and allgather differ: SparCML counts P - 1 + log2 P messages, Ok-Topk's
Table 1 P + 2 log2 P; this library sends the former (``tests/claims/test_sparcml.py``).

References: Renggli et al., SparCML, SC 2019, section 5.3; Ok-Topk, Table 1.
"""

from __future__ import annotations

from typing import Literal

from sparsync.collectives.density import expected_union, most_in_union
from sparsync.errors import ConfigurationError
from sparsync.planning.cost import ENTRY_BYTES, WORD_BYTES, Cost
from sparsync.streams import delta
from sparsync.transports.primitives import rounds
from sparsync.wire.base import HEADER_BYTES, Codec

__all__ = [
    "Overlap",
    "dynamic",
    "gtopk",
    "lemma_5_1_words",
    "lemma_5_2_words",
    "recursive_doubling",
    "ring",
    "split_allgather",
    "sum_bound_words",
    "union",
]

Overlap = Literal["none", "full", "uniform"]


def union(k: int, size: int, ranks: int, overlap: Overlap) -> float:
    """Return the entries of a sum of ``ranks`` vectors of k entries.

    Args:
        k: entries of each.
        size: number of elements n.
        ranks: number of summands.
        overlap: of the supports: "full" (k), "none" (k times ranks, the most), "uniform" (what
            random supports give, appendix B).

    Example:
        >>> [union(10, 1000, 4, overlap) for overlap in ("full", "none")]
        [10.0, 40.0]
    """
    if overlap == "full":
        return float(min(k, size))
    if overlap == "none":
        return float(most_in_union(k, size, ranks))
    if overlap == "uniform":
        return expected_union(k, size, ranks)
    raise ConfigurationError(f"unknown overlap {overlap!r}; choose none, full or uniform")


def recursive_doubling(k: int, size: int, world_size: int, overlap: Overlap = "uniform") -> Cost:
    """SSAR_Recursive_double: ``log2 P`` messages; k entries in every round, or twice as many each.

    Where P is no power of two, P - 2^m ranks first hand over what they have and get the result at
    the end: one message more, with the whole result.  A message is dense from where that is shorter.

    Example:
        >>> recursive_doubling(1000, 10**6, 8, "full").words  # 3 rounds of 1000 entries
        6006.0
        >>> recursive_doubling(1000, 10**6, 8, "none").words  # 1000, 2000, 4000
        14006.0
    """
    doublings = world_size.bit_length() - 1
    folded = world_size != 1 << doublings
    held = [min(2**i * (1 + folded), world_size) for i in range(doublings)]
    entries = [union(k, size, ranks, overlap) for ranks in held]
    if folded:
        entries.append(union(k, size, world_size, overlap))
    nbytes = sum(HEADER_BYTES + _body(e, size) for e in entries)
    return Cost(doublings + folded, nbytes)


def split_allgather(k: int, size: int, world_size: int, overlap: Overlap = "uniform") -> Cost:
    """SSAR_Split_allgather: ``P - 1 + log2 P`` messages, entries spread evenly over the regions.

    Example:
        >>> split_allgather(1000, 10**6, 8, "full").words  # 4 k (P - 1) / P, and 14 headers
        3528.0
    """
    peers = world_size - 1
    split = peers * (HEADER_BYTES + ENTRY_BYTES * k / world_size)
    result = union(k, size, world_size, overlap)
    gather = peers * (HEADER_BYTES + ENTRY_BYTES * result / world_size)
    return Cost(peers + _rounds(world_size), split + gather)


def dynamic(
    k: int,
    size: int,
    world_size: int,
    overlap: Overlap = "uniform",
    *,
    dense_bytes_per_element: float = WORD_BYTES,
    factor: float = 1.0,
    always_dense: bool = False,
    local: Codec | None = None,
) -> Cost:
    """DSAR_Split_allgather and TopkDSA: as ``split_allgather``, dense from where that is shorter.

    Args:
        k: entries of each rank.
        size: number of elements n.
        world_size: number of ranks P.
        overlap: of the supports.
        dense_bytes_per_element: 4 for float32, 0.5 for 4 bits (and the blocks' scales).
        factor: of the dense switch.
        always_dense: the second phase is dense whatever came out of the first.
        local: wire format of the first phase; None: coo.

    Example:
        >>> dynamic(100_000, 10**6, 8, "none").words < 2 * 100_000 + 10**6 * 7 / 8
        True
    """
    peers = world_size - 1
    result, whole = union(k, size, world_size, overlap), dense_bytes_per_element * size
    switches = always_dense or ENTRY_BYTES * result > factor * whole
    piece = HEADER_BYTES + ENTRY_BYTES * k / world_size
    if local is not None:
        piece = local.nbytes(round(k / world_size), -(-size // world_size))
    body = whole if switches else ENTRY_BYTES * result
    gather = peers * (HEADER_BYTES + body / world_size)
    return Cost(peers + _rounds(world_size), peers * piece + gather)


def ring(
    k: int, size: int, world_size: int, overlap: Overlap = "uniform", *, dense: bool = False
) -> Cost:
    """Ring reduce-scatter and allgather: ``2 (P - 1)`` messages, each to the next rank.

    A block is dense from where that is shorter.

    Args:
        k: entries of each rank.
        size: number of elements n.
        world_size: number of ranks P.
        overlap: of the supports.
        dense: blocks are dense from the start: 2 n (P - 1) / P words.

    Example:
        >>> ring(1000, 8_000, 8, dense=True).words  # 14 blocks of 1000 words, and headers
        14028.0
    """
    peers = world_size - 1
    if dense:
        block = HEADER_BYTES + WORD_BYTES * (-(-size // world_size))
        return Cost(2 * peers, 2 * peers * block)
    grown = sum(_body(union(k, size, i, overlap), size) for i in range(1, world_size))
    grown += peers * _body(union(k, size, world_size, overlap), size)
    return Cost(2 * peers, 2 * peers * HEADER_BYTES + grown / world_size)


def gtopk(k: int, world_size: int) -> Cost:
    """gTop-k: ``2 log2 P`` messages one after the other, ``4 k log2 P`` words.

    Reduction tree, then broadcast tree.  The root receives the first half and sends the second: the
    words are what passes in sequence, and twice what any rank sends or receives.

    Example:
        >>> gtopk(1000, 8).words
        12012.0
    """
    doublings = _rounds(world_size)
    return Cost(2 * doublings, 2 * doublings * (HEADER_BYTES + ENTRY_BYTES * k))


def lemma_5_1_words(k: int, world_size: int, *, disjoint: bool) -> float:
    """Lemma 5.1: no sparse allreduce moves fewer words, in values alone (beta_d).

    ``(P - 1) k`` where supports are disjoint, ``2 k (P - 1) / P`` where they are equal.

    Example:
        >>> [lemma_5_1_words(1000, 8, disjoint=d) for d in (True, False)]
        [7000.0, 1750.0]
    """
    peers = world_size - 1
    return float(peers * k) if disjoint else 2 * peers * k / world_size


def lemma_5_2_words(limit: int, world_size: int) -> float:
    """Lemma 5.2: once the result is dense, no algorithm needs less than delta words; P = 1: none.

    Args:
        limit: delta, the entries from which a vector is dense.
        world_size: number of ranks P.
    """
    return float(limit) if world_size > 1 else 0.0


def sum_bound_words(k: int, size: int, world_size: int, overlap: Overlap = "uniform") -> float:
    """Lemmas 5.1 and 5.2: no lossless sum moves fewer words per rank, in values alone.

    ``k + K (P - 2) / P`` for a sum of K entries, on the mean of ranks: an index that c ranks hold
    takes c - 1 transfers to be summed and P - 1 to be known.  Those are both ends of Lemma 5.1, K = k
    and K = k P, and what lies between (ours).  Delta from where the sum is dense (Lemma 5.2).

    Example:
        >>> [sum_bound_words(1000, 10**6, 8, overlap) for overlap in ("none", "full")]
        [7000.0, 1750.0]
        >>> sum_bound_words(300_000, 10**6, 8)
        500000.0
    """
    limit, result = delta(size, WORD_BYTES), union(k, size, world_size, overlap)
    if result > limit:
        return lemma_5_2_words(limit, world_size)
    return k + result * (world_size - 2) / world_size


def _body(entries: float, size: int) -> float:
    """Return the bytes of a stream behind its header: of entries, or of all elements."""
    return min(ENTRY_BYTES * entries, WORD_BYTES * size)


def _rounds(world_size: int) -> int:
    """Return ``ceil(log2 P)``."""
    return len(list(rounds(world_size)))
