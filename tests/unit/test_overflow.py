"""Test that overflows and changes of scale keep the law and the units of residuals."""

import random

import pytest
import torch

from sparsync import ConfigurationError, Correction, connect
from sparsync.errors import NonFiniteGradientError
from sparsync.feedback.reducer import Reducer
from sparsync.feedback.reducer_state import reducer_state, rescale_, rescaled_key, restore_reducer
from sparsync.presets import resolve
from sparsync.transports.driver import run
from sparsync.transports.sim import simulate
from sparsync.units import plan_units
from tests.contracts.table import ALGORITHMS
from tests.draws import noise
from tests.tables import cases

SCALES = [8.0, 1.0, 2.0, 65536.0, 65536.0, 32768.0, 0.25, 0.25, 4096.0, 4096.0]

# codecs whose random rounding depends on all bits of the message, and hence on the scale
DRAWN = ("sparcml, error", "sparcml, reduced")
ROUND_AT_RANDOM = [n for n in ALGORITHMS if "qsgd" in n or n.startswith(DRAWN) or n == "sparcml"]

ALL = Correction(momentum=0.9, weight_decay=0.01, clip=1.0, clip_norm="previous")
CORRECTIONS = {"plain": None, "corrected": ALL, "clipped": Correction(clip=1.0)}


def one_unit():
    return plan_units([("a", torch.zeros(150)), ("b", torch.zeros(250))])


def averages(name, scales, correction=None):
    """Train on noise multiplied by scales; return every average divided by its scale."""

    async def program(comm):
        reducer = Reducer(comm, one_unit(), ALGORITHMS[name], 0.08, correction=correction)
        found = []
        for step, scale in enumerate(scales):
            rescale_(reducer, scale)
            gradient = noise(400, seed=1000 * step + comm.rank) * scale
            await reducer.reduce([gradient], [torch.ones(400)])
            found.append(gradient / scale)
        return torch.stack(found)

    return simulate(program, 3).results


@pytest.mark.fast(12)
@cases(
    *((name, "plain") for name in ALGORITHMS if name not in ROUND_AT_RANDOM),
    *(("oktopk", correction) for correction in CORRECTIONS if correction != "plain"),
)
def test_a_change_of_scale_changes_no_bit(name, correction):
    plain = averages(name, [1.0] * len(SCALES), CORRECTIONS[correction])
    assert torch.equal(plain[0], averages(name, SCALES, CORRECTIONS[correction])[0])
    assert bool(plain[0].any())


def integers(step, rank, size):
    generator = torch.Generator().manual_seed(7 * step + 100_003 * rank)
    return torch.randint(-9, 10, (size,), generator=generator).float()


async def overflowing(comm, algorithm, steps, seed=0):
    """Train on whole numbers with a scaler like torch's; check the law on every step."""
    size, scale, good = 60, 2.0**10, 0
    units = plan_units([("a", torch.zeros(23)), ("b", torch.zeros(37))])
    reducer = Reducer(comm, units, algorithm, 0.1)
    draw = random.Random(seed)  # the same on all ranks
    fed, arrived, skipped = torch.zeros(size), torch.zeros(size), 0
    for step in range(steps):
        rescale_(reducer, scale)
        gradient = integers(step, comm.rank, size)
        scaled = gradient * scale
        broken = draw.random() < 0.2
        culprit, value = draw.randrange(comm.world_size), draw.choice(["inf", "-inf", "nan"])
        where = draw.randrange(size)
        if broken and comm.rank == culprit:
            scaled[where] = float(value)
        kept = reducer.residuals[0].value
        before = torch.zeros(size) if kept is None else kept.clone()
        try:
            await reducer.reduce([scaled])
        except NonFiniteGradientError:
            reducer.skip()
            assert broken, f"step {step} was refused, but all was finite"
            after = reducer.residuals[0].value
            assert torch.equal(before, torch.zeros(size) if after is None else after)
            scale, good, skipped = max(scale / 2, 2.0**-6), 0, skipped + 1
        else:
            assert not broken, f"step {step} was applied in spite of rank {culprit}'s {value}"
            fed, arrived = fed + gradient, arrived + scaled / scale * comm.world_size
            good += 1
            if good % 5 == 0:
                scale = min(scale * 2, 2.0**16)
        left = reducer.residuals[0].value
        left = torch.zeros(size) if left is None else left / reducer.scale
        missing = fed - left  # sum over ranks(fed) == total + sum over ranks(residual)
        everyone = torch.stack(await comm.allgather(missing, "verify")).sum(0)
        assert torch.equal(everyone, arrived), f"step {step}: mass appeared or was lost"
    return skipped, reducer.skipped, reducer.step


OVERFLOWING = ["budgeted", "oktopk", "halving", "gtopk", "topkdsa", "allgather"]


