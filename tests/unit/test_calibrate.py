"""Test calibration in the simulator, and its fits on lines with known results."""

import random
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsync.cli.doctor.checks import check_links
from sparsync.cost.calibrate import calibrate
from sparsync.cost.links import Probe, fit_line, fit_pace, fit_with_intervals
from sparsync.errors import PeerError
from sparsync.transports.agree import check_equal_parameters
from sparsync.transports.driver import run
from sparsync.transports.groups import SoloCommunicator
from sparsync.transports.sim import Fault, Links, Route, SimCommunicator, Topology, simulate
from tests.tables import cases

LINKS = Links(alpha=120e-6, beta=4e-9, gamma=1e-10)
SMALL = Probe(largest=1 << 16, visits=3)
BRIEF = replace(SMALL, elements=256, calls=1)  # where the clock is not virtual


def simulated(ranks, links=LINKS, faults=(), probe=SMALL, **options):
    async def program(comm):
        return await calibrate(comm, probe=probe, **options)

    return simulate(program, ranks, links=links, faults=faults)


@pytest.mark.parametrize("ranks", [2, 5])
def test_it_finds_the_links_of_the_simulator(ranks):
    results = simulated(ranks).results
    found = results[0]
    assert all(other == found for other in results), "equal on all ranks"
    for name in ("alpha", "beta", "gamma"):
        assert getattr(found.machine, name) == pytest.approx(getattr(LINKS, name), rel=1e-6)
    assert found.machine.select == found.machine.encode == found.machine.decode == 0
    pairs = [(link.source, link.dest) for link in found.links]
    assert pairs == [(s, d) for s in range(ranks) for d in range(ranks) if s != d]
    for link in found.links:
        assert link.alpha == pytest.approx(LINKS.alpha, rel=1e-6)
        assert link.beta == pytest.approx(LINKS.beta, rel=1e-6)
    assert found.slow_links() == []


def test_of_many_ranks_some_links_stand_for_all():
    found = simulated(7, probe=Probe(largest=1 << 12, visits=2, shifts=3)).results[0]
    assert len(found.links) == 3 * 7
    assert found.machine.beta == pytest.approx(LINKS.beta, rel=1e-6)


def off_by(monkeypatch, seconds):
    """Shift every rank's clock by ``seconds(rank)``."""
    true = SimCommunicator.now.fget
    now = property(lambda comm: true(comm) + seconds(comm.rank))
    monkeypatch.setattr(SimCommunicator, "now", now)


@pytest.mark.slow
def test_a_noisy_clock_is_averaged_out(monkeypatch):
    draws = [random.Random(rank) for rank in range(5)]
    off_by(monkeypatch, lambda rank: draws[rank].expovariate(1 / 20e-6))
    found = simulated(5, probe=replace(BRIEF, largest=1 << 18, visits=8)).results[0]
    for name in ("alpha", "beta"):
        value, (low, high) = getattr(found.machine, name), found.intervals[name]
        assert value == pytest.approx(getattr(LINKS, name), rel=0.1)
        assert low < value < high


def test_ranks_that_stand_still_now_and_then_do_not_count():
    faults = [Fault(i % 3, 0.01 * i, 0.01 * i + 0.002) for i in range(40)]
    found = simulated(3, faults=faults).results[0]
    assert found.machine.alpha == pytest.approx(LINKS.alpha, rel=0.05)
    assert found.machine.beta == pytest.approx(LINKS.beta, rel=0.05)


def test_clocks_that_differ_are_compared_and_do_no_harm(monkeypatch):
    off_by(monkeypatch, lambda rank: 1000.0 * rank)
    found = simulated(4, probe=BRIEF).results[0]
    for rank, clock in enumerate(found.clocks):
        assert abs(clock.ahead - 1000.0 * rank) <= clock.uncertainty + 1e-9
        assert clock.uncertainty <= LINKS.alpha * 1.01
    assert found.machine.alpha == pytest.approx(LINKS.alpha, rel=1e-3)
    assert [link.alpha for link in found.links] == pytest.approx([LINKS.alpha] * 12, rel=1e-3)


@pytest.mark.fast(1)
@cases(
    (lambda s, d: (s, d) == (3, 1), "the link from rank 3 to rank 1 is 2.0 x slower"),
    (lambda s, d: s == 2, "sending from rank 2 is 2.0 x slower"),
    (lambda s, d: d == 0, "receiving at rank 0 is 2.0 x slower"),
)
def test_what_is_half_as_fast_is_named(slow, said):
    class Uneven(Topology):
        def route(self, source, dest):
            return Route(50e-6, 16e-9 if slow(source, dest) else 8e-9, source, dest)

    found = simulated(5, Uneven()).results[0]
    notes = [check.what for check in check_links(found, [0.0] * 5) if check.level == "note"]
    assert len(notes) == 1 and notes[0].startswith(said)


