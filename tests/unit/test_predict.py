"""Test that every preset has a prediction whose bytes match the ledger and whose seconds add up."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsync.cli.bench.measure import SimulatedRanks
from sparsync.cli.bench.verified_row import Case
from sparsync.collectives.costs import Job, expected_union, lemma_5_1_words, sum_bound_words
from sparsync.cost.machine import Machine
from sparsync.cost.planner import predict as predict_candidate
from sparsync.errors import ConfigurationError
from sparsync.presets import PRESETS, candidates, resolve
from sparsync.published.redsync import redsync, redsync_quantized
from tests.tables import cases

MACHINE = Machine()
NOTHING = Machine(alpha=0, beta=0, gamma=0, select=0, encode=0, decode=0)
SIZE, DENSITY = 1 << 16, 1 / 64  # of whole blocks of 512, which "sparcml" selects in

# bounds of measured bytes relative to predicted ones, after the first step (which cuts regions)
USUAL = 0.97, 1.03
TOLERANCE = {
    "budgeted": (0.97, 1.05),  # the busiest rank, where the form has the mean
    "halving": (0.85, 1.01),  # the form bounds it: blocks need not be full
    "recursive-doubling": (0.9, 1.03),  # P no power of two: groups of unequal size
    "sparcml-auto": (0.9, 1.03),
    "split-allgather": (0.97, 1.06),  # the busiest rank
    "topkdsa": (0.97, 1.06),
    "oktopk": (0.97, 1.15),  # the busiest rank, and histograms that are refined
    "gaussiank": (0.5, 2 / 1.5),  # its number of entries lies between 3 k / 4 and its cap
    "oktopk-paper": (1, 20),  # nothing bounds the entries that reach its reused thresholds
}


def measured(algorithm, world_size, density=DENSITY, size=SIZE, steps=2):
    """Return the largest numbers of bytes and messages of any rank on the last step."""
    ranks = SimulatedRanks(Case(algorithm, world_size, size, density))
    for _ in range(steps):
        traffic = [ledger.total() for ledger in ranks.step(keep=False).ledgers]
    busiest = max(max(t.sent, t.received) for t in traffic)
    return ranks.case.k, busiest, max(t.messages_sent for t in traffic)


COLLECTIVES = [c.name for c in candidates(planned=False)]


def predict(name, **job):
    return predict_candidate(resolve(name), **job)


def test_every_preset_but_the_one_that_plans_has_a_cost():
    assert set(COLLECTIVES) == set(PRESETS) - {"auto"}


@pytest.mark.fast(20)
@pytest.mark.parametrize("world_size", [2, 5, 8])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_bytes_and_messages_are_those_of_the_ledger(name, world_size):
    k, nbytes, messages = measured(name, world_size)
    predicted = predict(name, size=SIZE, k=k, world_size=world_size, machine=MACHINE)
    low, high = TOLERANCE.get(name, USUAL)
    assert low <= nbytes / predicted.bytes_sent <= high
    if name == "gtopk":
        assert 2 * messages == predicted.messages  # of the sequence, half are received
    elif name == "oktopk":  # and those of histograms that are refined
        assert predicted.messages - 1 < messages <= predicted.messages + 12
    else:
        assert messages == int(predicted.messages)


@pytest.mark.parametrize("name", ["recursive-doubling", "ring", "dynamic", "topkdsa", "sparcml"])
def test_bytes_where_sums_turn_dense(name):
    k, nbytes, _ = measured(name, 5, density=0.25)
    predicted = predict(name, size=SIZE, k=k, world_size=5, machine=MACHINE)
    assert nbytes == pytest.approx(predicted.bytes_sent, rel=0.03)
    assert expected_union(k, SIZE, 5) > SIZE / 2


@pytest.mark.parametrize("preset", [redsync, redsync_quantized])
def test_a_layer_that_is_searched_sends_between_k_and_two_k(preset):
    size = 1 << 20
    k, nbytes, _ = measured(preset(), 2, size=size, steps=1)
    predicted = predict(preset().name, size=size, k=k, world_size=2, machine=MACHINE)
    assert 0.99 / 1.5 <= nbytes / predicted.bytes_sent <= 2.01 / 1.5


@cases(
    (replace(NOTHING, alpha=1), 4),  # messages
    (replace(NOTHING, beta=1), 2 * 3 * 250 * 4),
    (replace(NOTHING, gamma=1), 3 * 250 * 4),  # what the reduce-scatter adds
    (replace(NOTHING, select=1), 0),  # everything is sent
)
def test_the_terms_of_dense(machine, seconds):
    made = predict("dense", size=1000, k=10, world_size=4, machine=machine)
    assert made.seconds == made.seconds_selection + made.seconds_exchange == seconds


@cases(
    # the entries that four ranks hit at random
    ("allgather", 1000, 100, 3 * 100, 1000 * (1 - 0.9**4)),
    # others' entries, then sums; two passes
    ("budgeted", 1000, 100, 75 + 75 + 2 * 100, 100),
    ("quantised", 0, 0, 0, 0),
    ("dense", 0, 0, 0, 0),
)
def test_the_work_of_a_rank(name, selected, encoded, decoded, applied):
    job = {"size": 1000, "k": 100, "world_size": 4}
    for field, expected in (("select", selected), ("encode", encoded), ("decode", decoded)):
        made = predict(name, **job, machine=replace(NOTHING, **{field: 1}))
        local = applied if field == "decode" else 0
        assert made.seconds == pytest.approx(expected + local)
        assert made.seconds_selection == pytest.approx(selected if field == "select" else local)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_one_rank_exchanges_nothing(name):
    made = predict(name, size=1000, k=10, world_size=1, machine=MACHINE)
    assert made.seconds_exchange == made.bytes_sent == made.messages == made.lower_bound_words == 0
    selects = resolve(name).result != "whole"
    assert made.seconds_selection == selects * 1000 * MACHINE.select


@given(
    name=st.sampled_from(sorted(COLLECTIVES)),
    size=st.integers(0, 10**10),
    k=st.integers(0, 10**10),
    world_size=st.integers(1, 5000),
)
def test_any_job_has_a_cost_and_more_entries_cost_no_less(name, size, k, world_size):
    job = {"size": size, "world_size": world_size, "machine": MACHINE}
    made = predict(name, k=k, **job)
    assert made.seconds >= 0 and made.bytes_sent >= 0 and made.lower_bound_words >= -1e-6 * size
    assert predict(name, k=k + size, **job) == predict(name, k=size, **job)


@pytest.mark.parametrize("name", ["allgather", "oktopk", "budgeted", "ring", "gtopk", "dense"])
def test_less_than_the_bound_is_sent_by_packed_entries_alone(name):
    made = predict(name, size=10**7, k=10**5, world_size=8, machine=MACHINE)
    assert (made.bytes_sent / 4 < 0.999 * made.lower_bound_words) == (name == "budgeted")


def test_the_lemmas_meet_at_their_ends():
    k, p = 1000, 8
    for result, disjoint in ((k * p, True), (k, False)):
        words = sum_bound_words(Job(10**6, k, p, result=result))
        assert words == lemma_5_1_words(k, p, disjoint=disjoint)
    assert sum_bound_words(Job(10**6, 10**6 // 8, p, result=10**6)) == 500_000  # delta
    assert sum_bound_words(Job(10**6, k, 1)) == 0


@cases(
    ({"name": "auto"}, "the cost of 'auto' is unknown"),
    ({"size": -1}, "size is -1"),
    ({"k": -1}, "k is -1"),
    ({"world_size": 0}, "world_size is 0"),
)
def test_a_job_that_cannot_be_is_refused(arguments, words):
    job = {"name": "dense", "size": 10, "k": 1, "world_size": 2, **arguments}
    with pytest.raises(ConfigurationError, match=words):
        predict(**job, machine=MACHINE)


@given(k=st.integers(0, 300), size=st.integers(1, 300), ranks=st.integers(1, 40))
def test_a_union_of_random_supports_is_the_papers_sum(k, size, ranks):
    k = min(k, size)
    terms = [(-1) ** (i - 1) * math.comb(ranks, i) * (k / size) ** i for i in range(1, ranks + 1)]
    union = expected_union(k, size, ranks)
    if ranks < 12:  # beyond, the alternating sum loses all digits
        assert union == pytest.approx(size * sum(terms), rel=1e-9, abs=1e-9)
    assert k * (1 - 1e-12) <= union <= min(size, ranks * k) * (1 + 1e-12)