@pytest.mark.fast(3)
@pytest.mark.parametrize("name", OVERFLOWING)
def test_random_overflows_lose_nothing(name):
    results = simulate(lambda comm: overflowing(comm, ALGORITHMS[name], 80), 4).results
    assert len(set(results)) == 1, "ranks skipped different steps"
    skipped, counted, steps = results[0]
    assert skipped == counted > 10
    assert steps == 80


# ---- one change of scale --------------------------------------------------------------------------


def solo(correction=None, steps=2):
    reducer = Reducer(connect(), one_unit(), ALGORITHMS["oktopk"], 0.1, correction=correction)
    for step in range(steps):
        run(reducer.reduce([noise(400, seed=step)]))
    return reducer


def test_residual_velocity_and_thresholds_follow_the_scale():
    reducer = solo(Correction(momentum=0.5))
    residual, velocity = reducer.residuals[0].value.clone(), reducer.corrector.velocities[0].clone()
    key = reducer.selectors[0].state.threshold_key
    rescale_(reducer, 8.0)
    assert torch.equal(reducer.residuals[0].value, 8 * residual)
    assert torch.equal(reducer.corrector.velocities[0], 8 * velocity)
    assert reducer.selectors[0].state.threshold_key == rescaled_key(key, 8.0, torch.float32) > key
    rescale_(reducer, 1.0)
    assert torch.equal(reducer.residuals[0].value, residual)
    assert reducer.selectors[0].state.threshold_key == key


def test_a_refused_step_returns_to_the_rescaled_thresholds():
    reducer = solo()
    rescale_(reducer, 4.0)
    state = reducer.selectors[0].state
    with pytest.raises(NonFiniteGradientError):
        run(reducer.reduce([torch.full((400,), torch.inf)]))
    reducer.refuse()
    assert reducer.selectors[0].state == state


def test_a_factor_that_is_no_power_of_two_rounds_once():
    reducer = solo()
    residual = reducer.residuals[0].value.clone()
    rescale_(reducer, 3.0)
    off = (reducer.residuals[0].value.double() - 3 * residual.double()).abs()
    assert bool((off <= 2**-24 * 3 * residual.double().abs()).all())


@pytest.mark.parametrize("name", OVERFLOWING)
def test_a_residual_that_cannot_follow_the_scale_overflows_on_all_ranks(name):
    async def program(comm):
        reducer = Reducer(comm, one_unit(), ALGORITHMS[name], 0.1)
        for step in range(6):
            if step == 3 and comm.rank == 1:  # in units of 2^10: far from the limit of training
                reducer.residuals[0].value[200] = 2e38
            kept = reducer.residuals[0].value.clone() if step else None
            rescale_(reducer, 2.0**11 if step == 3 else 2.0**10)
            generator = torch.Generator().manual_seed(100 * step + comm.rank)
            try:
                await reducer.reduce([torch.randn(400, generator=generator)])
            except NonFiniteGradientError:
                reducer.skip()
                assert step == 3
                scale = 1.0 if comm.rank == 1 else 2.0
                assert torch.equal(reducer.residuals[0].value, kept * scale)
                assert reducer.scale == 2.0**10 * scale
        return reducer.skipped, reducer.step, reducer.overflows

    assert simulate(program, 3).results == [(1, 6, False)] * 3


def test_an_overflow_of_the_residual_itself_is_refused_and_changes_nothing():
    reducer = solo()
    rescale_(reducer, 0.25)
    reducer.residuals[0].value[200] = 2e38
    before = reducer_state(reducer)
    with pytest.raises(ConfigurationError, match="residual of 'b' overflows when the scale goes"):
        rescale_(reducer, 1.0)
    after = reducer_state(reducer)
    assert torch.equal(before["residual"]["b"], after["residual"]["b"])
    assert after["scale"] == 0.25
    assert after["selectors"] == before["selectors"]


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan"), True, "2", None])
def test_what_is_no_scale_is_refused(scale):
    with pytest.raises(ConfigurationError, match="give a finite number > 0"):
        rescale_(solo(), scale)


@pytest.mark.parametrize("keep", [False, True])
def test_a_state_remembers_its_scale(keep):
    saved, loaded = solo(), solo(steps=1)
    residual = saved.residuals[0].value.clone()
    rescale_(saved, 1024.0)
    run(restore_reducer(loaded, reducer_state(saved), keep_scale=keep))
    assert loaded.scale == (1024.0 if keep else 1.0)
    assert torch.equal(loaded.residuals[0].value, residual * loaded.scale)


def test_units_of_several_dtypes_are_rescaled():
    units = plan_units([("a", torch.zeros(9)), ("b", torch.zeros(9, dtype=torch.float64))])
    reducer = Reducer(connect(), units, resolve("allgather"), 0.3)
    run(reducer.reduce([torch.arange(9.0), torch.arange(9.0, dtype=torch.float64)]))
    before = [residual.value.clone() for residual in reducer.residuals]
    rescale_(reducer, 16.0)
    for old, new in zip(before, reducer.residuals, strict=True):
        assert torch.equal(new.value, 16 * old)
        assert bool(old.any())
