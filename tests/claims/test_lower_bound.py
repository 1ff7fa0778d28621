"""Test Ok-Topk's Theorem 3.1: COO needs at least 2 k (P - 1) / P words, and one case needs no more.

"All local top-k values of worker i are in region i that worker i is in charge of ... the global
top-k values are uniformly distributed among P workers."
"""

import pytest

from sparsync.collectives.costs import lower_bound_words
from sparsync.published.oktopk import oktopk
from sparsync.published.oktopk.allreduce import bound_words

from .measured import RANKS, entry_words_received, entry_words_sent, k_for, phase, steps, words

CUTS = 1 / 16  # how finely regions are cut, in shares of a region; draws differ by less


def entries_of_a_step(world_size, boundaries):
    """Return the words of indices and values that each rank sent and received in split and allgatherv."""
    (simulation,) = steps(oktopk(boundaries=boundaries), world_size, "matching", 1)
    total = [ledger.total() for ledger in simulation.ledgers]
    split, gather = phase(simulation, "split"), phase(simulation, "allgatherv")
    received = [
        # a message of the allgatherv has one header per rank, so P - 1 headers arrive
        entry_words_received(s, s.messages_received) + entry_words_received(g, world_size - 1)
        for s, g in zip(split, gather, strict=True)
    ]
    return [entry_words_sent(t) for t in total], received, words(simulation)


@pytest.mark.parametrize("world_size", RANKS)
def test_theorem_3_1_case_reaches_the_lower_bound(world_size):
    k = k_for(world_size)
    bound = lower_bound_words(k, world_size)
    assert bound == 2 * k * (world_size - 1) / world_size
    sent, received, _ = entries_of_a_step(world_size, "histogram")
    # a rank that owns slightly more than k / P of the result receives slightly less than the average
    assert sum(received) / world_size >= bound * (1 - 1e-9)
    assert max(max(sent), max(received)) <= bound * (1 + CUTS)


@pytest.mark.parametrize(("world_size", "in_the_split"), [(8, 5.25), (16, 13.1), (32, 29.0)])
def test_averaged_boundaries_miss_the_lower_bound_by_far(world_size, in_the_split):
    """The published consensus averages the ranks' cuts, which is only useful if supports are similar.

    Here they are not: all ranks' entries lie in few regions, whose owners receive ``in_the_split``
    words per k.
    """
    k = k_for(world_size)
    (simulation,) = steps(oktopk(boundaries="average"), world_size, "matching", 1)
    received = max(entry_words_received(t, t.messages_received) for t in phase(simulation, "split"))
    assert received / k == pytest.approx(in_the_split, rel=0.02)
    assert words(simulation) > bound_words(k, world_size, exchangeable=False)


@pytest.mark.fast(6)
@pytest.mark.parametrize("world_size", RANKS)
@pytest.mark.parametrize("kind", ["uniform", "clustered", "disjoint", "dominated"])
def test_no_input_goes_below_the_lower_bound(kind, world_size):
    k = k_for(world_size)
    (simulation,) = steps("oktopk", world_size, kind, 1)
    assert simulation.results[0].total.nnz == k
    assert words(simulation) >= lower_bound_words(k, world_size)
