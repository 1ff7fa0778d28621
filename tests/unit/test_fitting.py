"""Fits: exact on lines, unmoved by what is off, and honest about how sure they are."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsync.cost.links import fit_line, fit_pace, fit_with_intervals

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
            assert fit_line(times) == (
                pytest.approx(50e-6, rel=1e-6),
                pytest.approx(8e-9, rel=1e-6),
            )


def test_a_bucket_that_hides_the_wire_of_small_messages_leaves_the_bandwidth():
    found, slope = fit_line({size: max(100e-6, 8e-9 * (size - 50_000)) for size in SIZES})
    assert slope == pytest.approx(8e-9, rel=0.02)
    assert found <= 100e-6


@pytest.mark.parametrize(
    ("times", "alpha", "beta"),
    [
        ({100: 0.0, 200: 0.0}, 0.0, 0.0),
        ({100: 3.0, 200: 1.0}, 1.0, 0.0),  # faster when larger: all latency
        ({100: 1.0, 200: 9.0}, 0.0, 0.045),  # steeper than its origin: all bandwidth
    ],
)
def test_neither_is_ever_negative(times, alpha, beta):
    assert fit_line(times) == (pytest.approx(alpha), pytest.approx(beta))


def noisy(draw, count):
    """Times that are never shorter, often a little and sometimes much longer."""
    return {
        size: [
            seconds(size) * (1 + draw.expovariate(20)) * (10 if draw.random() < 0.1 else 1)
            for _ in range(count)
        ]
        for size in SIZES
    }


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


def test_the_same_samples_give_the_same_intervals():
    samples = noisy(random.Random(2), 9)
    assert fit_with_intervals(samples) == fit_with_intervals(samples)


def test_a_pace_counts_the_waits_that_a_median_would_not_see():
    batches = [(1.0, 10)] * 6 + [(10.0, 10)] * 2
    pace, (low, high) = fit_pace(batches)
    assert pace == pytest.approx(0.325)
    assert 0.1 <= low < pace < high <= 1.0
