"""gTop-k costs "4k log P" words and "2 log P" messages (Ok-Topk, Table 1)."""

import pytest

from sparsync.algorithm import Algorithm
from sparsync.cli.bench.measure import SimulatedRanks
from sparsync.cli.bench.verified_row import Case
from sparsync.collectives.costs import Job
from sparsync.published.baselines.gtopk import GTopk
from sparsync.selection import Exact
from sparsync.transports.sim import Links
from sparsync.wire.codec import HEADER_BYTES

from .measured import RANKS, WORDS_PER_ENTRY, case, k_for, messages, words

GTOPK = Algorithm("gtopk", Exact, GTopk)
LINKS = Links(alpha=50e-6, beta=8e-9)


@pytest.mark.parametrize("world_size", (*RANKS, 5, 6, 7, 12))
def test_gtopk_costs_4k_log_p_words_and_2_log_p_messages_one_after_the_other(world_size):
    """Rank 0 receives log2 P messages of k entries and then sends as many; both directions count.

    In virtual time, this takes (2 log P) alpha + (4 k log P) beta, plus headers.
    """
    k, rounds = k_for(world_size), (world_size - 1).bit_length()
    ranks = SimulatedRanks(case(GTOPK, world_size, "uniform", LINKS))
    form = GTopk().cost(Job(ranks.case.size, k, world_size))
    seconds = 2 * rounds * (LINKS.alpha + LINKS.beta * (8 * k + HEADER_BYTES))
    for _ in range(2):
        simulation = ranks.step()
        totals = [ledger.total() for ledger in simulation.ledgers]
        through = [total.sent + total.received for total in totals]
        headers = 2 * rounds * HEADER_BYTES
        assert max(through) == through[0] == 4 * (4 * k * rounds) + headers
        assert totals[0].messages_sent == messages(simulation) == rounds
        assert sum(total.messages_sent for total in totals) == 2 * (world_size - 1)
        assert words(simulation) == WORDS_PER_ENTRY * k * rounds + headers / 8
        assert simulation.seconds <= seconds * (1 + 1e-9)
    if world_size & (world_size - 1) == 0:
        assert simulation.seconds == pytest.approx(seconds)
        assert through[0] == form.nbytes + form.relayed and form.messages == 2 * rounds
        assert form.seconds(LINKS.alpha, LINKS.beta) == pytest.approx(seconds)


def test_what_the_tree_keeps_is_less_than_the_global_top_k_and_never_a_fifth_of_it():
    """ "gTopk hierarchically selects top-k values", which approximates the top k of the sum."""
    ranks = SimulatedRanks(Case(GTOPK, 16, 65_536, 1 / 64, "clustered"))
    for _ in range(2):
        evidence = ranks.step().results
        summed = sum(e.selected.to_dense() for e in evidence)
        best = summed.abs().topk(ranks.case.k).values.square().sum()
        energy = evidence[0].total.values.square().sum()
        assert 0.2 * best < energy < best
