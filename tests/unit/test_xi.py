"""The estimate of Assumption 1's xi on a sample, against equation 5 written out."""

from __future__ import annotations

import math

import pytest
import torch

from sparsync import ConfigurationError
from sparsync.collectives import OkTopk
from sparsync.feedback.reducer import Reducer
from sparsync.feedback.schedule import Warmup
from sparsync.monitoring import XiProbe
from sparsync.presets import Algorithm, resolve
from sparsync.selection import Exact
from sparsync.transports.sim import simulate
from sparsync.units import plan_units

RANKS = 4
EXACT_OKTOPK = Algorithm("oktopk", Exact, OkTopk)


def gradient(size: int, step: int, rank: int) -> torch.Tensor:
    """A signal that all ranks share, and twice as much noise; magnitudes over three decades."""
    common, own = (torch.Generator().manual_seed(1000 * step + seed) for seed in (999, rank))
    scale = torch.randn(size, generator=torch.Generator().manual_seed(5)).exp()
    return scale * (torch.randn(size, generator=common) + 2 * torch.randn(size, generator=own))


def top(x: torch.Tensor, k: int) -> torch.Tensor:
    kept = torch.zeros_like(x)
    where = x.abs().topk(k).indices
    kept[where] = x[where]
    return kept


def equation_5(size: int, k: int, steps: int) -> list[float]:
    """Run Ok-Topk SGD densely; return xi of every step."""
    residuals, result = torch.zeros(RANKS, size), []
    for step in range(steps):
        gradients = torch.stack([gradient(size, step, rank) for rank in range(RANKS)])
        accumulated = residuals + gradients
        sent = torch.stack([top(row, k) for row in accumulated])
        applied = top(sent.mean(0), k)
        lacking = top(accumulated.mean(0), k) - applied
        result.append(float(lacking.norm() / gradients.mean(0).norm()))
        residuals = accumulated - torch.where(applied != 0, sent, torch.zeros(()))
    return result


def measured(size: int, k: int, steps: int, algorithm: Algorithm = EXACT_OKTOPK, **options):
    """Return what every rank measured on every step."""
    every, sizes = options.pop("every", 64), options.pop("sizes", None)

    async def program(comm):
        units = plan_units([(str(i), torch.zeros(n)) for i, n in enumerate(sizes or [size])], 4)
        reducer = Reducer(comm, units, algorithm, k / size, xi_period=1, **options)
        reducer.monitor.xi.every = every
        seen = []
        probe, measure = reducer.monitor.xi, reducer.monitor.xi.measure
        probe.measure = lambda *arguments: seen.append(measure(*arguments)) or seen[-1]
        for step in range(steps):
            pieces = gradient(size, step, comm.rank).split(sizes or [size])
            await reducer.reduce([piece.contiguous() for piece in pieces])
        return [one for one in seen if one is not None]

    results = simulate(program, RANKS).results
    assert all(other == results[0] for other in results), "ranks must agree bit for bit"
    return results[0]


def test_every_coordinate_gives_equation_5():
    expected = equation_5(3000, 60, steps=6)
    found = [one.xi for one in measured(3000, 60, 6, every=1)]
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("size", "k"), [(6_000, 600), (40_000, 400), (60_000, 6_000)])
def test_a_sample_estimates_xi(size, k):
    """A mean over steps lies within two of the stated deviations of one step."""
    steps = 4
    expected = sum(equation_5(size, k, steps)) / steps
    found = sum(one.xi for one in measured(size, k, steps)) / steps
    assert found == pytest.approx(expected, rel=2 * (64 / k) ** 0.5)


def test_units_are_measured_together_and_in_any_order():
    whole = measured(3000, 60, 3, resolve("allgather"), every=1)
    (first, *_) = measured(3000, 60, 3, resolve("allgather"), every=1, sizes=[1000, 2000])
    assert first.signal_to_noise == pytest.approx(whole[0].signal_to_noise, rel=1e-5)
    assert first.xi != whole[0].xi  # units select for themselves on the first step


def test_signal_and_noise_are_told_apart():
    """Signal 1, noise 4 per rank, 1 in the mean of 4: their squares are as large."""
    found = [one.signal_to_noise for one in measured(20_000, 200, 4, every=1)]
    assert sum(found) / 4 == pytest.approx(1.0, rel=0.15)


def test_rounding_is_part_of_it():
    exact, rounded = (
        measured(4000, 400, 3, a, every=1) for a in (EXACT_OKTOPK, resolve("budgeted"))
    )
    assert rounded[0].xi > 0 and rounded[0].xi == pytest.approx(exact[0].xi, rel=0.05)
    assert rounded[0].xi != exact[0].xi


def test_all_exchanged_lacks_all_but_the_largest():
    """With k = n nothing is missing; nothing is measured while a warm-up runs dense."""
    assert measured(500, 500, 2, resolve("dense"), every=1)[0].xi == pytest.approx(0.0, abs=1e-6)
    assert len(measured(500, 50, 5, every=1, warmup=Warmup(3))) == 2


def test_it_is_off_by_default_and_changes_nothing():
    async def program(comm, period):
        units = plan_units([("a", torch.zeros(500))])
        reducer = Reducer(comm, units, resolve("budgeted"), 0.1, xi_period=period)
        averages = [await reducer.reduce([gradient(500, s, comm.rank)]) for s in range(5)]
        return torch.stack([a.to_dense() for (a,) in averages]), comm.ledger.by_phase()

    (plain, phases), (watched, more) = (
        simulate(lambda comm, p=period: program(comm, p), RANKS).results[0] for period in (None, 2)
    )
    assert torch.equal(plain, watched)
    assert set(more) - set(phases) == {"xi"}


def test_no_gradient_has_no_xi():
    async def program(comm):
        reducer = Reducer(
            comm, plan_units([("a", torch.zeros(90))]), resolve("budgeted"), 0.1, xi_period=1
        )
        await reducer.reduce([torch.zeros(90)])
        return reducer.step

    assert simulate(program, 3).results == [1, 1, 1]


def test_one_rank_has_no_noise_and_lacks_nothing():
    async def program(comm):
        reducer = Reducer(
            comm, plan_units([("a", torch.zeros(900))]), resolve("budgeted"), 0.1, xi_period=1
        )
        probe = reducer.monitor.xi
        probe.every = 1
        seen, measure = [], probe.measure
        probe.measure = lambda *arguments: seen.append(measure(*arguments))
        await reducer.reduce([gradient(900, 0, 0)])
        return seen[0]

    (found,) = simulate(program, 1).results
    assert found.signal_to_noise == math.inf
    assert found.xi < 0.01  # bfloat16


@pytest.mark.parametrize("period", [0, -1, 2.0, True])
def test_bad_periods_are_refused(period):
    with pytest.raises(ConfigurationError, match="xi_period is"):
        XiProbe(period, [])
