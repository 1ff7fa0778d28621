"""Helpers of the claim tests: run real reducers in the simulator, and sum the traffic in its ledgers."""

from collections.abc import Iterator

import pytest

from sparsync.algorithm import Algorithm
from sparsync.cli.bench.measure import SimulatedRanks
from sparsync.cli.bench.verified_row import Case, Evidence
from sparsync.collectives.costs import ENTRY_BYTES, WORD_BYTES, allgatherv, allreduce
from sparsync.published.oktopk import allreduce as forms
from sparsync.published.oktopk.regions import REFINING_BINS
from sparsync.transports.ledger import Traffic
from sparsync.transports.sim import Links, Simulation
from sparsync.wire.codec import HEADER_BYTES

FEW = (2, 3, 8, 16)
RANKS = (*FEW, pytest.param(32, marks=pytest.mark.slow))
EXCHANGEABLE = ("uniform", "heavy-tailed", "clustered", "one-region")
ADVERSARIAL = ("disjoint", "dominated", "matching")

WORDS_PER_ENTRY = 2
DENSITY = 1 / 32


def k_for(world_size: int) -> int:
    """Return a k large enough for headers and histograms to fit into the bounds: k / P >= 256."""
    return max(2048, 256 * world_size)


def case(
    algorithm: str | Algorithm, world_size: int, kind: str, links: Links | None = None
) -> Case:
    size = round(k_for(world_size) / DENSITY)
    return Case(algorithm, world_size, size, DENSITY, kind, links=links or Links())


def steps(
    algorithm: str | Algorithm, world_size: int, kind: str, count: int
) -> Iterator[Simulation[Evidence]]:
    ranks = SimulatedRanks(case(algorithm, world_size, kind))
    for _ in range(count):
        yield ranks.step()


def words(simulation: Simulation) -> float:
    """Max over ranks of max(sent, received)."""
    traffic = [ledger.total() for ledger in simulation.ledgers]
    return max(max(t.sent, t.received) for t in traffic) / WORD_BYTES


def messages(simulation: Simulation) -> int:
    """Return the largest number of messages that any rank sent."""
    return max(ledger.total().messages_sent for ledger in simulation.ledgers)


def phase(simulation: Simulation, name: str) -> list[Traffic]:
    """Return one phase's traffic on every rank."""
    return [ledger.by_phase().get(name, Traffic()) for ledger in simulation.ledgers]


def phases(simulation: Simulation) -> set[str]:
    return {name for ledger in simulation.ledgers for name in ledger.by_phase()}


def entry_words_sent(traffic: Traffic) -> float:
    """Indices and values alone."""
    return (traffic.sent_parts.index + traffic.sent_parts.value) / WORD_BYTES


def entry_words_received(traffic: Traffic, messages_with_header: int) -> float:
    return (traffic.received - HEADER_BYTES * messages_with_header) / WORD_BYTES


def oktopk_step(k, world_size, refinements=0):
    """Closed form of a step of "oktopk" that keeps its regions."""
    sent = forms.split_cost(k, world_size) + forms.gather_cost(k, world_size)
    return sent + histograms(k, world_size, refinements) + forms.counts_cost(3, world_size)


def histograms(k, world_size, refinements):
    """Return the closed form of a histogram whose marginal bin is divided again several times."""
    finer = allreduce(REFINING_BINS, world_size).times(refinements)
    return forms.histogram_cost(k, world_size) + finer


def published_step(selected, kept, world_size):
    """Return the closed form of a step of "oktopk-paper" that reuses its threshold and regions."""
    sent = forms.split_cost(selected, world_size) + forms.gather_cost(kept, world_size)
    return sent + forms.counts_cost(2, world_size)


def exact_step(k, reduced, world_size):
    """Return the closed form of a step that allgathers all reduced entries and averages the cuts."""
    more = allgatherv(HEADER_BYTES + ENTRY_BYTES * reduced / world_size, world_size)
    return published_step(k, k, world_size) + more + forms.averaged_cuts_cost(world_size)
