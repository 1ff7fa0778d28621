"""Compare momentum correction, masking, decay, local clipping and warm-up with dense references."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from sparsync.errors import ConfigurationError, NonFiniteGradientError
from sparsync.feedback.correction import Correction, Corrector
from sparsync.feedback.reducer import Reducer
from sparsync.feedback.reducer_state import reducer_state, restore_reducer
from sparsync.feedback.schedule import DGC_RAMP, Warmup
from sparsync.presets import resolve
from sparsync.sparse import SparseVector
from sparsync.transports.sim import simulate
from sparsync.units import plan_units
from tests.draws import noise

SIZE, STEPS, RANKS = 60, 50, 4


def gradient(rank: int, step: int, weights: torch.Tensor) -> torch.Tensor:
    """Return a local gradient of a noisy quadratic, which depends on the weights."""
    own = noise(SIZE, seed=step * 100 + rank)
    return 0.2 * weights + own


def trained(correction, density=1.0, ranks=RANKS, warmup=None) -> list[torch.Tensor]:
    """Train with plain SGD on corrected averages; return the weights after every step."""

    async def program(comm):
        weights = torch.linspace(-1, 1, SIZE)
        units = plan_units([("a", torch.zeros(20)), ("b", torch.zeros(40))], unit_bytes=80)
        algorithm, history = resolve("allgather", cap=None), []
        reducer = Reducer(comm, units, algorithm, density, warmup, correction)
        for step in range(STEPS):
            pieces = list(gradient(comm.rank, step, weights).split([20, 40]))
            await reducer.reduce(pieces, list(weights.split([20, 40])))
            weights = weights - 0.05 * torch.cat(pieces)
            history.append(weights.clone())
        return history

    results = simulate(program, ranks).results
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    return results[0]


def reference(**options) -> list[torch.Tensor]:
    """Train in the same way with torch's SGD on the dense average."""
    weights = torch.nn.Parameter(torch.linspace(-1, 1, SIZE))
    optimizer = torch.optim.SGD([weights], lr=0.05, **options)
    history = []
    for step in range(STEPS):
        local = [gradient(rank, step, weights.detach()) for rank in range(RANKS)]
        weights.grad = torch.stack(local).sum(0) / RANKS
        optimizer.step()
        history.append(weights.detach().clone())
    return history


def assert_equal(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for step, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=f"step {step}")


@pytest.mark.fast(2)
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_density_1_without_masking_is_momentum_sgd(nesterov, decay):
    correction = Correction(0.9, nesterov=nesterov, masking=False, weight_decay=decay)
    expected = reference(momentum=0.9, nesterov=nesterov, weight_decay=decay)
    assert_equal(trained(correction), expected)


def test_density_1_with_masking_is_plain_sgd():
    assert_equal(trained(Correction(0.9)), reference())


def test_what_is_exchanged_whole_keeps_its_velocity():
    dense = trained(Correction(0.9), density=0.1, warmup=Warmup(STEPS))
    assert_equal(dense, reference(momentum=0.9))


@pytest.mark.parametrize("algorithm", ["allgather", "gtopk", "halving", "budgeted", "oktopk"])
def test_only_what_a_rank_has_sent_loses_its_velocity(algorithm):
    """A rank that drops or rounds a sum takes entries of others back, which it has not sent."""

    async def program(comm):
        units, selected = plan_units([("a", torch.zeros(400))]), []
        reducer = Reducer(comm, units, resolve(algorithm), 0.05, None, Correction(0.9))
        select = reducer._select
        reducer._select = lambda unit: selected.append(select(unit)) or selected[-1]
        for step in range(6):
            gradient = noise(400, seed=100 * step + comm.rank)
            expected = 0.9 * reducer.corrector.velocities[0] + gradient
            await reducer.reduce([gradient])
            velocity, kept = reducer.corrector.velocities[0], reducer.residuals[0].value
            lost = ((velocity == 0) & (expected != 0)).nonzero().flatten()
            assert lost.numel()
            mine = selected[-1]
            assert set(lost.tolist()) <= set(mine.indices.tolist())
            values = torch.zeros(400).index_put_((mine.indices,), mine.values)
            assert ((values - kept)[lost].sign() == values[lost].sign()).all()

    simulate(program, 4)


