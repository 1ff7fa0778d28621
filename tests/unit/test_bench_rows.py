"""Test medians, ratios and bounds in rows of ``sparsync bench``, and the duration of a row."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsync.cli.bench.measure import LEAST_STEPS, MOST_STEPS, ROW_SECONDS, Measured, Outcome, Pace
from sparsync.cli.bench.rows import bound_words_per_k, entry, ratios, summarize, tables
from sparsync.cli.bench.verified_row import Case, Verdict
from sparsync.presets import PRESETS

from .consoles import shown

FINE = Verdict(0, 0.5, 1.0)
RATE = 200_000_000  # its burst has 25,000 bytes


def outcome(seconds, exchange=None, sent=100, received=100, verdict=FINE, **more):
    return Outcome(seconds, exchange, sent, received, verdict, **more)


def row_of(name, seconds, exchange, nbytes, rate=RATE, size=10_000):
    """Return a row with a warm-up step, three whole steps, three exchanges alone and a final step."""
    warm = [outcome(9.0, sent=nbytes)]
    whole = [outcome(seconds * x, sent=nbytes, kernel=nbytes + 7) for x in (1, 2, 3)]
    alone = [outcome(99.0, exchange * x, sent=nbytes) for x in (1, 2, 3)]
    steps = [*warm, *whole, *alone, outcome(99.0)]
    measured = Measured("torch", steps, whole, alone, 1, {}, [0.003, 0.001, 0.002])
    return summarize(Case(name, 4, size, 0.01), measured, rate)


def test_a_row_sums_up_its_steps():
    timed = [
        outcome(1.0, 0.5, 100, 200, Verdict(2, 0.1, 0.9)),
        outcome(3.0, 2.5, 300, 100, Verdict(1, 0.2, 1.0), in_full=False),
        outcome(2.0, 1.5, 100, 100, Verdict(0, 0.3, 1.0)),
    ]
    warm = outcome(9.0, 9.0, 4000, 100)  # untimed, but its volume counts
    measured = Measured("sim", [warm, *timed], timed, timed, 1)
    row = summarize(Case("oktopk", 4, 10_000, 0.01), measured)
    assert (row.steps, row.warmup, row.k) == (3, 1, 100)
    assert (row.seconds_25, row.seconds_median, row.seconds_75) == (1.5, 2.0, 2.5)
    assert (row.seconds_exchange_median, row.seconds_local_median) == (1.5, 0.5)
    assert (row.bytes_sent_max, row.bytes_received_max) == (4000, 200)
    assert (row.words_per_k_max, row.bound_words_per_k) == (10.0, 4.5)
    assert (row.entries_min, row.law_error_max, row.wrong) == (0.9, 0.5, 3)
    assert (row.steps_verified, row.steps_total) == (3, 4)
    assert row.seconds_add_median is row.wire_seconds is row.lab is row.bytes_kernel_max is None
    assert not row.correct


def test_whole_and_exchange_are_medians_of_different_steps():
    row = row_of("oktopk", seconds=0.010, exchange=0.004, nbytes=150_000)
    assert row.seconds_median == pytest.approx(0.020)
    assert row.seconds_exchange_median == pytest.approx(0.008)
    assert row.seconds_local_median == pytest.approx(0.012)
    assert row.seconds_add_median == 0.002
    assert row.wire_seconds == pytest.approx(0.005)  # 125 kB beyond the burst at 25 MB/s
    assert (row.bytes_kernel_max, row.steps_total) == (150_007, 8)


def test_ratios_are_over_the_dense_row_of_the_same_group():
    sparse = row_of("oktopk", 0.010, 0.004, 150_000)
    dense = row_of("dense", 1.0, 0.8, 1_000_000)
    elsewhere = row_of("dense", 7.0, 7.0, 1_000_000, size=20_000)
    found = ratios(sparse, [elsewhere, dense, sparse])
    assert found["speedup"] == pytest.approx(100)
    assert found["speedup_exchange"] == pytest.approx(200)
    assert found["exchange_over_wire"] == pytest.approx(1.6)
    assert found["local_over_add"] == pytest.approx(6)
    alone = ratios(sparse, [elsewhere, sparse])
    assert alone["speedup"] is alone["speedup_exchange"] is None


def test_what_passes_with_the_burst_has_no_wire_time():
    row = row_of("oktopk", 0.010, 0.004, 20_000)
    assert row.wire_seconds == 0
    assert ratios(row, [row])["exchange_over_wire"] is None


def test_the_tables_show_ratios_first_and_fit_a_terminal():
    rows = [row_of("dense", 1.0, 0.8, 1_000_000), row_of("oktopk-paper", 0.010, 0.004, 150_000)]
    text = shown(tables(rows))
    assert "\u2026" not in text
    paper = next(line.split() for line in text.splitlines() if "oktopk-paper" in line)
    assert paper[:5] == ["oktopk-paper", "100", "200", "1.6", "6"]
    assert "7 / 8" not in text and "8 / 8" in text
    json.dumps([entry(row, rows) for row in rows], allow_nan=False)


@pytest.mark.parametrize("name", PRESETS)
def test_a_bound_scales_with_the_ranks(name):
    bound = bound_words_per_k(Case(name, 4, 10_000, 0.01))
    assert bound is None or bound > bound_words_per_k(Case(name, 1, 10_000, 0.01)) == 0


def test_the_bound_depends_on_the_input():
    bounds = [bound_words_per_k(Case("oktopk", 8, 10_000, 0.1, i)) for i in ("uniform", "disjoint")]
    assert bounds == [5.25, 5.5]


# ---- how long, and what is verified -------------------------------------------------------------------


@given(st.lists(st.floats(1e-6, 1e3), min_size=5, max_size=5))
def test_a_row_ends(durations):
    pace = Pace(None, None)
    assert not pace.warm([]) and pace.warm(durations)
    steps = pace.timed(durations)
    assert LEAST_STEPS <= steps <= MOST_STEPS
    assert steps == LEAST_STEPS or 2 * steps * min(durations) <= ROW_SECONDS
