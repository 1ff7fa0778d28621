"""D-PSGD, SGP and BMUF, each against its own equations written with matrices."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsync import ConfigurationError, simulate
from sparsync.averaging.gossip import Dpsgd, Exponential, Ring, Sgp
from sparsync.averaging.outer import OUTER_SETTINGS, OuterStep
from sparsync.testing import check_averager
from tests.mixing import RandomPairs, mixing_matrix

from .test_graphs import Star

Bmuf = partial(OuterStep, **OUTER_SETTINGS["bmuf"])
SIZE = 6
STEPS = 9
WORLD_SIZES = [1, 2, 3, 4, 5, 8]


def update(rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(SIZE, generator=generator, dtype=torch.float64)


def updates(world_size, step):
    return torch.stack([update(rank, step) for rank in range(world_size)])


def trained(make, world_size, *, steps=STEPS, reload_at=None, idle_from=STEPS, conclude=False):
    """Models `[steps, P, n]` after every step; ranks move by ``update``, at last by nothing."""

    async def program(comm):
        averager, vector, models = make(), torch.zeros(SIZE, dtype=torch.float64), []
        await averager.begin(comm, vector, 0)
        for step in range(steps):
            if step == reload_at:
                saved, averager = averager.state_dict(), make()
                averager.load_state_dict(saved)
                await averager.begin(comm, vector, step)
            if step < idle_from:
                vector = vector + update(comm.rank, step)
            before = vector.clone()
            averaged = await averager.average(comm, vector, step)
            assert torch.equal(vector, before), "the vector that was handed over changed"
            vector = averaged
            models.append(vector)
        if conclude:
            models.append(await averager.conclude(comm, vector, steps))
        return torch.stack(models)

    return torch.stack(simulate(program, world_size).results, dim=1)


def push_sum(graph, world_size, steps=STEPS, idle_from=STEPS):
    """Algorithm 1 of SGP with matrices: z after every step, and the last weights."""
    x = torch.zeros(world_size, SIZE, dtype=torch.float64)
    w, models = torch.ones(world_size, dtype=torch.float64), []
    for step in range(steps):
        matrix = mixing_matrix(graph, world_size, step)
        x = matrix @ (x + updates(world_size, step) * (step < idle_from))
        w = matrix @ w
        models.append(x / w[:, None])
    return torch.stack(models), w


def test_mean_preserving_schemes_keep_the_contract():
    for make in (partial(Sgp, neighbours=9), partial(Sgp, graph=RandomPairs())):
        assert check_averager(make) < 1e-12


@pytest.mark.parametrize("nesterov", [False, True])
def test_bmuf_keeps_the_contract_but_moves_the_mean(nesterov):
    assert check_averager(partial(Bmuf, nesterov=nesterov), preserves_mean=False) > 0.01


def test_sgp_on_unequal_ranks_keeps_the_contract_but_not_the_plain_mean():
    assert check_averager(partial(Sgp, graph=Star()), preserves_mean=False) > 0.01


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("mixing_steps", [1, 2])
def test_dpsgd_multiplies_by_the_mixing_matrix(world_size, mixing_steps):
    matrix = torch.linalg.matrix_power(mixing_matrix(Ring(), world_size, 0), mixing_steps)
    models, x = trained(partial(Dpsgd, mixing_steps=mixing_steps), world_size), 0.0
    for step in range(STEPS):
        x = matrix @ (x + updates(world_size, step))
        torch.testing.assert_close(models[step], x)


@pytest.mark.parametrize("world_size", [2, 3])
def test_dpsgd_on_a_ring_of_neighbours_only_is_an_allreduce(world_size):
    for models in trained(Dpsgd, world_size):
        assert all(torch.equal(m, models[0]) for m in models)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("neighbours", [1, 2, 4])
def test_sgp_is_push_sum_on_the_exponential_graph(world_size, neighbours):
    models = trained(partial(Sgp, neighbours=neighbours), world_size)
    expected, weights = push_sum(Exponential(neighbours), world_size)
    torch.testing.assert_close(models, expected)
    torch.testing.assert_close(weights, torch.ones_like(weights))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_sgp_takes_its_weights_into_account(world_size):
    """Updates enter the numerator undivided: Algorithm 1 to the letter where weights differ."""
    expected, weights = push_sum(Star(), world_size)
    torch.testing.assert_close(trained(partial(Sgp, graph=Star()), world_size), expected)
    assert world_size <= 2 or (weights - 1).abs().max() > 0.2


@pytest.mark.parametrize("world_size", [3, 5, 8])
def test_sgp_with_unequal_weights_converges_to_the_true_mean(world_size):
    models = trained(partial(Sgp, graph=Star()), world_size, steps=80, idle_from=STEPS)
    mean = sum(updates(world_size, step) for step in range(STEPS)).mean(0)
    torch.testing.assert_close(models[-1], mean.expand(world_size, SIZE))
    plain = torch.eye(world_size, dtype=torch.float64)  # without weights: another limit
    for step in range(80):
        plain = mixing_matrix(Star(), world_size, step) @ plain
    assert (plain.mean(1) - 1 / world_size).abs().max() > 0.05


@pytest.mark.parametrize("graph", [Exponential(), Star()], ids=["exponential", "star"])
def test_sgp_concludes_with_the_true_mean(graph):
    models = trained(partial(Sgp, graph=graph), 5, conclude=True)
    mean = sum(updates(5, step) for step in range(STEPS)).mean(0)
    torch.testing.assert_close(models[-1], mean.expand(5, SIZE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sgp_keeps_the_dtype_and_its_weight_stays_one(dtype):
    async def program(comm):
        averager, vector = Sgp(neighbours=2), torch.full((3,), comm.rank, dtype=dtype)
        for step in range(1000):
            vector = await averager.average(comm, vector, step)
        assert vector.dtype == dtype
        assert averager.state.weight == pytest.approx(1, abs=1e-12)
        return vector.float()

    for vector in simulate(program, 5).results:
        torch.testing.assert_close(vector, torch.full((3,), 2.0), rtol=0.02, atol=0)


def block_filter(world_size, period, eta, zeta, nesterov):
    """BMUF as its paper has it, W(t), G(t) and Delta(t); the model after every block."""
    shared, start, change, blocks = np.zeros(SIZE), np.zeros(SIZE), np.zeros(SIZE), []
    for block in range(STEPS // period):
        steps = range(block * period, (block + 1) * period)
        moved = np.mean([sum(update(r, s).numpy() for s in steps) for r in range(world_size)], 0)
        gradient = (start + moved) - start
        change = eta * change + zeta * gradient
        shared = shared + change
        start = shared + eta * change if nesterov else shared
        blocks.append(start)
    return np.stack(blocks)


@given(
    world_size=st.integers(1, 5),
    period=st.integers(1, 4),
    momentum=st.floats(0.01, 0.99),
    outer_lr=st.floats(0.1, 2),
    nesterov=st.booleans(),
)
def test_bmuf_filters_as_published(world_size, period, momentum, outer_lr, nesterov):
    make = partial(Bmuf, period=period, momentum=momentum, outer_lr=outer_lr, nesterov=nesterov)
    models = trained(make, world_size)[period - 1 :: period]
    expected = block_filter(world_size, period, momentum, outer_lr, nesterov)
    for rank in range(world_size):
        torch.testing.assert_close(models[:, rank], torch.from_numpy(expected))


@pytest.mark.parametrize("world_size", [1, 4])
def test_bmuf_takes_the_momentum_of_its_paper(world_size):
    given_, default = partial(Bmuf, period=2, momentum=1 - 1 / world_size), partial(Bmuf, period=2)
    assert torch.equal(trained(given_, world_size), trained(default, world_size))


@pytest.mark.parametrize(
    "make",
    [Dpsgd, Sgp, partial(Sgp, graph=Star()), partial(Bmuf, period=2), partial(Bmuf, nesterov=True)],
)
@pytest.mark.parametrize("reload_at", [0, 3, 4])
def test_saving_and_loading_changes_nothing(make, reload_at):
    assert torch.equal(trained(make, 4), trained(make, 4, reload_at=reload_at))


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize(
    ("make", "sent"),  # per step, given the bytes of a model
    [
        (Dpsgd, lambda p, nbytes: min(2, p - 1) * nbytes),
        (partial(Dpsgd, mixing_steps=3), lambda p, nbytes: 3 * min(2, p - 1) * nbytes),
        (Sgp, lambda p, nbytes: min(1, p - 1) * (nbytes + 8)),
        (partial(Sgp, neighbours=2), lambda p, nbytes: min(2, p - 1) * (nbytes + 8)),
    ],
)
def test_bytes_per_step_are_the_stated_cost(make, sent, world_size):
    async def program(comm):
        averager, vector = make(), torch.zeros(101)
        for step in range(4):
            vector = await averager.average(comm, vector, step)
            comm.ledger.begin_step(step + 1)
            last, expected = comm.ledger.last_step, sent(comm.world_size, 4 * 101)
            assert last.sent == last.received == last.parts.value == expected

    simulate(program, world_size)


def test_bmuf_communicates_when_a_block_closes():
    async def program(comm):
        averager, vector, sent = Bmuf(period=3), torch.zeros(8), []
        await averager.begin(comm, vector, 0)
        for step in range(6):
            before = comm.ledger.total().sent
            vector = await averager.average(comm, vector, step)
            sent.append(comm.ledger.total().sent - before)
        return sent

    assert simulate(program, 4).results == [[0, 0, 48, 0, 0, 48]] * 4  # 2 n (P - 1) / P floats


@pytest.mark.parametrize("make", [Dpsgd, Sgp, partial(Bmuf, period=1)])
def test_an_empty_model_is_legal(make):
    async def program(comm):
        averager = make()
        await averager.begin(comm, torch.zeros(0), 0)
        return (await averager.average(comm, torch.zeros(0), 0)).numel()

    assert simulate(program, 3).results == [0, 0, 0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(Dpsgd, mixing_steps=0), "mixing_steps is 0; give at least 1"),
        (partial(Sgp, neighbours=0), "0 neighbours per step; give at least 1"),
    ],
)
def test_arguments_that_cannot_work(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()
