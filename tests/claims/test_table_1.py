"""Check bandwidth and latency of every row of Ok-Topk's Table 1 on the simulator's ledger and clock.

The row of TopkDSA is checked with SparCML's bounds in ``test_sparcml.py``, that of gTopk in
``test_gtopk.py``.
"""

import pytest

from sparsync.cli.bench.measure import SimulatedRanks
from sparsync.cli.bench.verified_row import Case
from sparsync.collectives import Allgather, Dense
from sparsync.collectives.costs import Job
from sparsync.published.oktopk import oktopk_paper
from sparsync.published.oktopk.allreduce import equation_3, histogram_cost
from sparsync.transports.sim import Links

from .measured import RANKS, k_for, messages, oktopk_step, phase, published_step, steps, words

LINKS = Links(alpha=50e-6, beta=8e-9)


def log2(world_size):
    return (world_size - 1).bit_length()


def check_form(name, form, size, world_size, density):
    """Check that each rank sends and receives what the closed form says, in the predicted time."""
    simulation = SimulatedRanks(Case(name, world_size, size, density, links=LINKS)).step()
    for ledger in simulation.ledgers:
        total = ledger.total()
        assert total.sent == total.received == form.nbytes
        assert total.messages_sent == form.messages
    assert simulation.seconds == pytest.approx(form.seconds(LINKS.alpha, LINKS.beta))


@pytest.mark.parametrize("world_size", (*RANKS, 5, 7, 12))
@pytest.mark.parametrize("size", [1, 1000, 16_384])
def test_dense_costs_2n_and_2_log_p_messages(size, world_size):
    form = Dense().cost(Job(size, 0, world_size))
    assert form.messages == 2 * log2(world_size)
    if size % world_size == 0:
        assert form.words == pytest.approx(2 * size * (world_size - 1) / world_size)
    check_form("dense", form, size, world_size, 1.0)


@pytest.mark.parametrize("world_size", (*RANKS, 5, 7, 12))
@pytest.mark.parametrize("k", [1, 100])
def test_topka_costs_2k_times_p_minus_1_and_log_p_messages(k, world_size):
    form = Allgather().cost(Job(10_000, k, world_size))
    headers = 2 * (world_size - 1)  # words
    assert form.words == 2 * k * (world_size - 1) + headers
    assert form.messages == log2(world_size)
    check_form("allgather", form, 10_000, world_size, k / 10_000)


@pytest.mark.parametrize("world_size", [2, 5, 8, 16])
def test_gaussiank_is_topka_with_the_entries_that_its_threshold_finds(world_size):
    """Table 1 gives it the words of TopkA; the messages are those of this library's allgather."""
    simulation = SimulatedRanks(Case("gaussiank", world_size, 100_000, 0.01)).step()
    found = [ledger.total() for ledger in simulation.ledgers]
    assert all(t.messages_sent == log2(world_size) for t in found)
    low, high = (Allgather().cost(Job(1 << 20, k, world_size)).nbytes for k in (750, 2000))
    assert all(low <= t.received <= high for t in found)


@pytest.mark.parametrize("world_size", RANKS)
def test_oktopk_paper_needs_at_most_2p_plus_2_log_p_messages(world_size):
    """This holds on steps that reuse thresholds and boundaries; without balancing it is P + 2 log P."""
    _, simulation = steps(oktopk_paper(), world_size, "clustered", 2)
    form = published_step(1, 1, world_size)
    assert messages(simulation) == form.messages == world_size - 1 + 2 * log2(world_size)
    assert messages(simulation) <= equation_3(1, world_size).messages


@pytest.mark.parametrize("world_size", [2, 3, 8, 16])
@pytest.mark.parametrize("kind", ["uniform", "one-region", "dominated"])
def test_oktopk_needs_2_log_p_messages_more_per_histogram(kind, world_size):
    """Selecting exactly k entries on every step usually costs two small allreduces."""
    _, simulation = steps("oktopk", world_size, kind, 2)
    per_histogram = histogram_cost(k_for(world_size), world_size).messages
    histograms = phase(simulation, "threshold")[0].messages_sent / per_histogram
    assert histograms <= 2
    published = equation_3(1, world_size).messages
    assert messages(simulation) <= published + histograms * per_histogram
    if kind == "uniform":
        form = oktopk_step(k_for(world_size), world_size, refinements=int(histograms) - 1)
        assert messages(simulation) == form.messages


def test_oktopk_scales_and_topka_does_not():
    """ "The bandwidth term of Ok-Topk is only related to k." """
    per_k = {
        name: [words(next(steps(name, p, "uniform", 1))) / k_for(p) for p in (8, 32)]
        for name in ("oktopk", "allgather")
    }
    assert per_k["allgather"][1] > 4 * per_k["allgather"][0]
    assert per_k["oktopk"][1] < 1.15 * per_k["oktopk"][0]
