"""Test that D-PSGD, SGP and BMUF match their equations; test the graphs and groups of gossip."""

from collections import Counter
from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsync import simulate
from sparsync.published.baselines.gossip import Dpsgd, Exponential, Graph, Ring, Sgp
from sparsync.published.wagma.scheme import default_group_size, group_of
from sparsync.updates import OuterAverager
from sparsync.updates.family import OUTER_SETTINGS
from tests.mixing import mixing_matrix, mixing_steps, partition
from tests.tables import cases

from .average_runs import SIZE, check_resumption, on_all_ranks, update

Bmuf = partial(OuterAverager, **OUTER_SETTINGS["bmuf"])
STEPS = 9
WORLD_SIZES = [1, 2, 3, 5, 8]

world_sizes = st.integers(1, 33)
steps = st.integers(0, 200)


class Star(Graph):
    """A star: rank 0 sends to all, and all send to rank 0, so columns sum to 1, but rows do not."""

    def neighbours(self, rank, world_size, step):
        return list(range(1, world_size)) if rank == 0 else [0]


# ---- graphs ----------------------------------------------------------------------------------------


@given(st.just(Ring()) | st.integers(1, 7).map(Exponential), world_sizes, steps)
def test_who_is_sent_to_expects_it_and_mixing_is_doubly_stochastic(graph, world_size, step):
    to = [graph.neighbours(rank, world_size, step) for rank in range(world_size)]
    for rank in range(world_size):
        sources = graph.sources(rank, world_size, step)
        assert sorted(sources) == [r for r in range(world_size) if rank in to[r]]
        assert len(set(to[rank])) == len(to[rank]) and rank not in to[rank]
    matrix = mixing_matrix(graph, world_size, step)
    for axis in (0, 1):
        torch.testing.assert_close(matrix.sum(axis), torch.ones(world_size, dtype=torch.float64))


@given(world_sizes, st.integers(1, 7), steps)
def test_the_exponential_graph_reaches_all_from_all_in_log_p_steps(world_size, count, start):
    matrix = torch.eye(world_size, dtype=torch.float64)
    for step in range(start, start + (world_size - 1).bit_length()):
        matrix = mixing_matrix(Exponential(count), world_size, step) @ matrix
    assert (matrix > 0).all()


# ---- against the papers' equations -----------------------------------------------------------------


def updates(world_size, step):
    return torch.stack([update(rank, step) for rank in range(world_size)])


def trained(make, world_size, steps=STEPS):
    """Return the models after every step; ranks move by ``update`` in the first STEPS steps only."""

    def moved(rank, step):
        return update(rank, step) * (step < STEPS)

    return on_all_ranks(make, steps, update=moved, world_size=world_size)


def push_sum(graph, world_size):
    """Return z after every step and the last weights, by Algorithm 1 of SGP in matrices."""
    x = torch.ones(world_size, SIZE, dtype=torch.float64)
    w, models = torch.ones(world_size, dtype=torch.float64), []
    for step in range(STEPS):
        matrix = mixing_matrix(graph, world_size, step)
        x, w = matrix @ (x + updates(world_size, step)), matrix @ w
        models.append(x / w[:, None])
    return torch.stack(models), w


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("mixing_steps", [1, 2])
def test_dpsgd_multiplies_by_the_mixing_matrix(world_size, mixing_steps):
    matrix = torch.linalg.matrix_power(mixing_matrix(Ring(), world_size, 0), mixing_steps)
    models, x = trained(partial(Dpsgd, mixing_steps=mixing_steps), world_size), 1.0
    for step in range(STEPS):
        x = matrix @ (x + updates(world_size, step))
        torch.testing.assert_close(models[step], x)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("graph", [Exponential(), Exponential(2), Exponential(4), Star()])
def test_sgp_is_push_sum(graph, world_size):
    """Updates are added to the numerator unscaled, as in Algorithm 1, even where weights differ."""
    expected, weights = push_sum(graph, world_size)
    torch.testing.assert_close(trained(partial(Sgp, graph=graph), world_size)[:-1], expected)
    differ = bool((weights - 1).abs().max() > 0.2)
    assert differ == (isinstance(graph, Star) and world_size > 2)


