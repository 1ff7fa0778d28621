"""A density that follows signal and noise: alike on all ranks, within bounds, exact on resuming."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsync import ConfigurationError
from sparsync.feedback.reducer import Reducer
from sparsync.feedback.schedule import AdaptiveDensity, Warmup
from sparsync.feedback.state import reducer_state, restore_reducer
from sparsync.monitoring import Measured
from sparsync.presets import resolve
from sparsync.published.oktopk import oktopk
from sparsync.transports.sim import simulate
from sparsync.units import plan_units

SIZE, RANKS = 6000, 4
RULE = AdaptiveDensity(0.02, low=0.005, high=0.1, period=2)


def gradient(rank: int, step: int, signal: float = 1.0) -> torch.Tensor:
    common, own = (torch.Generator().manual_seed(1000 * step + seed) for seed in (999, rank))
    return signal * torch.randn(SIZE, generator=common) + torch.randn(SIZE, generator=own)


def make(comm, unit_bytes=None, algorithm=None, density=RULE, **options):
    units = plan_units([("a", torch.zeros(4000)), ("b", torch.zeros(2000))], unit_bytes)
    return Reducer(comm, units, algorithm or resolve("budgeted"), density, **options)


async def step_of(reducer, step, signal=1.0):
    pieces = gradient(reducer.comm.rank, step, signal).split([u.size for u in reducer.units])
    return await reducer.reduce([piece.contiguous() for piece in pieces])


def densities(signal, steps=12, ranks=RANKS, **options) -> list[float]:
    async def program(comm):
        reducer, seen = make(comm, **options), []
        for step in range(steps):
            seen.append(reducer.plan.density)
            averages = await step_of(reducer, step, signal)
            if step >= options.get("warmup", Warmup()).steps:
                total = sum(average.nnz for average in averages)
                assert total == sum(unit.entries(seen[-1]) for unit in reducer.units)
        return seen

    results = simulate(program, ranks).results
    assert all(other == results[0] for other in results), "ranks must agree bit for bit"
    return results[0]


numbers = st.floats(0, 1e9) | st.just(math.inf)


@given(st.floats(0.005, 0.1), numbers, numbers, st.integers(1, 1000))
def test_a_step_is_small_and_within_bounds(density, xi, ratio, ranks):
    then = RULE.next(density, Measured(xi, ratio), ranks)
    assert RULE.low <= then <= RULE.high
    assert 1 / RULE.pace - 1e-9 <= then / density <= RULE.pace + 1e-9


@given(st.floats(0.005, 0.1), numbers, numbers)
def test_more_signal_never_means_fewer_entries(density, one, other):
    few, many = (RULE.next(density, Measured(1.0, ratio), 4) for ratio in sorted((one, other)))
    assert few <= many


def test_xi_above_the_number_of_ranks_raises_the_density():
    assert RULE.next(0.02, Measured(8.0, 0.0), 4) > 0.02
    assert RULE.next(0.02, Measured(3.9, 0.0), 4) < 0.02
    assert RULE.next(0.02, Measured(3.9, 1.0), 4) == 0.02


@pytest.mark.parametrize("unit_bytes", [None, 4])
def test_signal_raises_and_noise_lowers_it(unit_bytes):
    strong, weak = (densities(signal, unit_bytes=unit_bytes) for signal in (3.0, 0.0))
    assert strong[-1] > 2 * RULE.at_equal and weak[-1] < RULE.at_equal / 2
    assert strong[0] == RULE.at_equal != strong[1] == strong[2] != strong[3]  # every second step


def test_a_dense_warmup_comes_first():
    found = densities(3.0, steps=10, warmup=Warmup(5))
    assert found[:7] == [RULE.at_equal] * 7 and found[7] > RULE.at_equal


@pytest.mark.parametrize("unit_bytes", [None, 4])
def test_a_run_resumes_bit_for_bit(unit_bytes):
    async def program(comm):
        first, second = (make(comm, unit_bytes, oktopk()) for _ in range(2))
        for step in range(5):
            await step_of(first, step, 3.0)
        assert first.plan.density != RULE.at_equal
        await restore_reducer(second, reducer_state(first))
        for step in range(5, 10):
            one, two = [await step_of(reducer, step, 3.0) for reducer in (first, second)]
            for a, b in zip(one, two, strict=True):
                assert torch.equal(a.to_dense(), b.to_dense())
        return first.plan.density == second.plan.density

    assert all(simulate(program, RANKS).results)


def test_a_state_of_another_density_is_refused():
    async def program(comm):
        reducer = make(comm)
        for density in (0.5, None, "0.02"):
            state = {**reducer_state(reducer), "density": density}
            with pytest.raises(
                ConfigurationError, match=r"expected (one from 0\.005 to 0\.1|float)"
            ):
                await restore_reducer(make(comm), state)
        state = {**reducer_state(reducer), "density": 0.05}
        with pytest.raises(ConfigurationError, match="expected 300"):
            await restore_reducer(make(comm), state)

    simulate(program, 1)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"low": 0.5}, "ascend in this order"),
        ({"low": 0.0}, "ascend in this order"),
        ({"high": 2.0}, "ascend in this order"),
        ({"period": 0}, "period is 0"),
        ({"pace": 0.5}, "pace is 0.5"),
    ],
)
def test_bad_constants_are_refused(arguments, says):
    with pytest.raises(ConfigurationError, match=says):
        AdaptiveDensity(**arguments)