def test_a_rank_keeps_the_velocity_of_what_it_drops_in_gtopk():
    async def program(comm):
        units = plan_units([("a", torch.zeros(4))])
        reducer = Reducer(comm, units, resolve("gtopk"), 0.25, None, Correction(0.9))
        await reducer.reduce([torch.tensor([[5.0, 1, 0, 0.5], [0, 0.5, 0, 3]][comm.rank])])
        return reducer.corrector.velocities[0].tolist(), reducer.residuals[0].value.tolist()

    first, second = simulate(program, 2).results
    assert first == ([0, 1, 0, 0.5], [0, 1, 0, 3.5]) and second == ([0, 0.5, 0, 0], [0, 0.5, 0, 0])


@pytest.mark.parametrize("parts", [([0], [1]), ([1], [0]), ([1, 0],)])
def test_units_that_are_exchanged_one_by_one_have_the_velocities_of_a_whole_step(parts):
    correction, apart = Correction(0.9), replace(resolve("allgather"), shared=False)

    async def program(comm):
        units = plan_units([("a", torch.zeros(20)), ("b", torch.zeros(40))], unit_bytes=80)
        whole, divided = (Reducer(comm, units, apart, 0.1, None, correction) for _ in range(2))
        for step in range(5):
            pieces = gradient(comm.rank, step, torch.zeros(SIZE)).split([20, 40])
            expected = [piece.clone() for piece in pieces]
            await whole.reduce(expected)
            for part in parts:
                mine = [pieces[unit].clone() for unit in part]
                await divided.reduce(mine, units=part)
                assert all(map(torch.equal, mine, (expected[unit] for unit in part)))
            velocities = whole.corrector.velocities
            assert all(map(torch.equal, divided.corrector.velocities, velocities))
            assert [int((v == 0).sum()) for v in velocities] == [2, 4], "those of delivered entries"
        assert divided.step == 5

    simulate(program, 2)


@pytest.mark.parametrize("nesterov", [False, True])
def test_below_density_1_it_is_algorithm_4(nesterov):
    """The paper's algorithm written out densely, on one rank."""
    correction = Correction(0.9, nesterov=nesterov, weight_decay=0.05)
    mine = trained(correction, density=0.1, ranks=1)
    weights = torch.linspace(-1, 1, SIZE)
    velocity, residual = torch.zeros(SIZE), torch.zeros(SIZE)
    entries = (2, 4)
    for step in range(STEPS):
        g = gradient(0, step, weights) + 0.05 * weights
        if nesterov:
            velocity = 0.9 * (velocity + g)
            residual = residual + velocity + g
        else:
            velocity = 0.9 * velocity + g
            residual = residual + velocity
        mask = torch.ones(SIZE)
        # two units share k according to where the last step's largest entries were, so they get
        # equal counts
        moved = (mine[step] - (mine[step - 1] if step else torch.linspace(-1, 1, SIZE))) != 0
        assert int(moved.sum()) == sum(entries)
        for start, stop in ((0, 20), (20, 60)):
            k = int(moved[start:stop].sum())
            mask[start + residual[start:stop].abs().topk(k).indices] = 0
        weights = weights - 0.05 * residual * (1 - mask)
        residual, velocity = residual * mask, velocity * mask
        torch.testing.assert_close(mine[step], weights, rtol=1e-5, atol=1e-5)