@pytest.mark.parametrize("world_size", [3, 8])
def test_sgp_with_unequal_weights_converges_to_and_concludes_with_the_true_mean(world_size):
    make = partial(Sgp, graph=Star())
    mean = 1 + sum(updates(world_size, step) for step in range(STEPS)).mean(0)
    for models in (trained(make, world_size, steps=80)[-2], trained(make, world_size)[-1]):
        torch.testing.assert_close(models, mean.expand(world_size, SIZE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sgp_keeps_the_dtype_and_its_weight_stays_one(dtype):
    async def program(comm):
        averager, vector = Sgp(neighbours=2), torch.full((3,), comm.rank, dtype=dtype)
        for step in range(200):
            vector = await averager.average(comm, vector, step)
        assert vector.dtype == dtype
        assert averager.state.weight == pytest.approx(1, abs=1e-12)
        return vector.float()

    for vector in simulate(program, 5).results:
        torch.testing.assert_close(vector, torch.full((3,), 2.0), rtol=0.02, atol=0)


def block_filter(world_size, period, eta, zeta, nesterov):
    """Return BMUF's model after every block, from the paper's W(t), G(t) and Delta(t)."""
    shared, start, change, blocks = np.ones(SIZE), np.ones(SIZE), np.zeros(SIZE), []
    for block in range(STEPS // period):
        steps = range(block * period, (block + 1) * period)
        moved = np.mean([sum(update(r, s).numpy() for s in steps) for r in range(world_size)], 0)
        gradient = (start + moved) - start
        change = eta * change + zeta * gradient
        shared = shared + change
        start = shared + eta * change if nesterov else shared
        blocks.append(start)
    return np.stack(blocks)


@pytest.mark.parametrize("nesterov", [False, True])
@cases((1, 1, 0.3, 2.0), (3, 2, 0.9, 0.5), (4, 3, None, 1.0))
def test_bmuf_filters_as_published(world_size, period, momentum, outer_lr, nesterov):
    make = partial(Bmuf, period=period, momentum=momentum, outer_lr=outer_lr, nesterov=nesterov)
    models = trained(make, world_size)[period - 1 : STEPS : period]
    eta = 1 - 1 / world_size if momentum is None else momentum
    expected = block_filter(world_size, period, eta, outer_lr, nesterov)
    for rank in range(world_size):
        torch.testing.assert_close(models[:, rank], torch.from_numpy(expected))


@pytest.mark.parametrize("make", [Dpsgd, Sgp, partial(Sgp, graph=Star()), partial(Bmuf, period=2)])
@pytest.mark.parametrize("reload_at", [0, 3, 4])
def test_saving_and_loading_changes_nothing(make, reload_at):
    check_resumption(make, STEPS, reload_at, world_size=4)


# ---- cost, and what is refused ---------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@cases(
    (Dpsgd, lambda p, nbytes: min(2, p - 1) * nbytes),
    (partial(Dpsgd, mixing_steps=3), lambda p, nbytes: 3 * min(2, p - 1) * nbytes),
    (Sgp, lambda p, nbytes: min(1, p - 1) * (nbytes + 8)),
    (partial(Sgp, neighbours=2), lambda p, nbytes: min(2, p - 1) * (nbytes + 8)),
)
def test_bytes_per_step_are_the_stated_cost(make, sent, world_size):
    async def program(comm):
        averager, vector = make(), torch.zeros(101)
        for step in range(4):
            vector = await averager.average(comm, vector, step)
            comm.ledger.begin_step(step + 1)
            last, expected = comm.ledger.last_step, sent(comm.world_size, 4 * 101)
            assert last.sent == last.received == last.sent_parts.value == expected

    simulate(program, world_size)


@pytest.mark.parametrize("make", [Dpsgd, Sgp, partial(Bmuf, period=1)])
def test_an_empty_model_is_legal(make):
    async def program(comm):
        averager = make()
        await averager.begin(comm, torch.zeros(0), 0)
        return (await averager.average(comm, torch.zeros(0), 0)).numel()

    assert simulate(program, 3).results == [0, 0, 0]


@st.composite
def group_steps(draw, most=130):
    """Draw world size, group size and step."""
    world_size = draw(st.integers(1, most))
    return world_size, draw(st.integers(1, world_size)), draw(st.integers(0, 100_000))


@given(group_steps())
def test_everyone_is_in_one_group_of_about_the_size_asked_for(case):
    world_size, group_size, _ = case
    groups = partition(*case)
    sizes = {len(group) for group in groups}
    assert sorted(chain(*groups)) == list(range(world_size))
    assert all(list(group) == sorted(group) for group in groups)
    assert max(sizes) - min(sizes) <= 1
    if world_size % group_size == 0:
        assert sizes == {group_size}
    # one group more or less would be no closer to P / S
    assert abs(len(groups) - world_size / group_size) <= 0.5
    assert min(sizes) > 1 or group_size == 1, "a rank is idle"


def test_a_rank_finds_its_group_without_listing_the_others():
    # listing all ranks would take minutes
    members = group_of(123_456_789, 10**9 + 7, 4, step=10**6)
    assert 123_456_789 in members
    assert all(group_of(rank, 10**9 + 7, 4, step=10**6) == members for rank in members)


@given(group_steps())
def test_the_composition_changes_on_every_step(case):
    world_size, group_size, step = case
    now, then = partition(*case), partition(world_size, group_size, step + 1)
    assert (set(now) != set(then)) == (len(now) > 1 and group_size > 1)


def different_groups(world_size):
    """Return group sizes > 1 that give different groups (for 40 ranks, 20 and 21 give the same)."""
    sizes = range(world_size, min(2, world_size) - 1, -1)
    return {len(partition(world_size, size, 0)): size for size in sizes}.values()


@pytest.mark.parametrize("world_size", [2, 5, 12, 13, 24, 40])
def test_the_mixing_steps_are_the_same_from_every_start(world_size):
    for group_size in different_groups(world_size):
        starts = range(world_size)  # the powers of a stride repeat after fewer than P
        assert len({mixing_steps(world_size, group_size, start) for start in starts}) == 1


def test_the_mixing_steps_are_the_logarithm_or_one_more_for_a_few_uneven_groups():
    even, uneven = Counter(), Counter()
    for world_size in range(2, 49):
        for group_size in different_groups(world_size):
            sizes = {len(group) for group in partition(world_size, group_size, 0)}
            logarithm = next(m for m in range(world_size) if min(sizes) ** m >= world_size)
            excess = mixing_steps(world_size, group_size) - logarithm
            (even if len(sizes) == 1 else uneven)[excess] += 1
    assert set(even) == {0}
    assert set(uneven) <= {-1, 0, 1} and uneven[1] < 0.02 * uneven[0]


def test_the_default_group_size_by_table():
    table = {1: 1, 2: 2, 3: 3, 4: 2, 5: 2, 6: 2, 7: 3, 8: 2, 9: 3, 12: 3, 13: 4, 15: 3, 16: 4}
    table |= {10: 3, 14: 4, 22: 5, 62: 8, 94: 10}
    table |= {20: 4, 30: 5, 32: 4, 64: 8, 101: 10, 128: 8, 256: 16, 1024: 32}
    assert {world_size: default_group_size(world_size) for world_size in table} == table
