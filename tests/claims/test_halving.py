"""Halving needs O(k) volume and O(log P) rounds, which removes Ok-Topk's first stated limitation."""

import math

import pytest

from sparsync.cli.bench.measure import SimulatedRanks
from sparsync.cli.bench.verified_row import Case
from sparsync.collectives import Halving
from sparsync.collectives.costs import Job

from .measured import ADVERSARIAL, EXCHANGEABLE, words

SIZE, DENSITY = 256_000, 0.01


@pytest.mark.fast(12)
@pytest.mark.parametrize("kind", EXCHANGEABLE + ADVERSARIAL)
@pytest.mark.parametrize("world_size", [2, 3, 4, 7, 16])
def test_halving_sends_log_p_messages_and_o_k_words(world_size, kind):
    ranks = SimulatedRanks(Case("halving", world_size, SIZE, DENSITY, kind))
    k = ranks.case.k
    bound = Halving().cost(Job(SIZE, k, world_size))
    for _ in range(2):
        simulation = ranks.step()
        sent = {ledger.total().messages_sent for ledger in simulation.ledgers}
        assert sent == {2 * math.ceil(math.log2(world_size))} == {bound.messages}
        assert words(simulation) <= bound.words
        reduced = sum(e.selected.to_dense() for e in simulation.results).count_nonzero()
        total = simulation.results[0].total
        assert 0.9 * min(k, int(reduced)) <= total.nnz <= k + world_size


def test_the_cost_form_is_tight():
    ranks = SimulatedRanks(Case("halving", 8, SIZE, DENSITY, "uniform"))
    for _ in range(2):
        sent = words(ranks.step())
        assert sent >= 0.9 * Halving().cost(Job(SIZE, ranks.case.k, 8)).words


@pytest.mark.parametrize(("world_size", "share"), [(4, 0.85), (16, 0.5)])
def test_selecting_after_every_hop_costs_energy_that_grows_with_p(world_size, share):
    """Rounds in O(log P) have a price: sums are dropped early that later hops would have increased."""
    ranks = SimulatedRanks(Case("halving", world_size, SIZE, DENSITY, "clustered"))
    for _ in range(3):
        results = ranks.step().results
        reduced = sum(e.selected.to_dense() for e in results)
        best = reduced.abs().topk(ranks.case.k).values.square().sum()
        assert share * best <= results[0].total.values.square().sum() <= best