def test_clipping_equals_torchs_on_one_rank():
    mine = trained(Correction(clip=2.0), ranks=1)
    weights = torch.nn.Parameter(torch.linspace(-1, 1, SIZE))
    for step in range(STEPS):
        weights.grad = gradient(0, step, weights.detach())
        norm = torch.nn.utils.clip_grad_norm_([weights], 2.0)
        assert norm > 2.0, "nothing to clip"
        with torch.no_grad():
            weights -= 0.05 * weights.grad
        torch.testing.assert_close(mine[step], weights.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ranks", [4, 16, 64])
def test_independent_gradients_are_clipped_to_the_global_norm(ranks):
    """The average of N clipped independent gradients has the norm ``clip``."""
    local = noise(ranks, 100_000, seed=0)
    clip = float(local.mean(0).norm())
    scales = [Correction(clip=clip).clip_scale(float(g.norm()), ranks) for g in local]
    assert all(0.97 < scale <= 1.0 for scale in scales)


def corrector_of(correction, dtype=torch.float32):
    return Corrector(correction, plan_units([("w", torch.zeros(2, dtype=dtype))]), world_size=1)


def test_the_previous_norm_is_this_norm_one_step_later():
    corrector = corrector_of(Correction(clip=1.0, clip_norm="previous"))
    assert corrector.waits
    first = [torch.tensor([3.0]), torch.tensor([4.0])]
    corrector.measure(first)
    for start, piece in enumerate(first):
        corrector.correct_(0, start, piece)
    assert torch.cat(first).tolist() == pytest.approx([0.6, 0.8])
    none = [SparseVector.empty(2, first[0])]
    corrector.retain(none, none)
    assert not corrector.waits
    second = torch.tensor([10.0])
    corrector.correct_(0, 0, second)  # by the norm of the previous step, 5
    assert second.tolist() == pytest.approx([2.0])
    corrector.restore()  # a refused step leaves no trace
    assert corrector.previous_norm == pytest.approx(5.0)


def test_a_refused_step_leaves_velocity_and_norm_and_both_are_saved():
    async def program(comm):
        units = plan_units([("a", torch.zeros(SIZE))])
        correction = Correction(0.9, nesterov=True, clip=1.0, clip_norm="previous")

        def make():
            return Reducer(comm, units, resolve("allgather"), 0.1, None, correction)

        refusing, other = make(), make()
        for step in range(8):
            mine = gradient(comm.rank, step, torch.zeros(SIZE))
            if step == 3:
                poisoned = mine.clone()
                poisoned[7] = math.nan if comm.rank == 1 else 0.0
                with pytest.raises(NonFiniteGradientError):
                    await refusing.reduce([poisoned])
                refusing.refuse()
            if step == 5:
                other = make()
                await restore_reducer(other, reducer_state(refusing))
            (one,) = await refusing.reduce([mine.clone()])
            (two,) = await other.reduce([mine.clone()])
            assert torch.equal(one.to_dense(), two.to_dense()), step
        assert torch.equal(*(reducer.corrector.velocities[0] for reducer in (refusing, other)))

    simulate(program, 2)


def test_the_ramp_has_its_densities():
    async def program(comm):
        units = plan_units([("a", torch.zeros(2000)), ("b", torch.zeros(2000))], unit_bytes=8000)
        reducer = Reducer(comm, units, resolve("allgather"), 0.001, Warmup(10, DGC_RAMP))
        counts = []
        for step in range(12):
            generator = torch.Generator().manual_seed(step)
            averages = await reducer.reduce([torch.randn(2000, generator=generator) for _ in units])
            counts.append(sum(average.nnz for average in averages))
        return counts

    counts = simulate(program, 1).results[0]
    assert counts == [1000, 1000, 250, 250, 62, 62, 16, 16, 4, 4, 4, 4]


@pytest.mark.parametrize(("value", "step"), [(math.inf, 2), (math.inf, 3), (-math.inf, 3)])
def test_quantised_selection_refuses_infinity_on_either_turn(value, step):
    async def program(comm):
        units = plan_units([("a", torch.zeros(SIZE))])
        reducer = Reducer(comm, units, resolve("redsync-quantized"), 0.1, None, Correction(0.9))
        for number in range(6):
            mine = gradient(comm.rank, number, torch.zeros(SIZE))
            if number == step:
                mine[5] = value
                with pytest.raises(NonFiniteGradientError):
                    await reducer.reduce([mine])
                reducer.skip()
            else:
                await reducer.reduce([mine])
        assert bool(reducer.residuals[0].accumulated.isfinite().all())

    simulate(program, 2)


def test_decay_without_weights_is_refused():
    with pytest.raises(ConfigurationError, match="needs the weights"):
        corrector_of(Correction(weight_decay=0.1)).correct_(0, 0, torch.ones(2))
