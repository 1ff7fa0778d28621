"""Test that ranks agree on which of them are delayed, and that bad text is refused in one line."""

import math
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsync.cli.workloads.delays import Delay, parse_delay
from sparsync.errors import ConfigurationError
from tests.tables import cases, refuses


def waits(text, world_size, steps, seed=0):
    delay, ranks = parse_delay(text), range(world_size)
    return [[delay.seconds(s, rank, world_size, seed) for rank in ranks] for s in range(steps)]


@cases(
    ("none", Delay()),
    ("random:2:0.32", Delay("random", 2, 0.32)),
    ("persistent:3:1", Delay("persistent", 3, 1.0)),
    ("heavytail:1.7:43.5", Delay("heavytail", 1.7, 43.5)),
)
def test_text_is_read(text, delay):
    assert parse_delay(text) == delay


@given(st.integers(1, 9), st.integers(1, 20), st.integers(0, 5))
def test_random_delays_count_distinct_ranks_on_every_step(count, world_size, seed):
    late = min(count, world_size)
    for row in waits(f"random:{count}:0.32", world_size, 5, seed):
        assert sorted(row) == [0] * (world_size - late) + [0.32] * late


def test_random_delays_other_ranks_every_step_and_all_alike():
    rows = waits("random:2:1", 8, 4_000)
    per_rank = [sum(column) for column in zip(*rows, strict=True)]
    assert all(abs(total - 1_000) < 5 * math.sqrt(750) for total in per_rank)  # binomial, P = 1/4
    assert len({tuple(row) for row in rows}) == 28  # all pairs of 8
    assert waits("random:2:1", 8, 9, seed=1) != rows[:9] == waits("random:2:1", 8, 9)


def test_heavytail_is_figure_9_of_wagma():
    delay = parse_delay("heavytail:1.7:43.5")
    seconds = [delay.seconds(step, rank, 50, seed=3) for step in range(400) for rank in range(50)]
    assert 1.7 <= min(seconds) < 1.71
    assert median(seconds) == pytest.approx(1.7 + 41.8 / 250, abs=0.01)
    assert median(seconds) < 2 and max(seconds) == 43.5
    assert 1 <= sum(s == 43.5 for s in seconds) <= 12  # 4 expected
    assert len(set(seconds)) > 19_900  # each rank and step has its own


@refuses(
    ("", "delay is ''; give none, random:COUNT:SECONDS"),
    ("random", "delay is 'random'; give"),
    ("random:2", "e.g. random:2:0.32"),
    ("random:2.5:1", "e.g. random:2:0.32"),
    ("none:1", "delay is 'none:1'"),
    ("slow:1:2", "delay is 'slow:1:2'"),
    ("random:0:1", "COUNT is 0; give at least 1 rank"),
    ("random:1:nan", "SECONDS is nan; give seconds from 0 to a day's"),
    ("persistent:-1:1", "RANK is -1; give a rank >= 0"),
    ("persistent:1:1e9", "SECONDS is 1000000000.0"),
    ("heavytail:2:1", "MAX is 1.0; give at least MIN, 2"),
)
def test_bad_text_is_one_clear_line(text):
    parse_delay(text)


numbers = st.one_of(st.integers(), st.floats()).map(str) | st.text(max_size=5)
kinds = st.sampled_from(["none", "random", "persistent", "heavytail"]) | st.text(max_size=5)


@given(st.text() | st.builds(lambda k, n: ":".join([k, *n]), kinds, st.lists(numbers, max_size=3)))
def test_any_text_is_a_delay_or_a_configuration_error(text):
    try:
        delay = parse_delay(text)
    except ConfigurationError as error:
        assert "\n" not in str(error)
        return
    assert 0 <= delay.seconds(step=7, rank=0, world_size=3, seed=1) <= 86_400