@pytest.mark.parametrize("beta", [8e-5, 8e-6, 8e-8])  # 100 kbit/s, 1 Mbit/s, 100 Mbit/s
def test_slow_links_get_what_fits_the_time(beta):
    done = simulated(4, Links(alpha=1e-3, beta=beta), seconds=4.0)
    found = done.results[0]
    assert done.seconds < 4.0
    assert len(found.sizes) >= 2 and found.sizes[-1] * beta < 0.3
    assert found.machine.beta == pytest.approx(beta, rel=1e-6)


@pytest.mark.parametrize(("alpha", "beta", "most"), [(0.04, 8e-7, 6), (1e-3, 8e-3, 500)])
def test_links_too_far_or_slow_for_the_time_get_sizes_that_show_their_bandwidth(alpha, beta, most):
    done = simulated(4, Links(alpha=alpha, beta=beta), seconds=1.0)
    found = done.results[0]
    assert 1 < done.seconds < most and found.sizes[-1] * beta >= alpha
    assert found.machine.beta == pytest.approx(beta)


def test_one_rank_has_no_links_but_works():
    found = run(calibrate(SoloCommunicator(), seconds=0.2, probe=Probe(elements=4096)))
    assert found.links == () and "alpha" not in found.intervals
    for name in ("gamma", "select", "encode", "decode"):
        low, high = found.intervals[name]
        assert 0 < low <= getattr(found.machine, name) <= high < 1e-3


def compare(named_of):
    async def program(comm):
        await check_equal_parameters(comm, named_of(comm.rank))

    simulate(program, 4)


@cases(
    (lambda r: [("a", torch.zeros(2)), ("b", torch.tensor([1.0 * (r == 3)]))], "parameter b"),
    (lambda r: [("a", torch.zeros(2 - (r == 3)))], "parameter a"),
    (lambda r: [("a", torch.zeros(2).to(torch.int32 if r == 3 else torch.float32))], "parameter a"),
    (lambda r: [("a", torch.zeros(1))] * (1 if r == 3 else 0), "the names of the parameters"),
)  # fmt: skip
def test_the_first_difference_and_its_rank_are_named(named_of, said):
    with pytest.raises(PeerError) as caught:
        compare(named_of)
    assert str(caught.value).startswith(f"ranks disagree on {said}: rank ")
    words = r": rank \d has .*, rank 3 has |: rank 3 has .*, rank 0 has "
    assert re.search(words, str(caught.value))


SIZES = [256 * 4**i for i in range(8)]


@given(alpha=st.floats(0, 1), beta=st.floats(1e-12, 1e-3), count=st.integers(2, 8))
def test_a_line_comes_out_as_it_is(alpha, beta, count):
    line = fit_line({size: alpha + beta * size for size in SIZES[:count]})
    at_large = alpha + beta * SIZES[count - 1]
    assert line[0] == pytest.approx(alpha, abs=1e-9 * at_large)
    assert line[1] == pytest.approx(beta, rel=1e-6, abs=1e-9 * at_large / SIZES[count - 1])
    assert min(line) >= 0


def seconds(size):
    return 50e-6 + 8e-9 * size


def test_one_size_that_is_off_moves_nothing():
    for off in SIZES[:-1]:
        for factor in (0.1, 10.0):
            times = {size: seconds(size) * (factor if size == off else 1) for size in SIZES}
            assert fit_line(times) == pytest.approx((50e-6, 8e-9), rel=1e-6)


def test_a_bucket_that_hides_the_wire_of_small_messages_leaves_the_bandwidth():
    found, slope = fit_line({size: max(100e-6, 8e-9 * (size - 50_000)) for size in SIZES})
    assert slope == pytest.approx(8e-9, rel=0.02)
    assert found <= 100e-6


@cases(
    ({100: 0.0, 200: 0.0}, 0.0, 0.0),
    ({100: 3.0, 200: 1.0}, 1.0, 0.0),  # faster when larger: all latency
    ({100: 1.0, 200: 9.0}, 0.0, 0.045),  # steeper than its origin: all bandwidth
)
def test_neither_is_ever_negative(times, alpha, beta):
    assert fit_line(times) == (pytest.approx(alpha), pytest.approx(beta))


def noisy(draw, count):
    """Return times that are often a little longer, and sometimes much longer, than the true one."""

    def factor():
        return (1 + draw.expovariate(20)) * (10 if draw.random() < 0.1 else 1)

    return {size: [seconds(size) * factor() for _ in range(count)] for size in SIZES}


def test_intervals_hold_the_truth_and_narrow():
    draw = random.Random(1)
    few, many = (fit_with_intervals(noisy(draw, count)) for count in (8, 128))
    widths = []
    for line in (few, many):
        for name, truth in (("alpha", 50e-6), ("beta", 8e-9)):
            value, (low, high) = line[name]
            assert value == pytest.approx(truth, rel=0.15)
            assert low <= value <= high
        widths.append(high - low)
    assert 0 < widths[1] < widths[0]


def test_a_pace_counts_the_waits_that_a_median_would_not_see():
    batches = [(1.0, 10)] * 6 + [(10.0, 10)] * 2
    pace, (low, high) = fit_pace(batches)
    assert pace == pytest.approx(0.325)
    assert 0.1 <= low < pace < high <= 1.0
