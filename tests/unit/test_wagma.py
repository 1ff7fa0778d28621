"""Test averages that wait for few ranks or none, with late, stalled and dead ranks, and rounding."""

import math
import random
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsync.averaging import LocalSgd
from sparsync.averaging.schemes import SCHEMES as ALL_SCHEMES
from sparsync.errors import ConfigurationError, DeadlockError, PeerError, WireFormatError
from sparsync.published.baselines import AdPsgd, Dpsgd, EagerSgd, Sgp
from sparsync.published.baselines.eager import EagerRounds
from sparsync.published.baselines.gossip import _PairAgent
from sparsync.published.wagma import Wagma
from sparsync.published.wagma.agents import Header, Kind, round_of, tree_children
from sparsync.published.wagma.scheme import CODECS, ModelRounds, coded_allreduce, group_allreduce
from sparsync.testing import check_averager
from sparsync.transports.sim import Fault, Links, simulate
from tests.draws import seeded
from tests.tables import cases, refuses

from .average_runs import check_resumption
from .averager_models import add_, failure, linear
from .zmq_group import together

COMPUTE = 0.1  # virtual seconds of a step
FREE = Links(alpha=0.0, beta=0.0)
PAIR = partial(Wagma, group_size=2, sync_period=None)


def late(world_size, seconds, count=1, seed=0):
    """Return delays in seconds by step and rank: ``count`` random ranks per step are late."""

    def delay(step, rank):
        drawn = random.Random(1000 * seed + step).sample(range(world_size), count)
        return seconds if rank in drawn else 0.0

    return delay


def once(at_step, at_rank, seconds):
    """Return delays of which one rank has a single one."""
    return lambda step, rank: seconds if (step, rank) == (at_step, at_rank) else 0.0


def run_pair(make, steps, delay):
    """Train two ranks over links that take no time; return their models by step, and averagers."""
    seen = {}
    results = simulate(train(make, steps, delay, seen), 2, links=FREE).results
    return seen, [averager for _, averager in results]


def train(make, steps, delay, seen=None):
    """Return a training program in which every step adds rank + 1 to the model."""

    async def program(comm):
        averager, vector, step = make(), torch.zeros(6, dtype=torch.float64), 0
        await averager.begin(comm, vector, 0)
        while step < steps:
            await comm.compute(COMPUTE + delay(step, comm.rank))
            vector = await averager.average(comm, vector + (comm.rank + 1), step)
            if seen is not None:
                seen.setdefault(step, {})[comm.rank] = vector
            step = max(step + 1, averager.resume_at)
        return await averager.conclude(comm, vector, steps), averager

    return program


def models(simulation):
    return [result[0] for result in simulation.results if result is not None]


def all_equal(vectors):
    return all(torch.equal(vectors[0], vector) for vector in vectors)


def test_a_late_rank_holds_up_nobody_until_all_wait_for_it():
    times, delay = {}, once(3, 2, 0.32)

    async def program(comm):
        averager, vector = Wagma(sync_period=None), torch.zeros(2)
        await averager.begin(comm, vector, 0)
        for step in range(5):
            await comm.compute(COMPUTE + delay(step, comm.rank))
            vector = await averager.average(comm, vector + comm.rank, step)
            times[step, comm.rank] = comm.now
        await averager.conclude(comm, vector, 5)
        return comm.now

    finished = simulate(program, 4, links=FREE).results
    assert times[3, 0] == pytest.approx(4 * COMPUTE)
    assert times[3, 2] == pytest.approx(4 * COMPUTE + 0.32)
    assert finished == pytest.approx([5 * COMPUTE + 0.32] * 4)  # it has not lost its delay


def test_a_stale_model_is_averaged_by_the_letter_of_algorithm_2():
    """P = S = 2 and only step 1 of rank 1 is late: lines 11 (W = sum / S) and 13 of Algorithm 2."""
    seen, _ = run_pair(PAIR, 2, once(1, 1, 0.05))
    w0 = (1 + 2) / 2  # after step 0
    fresh, stale = w0 + 1, 2.0  # what rank 1 published at step 0 was 0 + 2
    total = fresh + stale
    assert seen[1][0][0] == pytest.approx(total / 2)
    assert seen[1][1][0] == pytest.approx((total + w0 + 2) / 3)


@pytest.mark.parametrize("late_by", [0.0, 0.05, 0.35])
def test_groups_of_one_are_local_sgd_also_where_ranks_are_late(late_by):
    """Section 4: with alpha = beta = false, WAGMA degrades to local SGD with global period tau."""
    pair = partial(Wagma, group_size=1, sync_period=4), partial(LocalSgd, period=4)
    ours, theirs = (run_pair(make, 6, once(1, 1, late_by))[0] for make in pair)
    for step in range(6):
        for rank in range(2):
            assert torch.equal(ours[step][rank], theirs[step][rank]), (step, rank)


def test_stale_parts_in_averages_are_counted():
    """P = S = 2; rank 1 is 1.2 steps late for step 1, and so misses the rounds of steps 1 and 2."""
    _, averagers = run_pair(PAIR, 3, once(1, 1, 0.12))
    early, late_one = (averager.participation for averager in averagers)
    # three rounds and ``finish``; in the rounds of steps 1 and 2, rank 1 contributes the model of
    # step 0
    assert (early.averages, early.stale, early.oldest, early.models) == (4, 0, 0, 8)
    assert (late_one.averages, late_one.stale, late_one.oldest, late_one.models) == (4, 2, 2, 8)


def test_the_age_of_a_partners_model_is_counted_in_the_askers_steps():
    """In AD-PSGD, rank 0 is only at step 1 when it answers a rank that asks after step 4."""
    agent = _PairAgent(torch.zeros(2), seed=0, step=0)
    agent.host = SimpleNamespace(rank=0, world_size=2, send=lambda dest, message: None)
    agent.update(torch.zeros(2), 1, lambda answer: None, ask=True)
    for step in (4, 0):
        head = torch.tensor([0, step], dtype=torch.int32).view(torch.uint8)
        agent.receive(1, torch.cat([head, torch.ones(2).view(torch.uint8)]))
    counted = agent.participation
    assert (counted.averages, counted.stale, counted.oldest, counted.models) == (2, 1, 3, 4)


# a round's collective checks the bodies of DATA
@pytest.mark.parametrize(
    ("kind", "length"),
    [
        *((kind, length) for kind in (Kind.DATA, Kind.PING) for length in (0, 23)),
        *((kind, length) for kind in (Kind.RESULT, Kind.VIEW, Kind.WELCOME) for length in (24, 31)),
    ],
)
def test_a_corrupt_message_to_an_agent_is_one_clear_error(kind, length):
    async def program(comm):
        averager = Wagma(group_size=2)
        await averager.begin(comm, torch.zeros(2), 0)
        agent = comm.companions["averaging"]._actor
        message = torch.frombuffer(
            bytearray(Header(kind, 2, agent.version).pack()), dtype=torch.uint8
        )
        if kind == Kind.RESULT:
            agent._called = agent.version  # the round has begun
            agent._advance()
        message = torch.cat([message, torch.zeros(8, dtype=torch.uint8)])[:length]
        with pytest.raises(WireFormatError, match=r"a message between companions (has|carries)"):
            agent.receive(1 - comm.rank, message)

    simulate(program, 2)


@pytest.mark.parametrize("length", [0, 7, 8, 15, 17])
def test_a_corrupt_message_to_a_partner_is_one_clear_error(length):
    agent = _PairAgent(torch.zeros(2), seed=0, step=0)
    agent.host = SimpleNamespace(rank=0, world_size=2, send=lambda dest, message: None)
    with pytest.raises(WireFormatError, match=r"a message between companions (has|carries)"):
        agent.receive(1, torch.zeros(length, dtype=torch.uint8))
    for kind in (1, 2):  # an answer without a request, and an unknown kind
        message = torch.zeros(16, dtype=torch.uint8)
        message[0] = kind
        with pytest.raises(PeerError, match=f"rank 1 sent a message of kind {kind} that"):
            agent.receive(1, message)


AGES = {"none": (0, 0), "bounded": (1, 9), "unbounded": (11, 40)}  # tau is 10, of 40 steps


@pytest.mark.parametrize("name", sorted(ALL_SCHEMES))
def test_the_staleness_that_a_scheme_declares_is_that_of_its_averages(name):
    """The last rank takes 50 times as long as the others for every step."""
    steps, late_one = 40, 3
    declared, averager = ALL_SCHEMES[name]().staleness, None

    async def program(comm):
        nonlocal averager
        mine, vector = ALL_SCHEMES[name](), torch.zeros(8, dtype=torch.float64)
        if comm.rank == late_one:
            averager = mine
        await mine.begin(comm, vector, 0)
        for step in range(steps):
            await comm.compute(COMPUTE * (50 if comm.rank == late_one else 1))
            vector = await mine.average(comm, vector + 1, step)
        await mine.conclude(comm, vector, steps)

    simulate(program, 4)
    least, most = AGES[declared]
    if name == "streaming-diloco":  # its delay, equal on all ranks, is only counted with a model
        assert (declared, averager.settings.delay) == ("bounded", 1)
    else:
        assert least <= averager.participation.oldest <= most


def test_a_result_is_taken_once():
    """With P = S = 2, rank 1 misses steps 1 and 2, takes the newer result, and then finds no other."""
    seen, _ = run_pair(PAIR, 3, once(1, 1, 0.15))
    assert seen[1][1][0] == pytest.approx((3.25 + 2.0 + 3.5) / 3)  # the sum of step 2, and its own
    assert seen[2][1][0] == pytest.approx(seen[1][1][0].item() + 2)


@pytest.mark.parametrize("world_size", [1, 3, 8, 16])
@given(seed=st.integers(0, 10**6), seconds=st.sampled_from([0.01, 0.3, 2]))
@settings(max_examples=4, deadline=None)
def test_whoever_is_late_nobody_hangs_and_all_end_equal(world_size, seed, seconds):
    delay = late(world_size, seconds, min(2, world_size), seed)
    simulation = simulate(train(lambda: Wagma(sync_period=7), 17, delay), world_size)
    assert all_equal(models(simulation))
    # each rank adds between 1 and P per step
    assert 17 / 3 <= float(models(simulation)[0][0]) <= 17 * world_size


def test_the_potential_stays_below_lemma_4_5():
    """On every step, Gamma_t <= 16 P eta^2 M^2 tau^2, here with eta = 1 and M the largest update."""
    world_size, tau, seen = 8, 5, {}
    simulate(train(partial(Wagma, sync_period=tau), 20, late(world_size, 0.3, 2), seen), world_size)
    largest = 6 * float(world_size) ** 2  # |update|^2 of the last rank: 6 elements of P
    for at_step in seen.values():
        stacked = torch.stack(list(at_step.values()))
        gamma = float((stacked - stacked.mean(0)).square().sum())
        assert gamma <= 16 * world_size * largest * tau**2


FAULTS = [
    pytest.param(0.75, math.inf, id="dies"),
    pytest.param(0.95, 6.0, id="stands still, comes back"),
    pytest.param(0.31, 1.0, id="is back before the deadline"),
    pytest.param(1.03, 40.0, id="comes back after the end"),
]


@pytest.mark.fast(8)
@pytest.mark.parametrize("which", [0, -1])
@pytest.mark.parametrize("world_size", [2, 5, 8])
@pytest.mark.parametrize(("start", "end"), FAULTS)
def test_training_goes_on_without_a_rank_that_is_silent(world_size, which, start, end):
    fault = Fault(which % world_size, start, end)
    program = train(lambda: Wagma(deadline=1.0), 60, late(world_size, 0.05))
    simulation = simulate(program, world_size, links=Links(alpha=1e-4), faults=[fault])
    assert len(models(simulation)) == world_size - (end == math.inf)
    assert all_equal(models(simulation))
    out = [fault.rank] if end > start + 1.0 else []
    for rank, result in enumerate(simulation.results):
        if rank != fault.rank:
            assert [report[0] for report in result[1].left_out] == out
    back = simulation.results[fault.rank]
    if back is not None:
        assert (back[1].resume_at > 0) == (end > start + 1.0)


def test_two_ranks_may_die():
    faults = [Fault(2, 0.55), Fault(5, 0.551)]
    program = train(lambda: Wagma(deadline=1.0), 40, late(8, 0.05))
    assert len(models(simulate(program, 8, faults=faults))) == 6


def test_without_a_deadline_a_dead_rank_is_found_by_the_simulator():
    with pytest.raises(DeadlockError, match="phase 'average'"):
        simulate(train(Wagma, 20, late(4, 0.05)), 4, faults=[Fault(1, 0.5)])


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 8, 9, 33])
def test_word_reaches_every_rank_from_every_activator(world_size):
    for root in range(world_size):
        reached, pending = [root], [root]
        while pending:
            children = tree_children(pending.pop(), root, world_size)
            reached += children
            pending += children
        assert sorted(reached) == list(range(world_size))  # each once


@pytest.mark.parametrize("world_size", [1, 2, 3, 6, 8])
@pytest.mark.parametrize("size", [1, 7, 300_000])
def test_both_ways_to_sum_a_group_are_equal_on_all_ranks(world_size, size):
    async def program(comm):
        return await group_allreduce(comm, torch.full((size,), 2.0**comm.rank)), comm.ledger

    results = simulate(program, world_size).results
    assert all(torch.equal(total, torch.full((size,), 2.0**world_size - 1)) for total, _ in results)
    if world_size == 8:
        words = results[0][1].total().sent / 4 / size
        assert words == pytest.approx(3 if size < 10 else 1.75, rel=0.01)


@refuses(
    (partial(Wagma, group_size=0), "group_size is 0; give a whole number, at least 1"),
    (partial(Wagma, group_size=2.5), "group_size is 2.5; give a whole number"),
    (partial(Wagma, sync_period=0), "sync_period is 0; give a whole number, at least 1"),
    (partial(Wagma, dynamic="no"), "dynamic is 'no'; give True or False"),
    (partial(Dpsgd, mixing_steps=1.5), "mixing_steps is 1.5; give a whole number"),
    (partial(Dpsgd, mixing_steps=0), "mixing_steps is 0; give a whole number, at least 1"),
    (partial(Sgp, neighbours=0), "neighbours is 0; give a whole number, at least 1"),
    (partial(LocalSgd, period=True), "period is True; give a whole number"),
    (partial(Wagma, grouping="some"), "grouping is 'some'; choose"),
    (partial(Wagma, deadline=0.0), "deadline is 0.0; give seconds"),
    (partial(Wagma, values="fp8"), "values is 'fp8'; choose fp32, bf16, int8"),
    (partial(EagerSgd, quorum="half"), "choose solo or majority"),
)
def test_bad_options_are_refused(make):
    make()


def test_the_drift_of_the_mean_is_reported_when_models_are_stale():
    given = {"world_sizes": (8,), "steps": 12, "preserves_mean": False}
    drift = check_averager(Wagma, **given, late=lambda step, rank: 1.0 + (rank == step % 8))
    assert 0.001 < drift < 0.5


ROUNDED = ("bf16", "int8")


def drift(step, rank, size):
    return torch.randn(size, generator=seeded(1000 * step + rank), dtype=torch.float64)


def trained(make, world_size, steps, size=301, seen=None, conclude=True):
    async def program(comm):
        averager, vector = make(), torch.zeros(size, dtype=torch.float64)
        await averager.begin(comm, vector, 0)
        for step in range(steps):
            await comm.compute(0.1)
            mine = vector + drift(step, comm.rank, size)
            vector = await averager.average(comm, mine, step)
            if seen is not None:
                error = averager.memory.get("error", torch.zeros(size))
                seen.setdefault(step, {})[comm.rank] = mine, vector, error
        return await averager.conclude(comm, vector, steps) if conclude else None, comm.ledger

    # messages take no time, so their number makes no rank late
    return simulate(program, world_size, links=FREE)


@given(st.integers(1, 9), st.integers(0, 40), st.sampled_from(ROUNDED), st.integers(0, 99))
def test_a_sum_and_what_it_lost_make_the_exact_sum(world_size, size, values, seed):
    vectors = [drift(seed, rank, size) for rank in range(world_size)]

    async def program(comm):
        return await coded_allreduce(comm, vectors[comm.rank], CODECS[values], seed)

    sums = simulate(program, world_size).results
    assert all(torch.equal(one.total, sums[0].total) for one in sums)
    lost = sum(one.lost + one.lost_of_sum for one in sums)
    torch.testing.assert_close(sums[0].total + lost, sum(vectors), rtol=1e-12, atol=1e-12)
    if world_size > 1 and size:
        assert all(one.lost.abs().max() < 0.1 for one in sums)


@pytest.mark.parametrize("values", ROUNDED)
@pytest.mark.parametrize(("world_size", "group_size"), [(8, 4), (6, 2), (7, 3)])
def test_the_mean_of_models_and_errors_is_preserved_on_every_step(values, world_size, group_size):
    seen = {}
    make = partial(Wagma, group_size=group_size, sync_period=5, values=values)
    trained(make, world_size, 12, seen=seen)
    owed = 0
    for step, ranks in seen.items():
        # all models are fresh, but groups of 3 and of 2 weight ranks equally only within each group
        before = sum(mine for mine, _, _ in ranks.values()) + owed
        after = sum(vector for _, vector, _ in ranks.values())
        owed = sum(error for _, _, error in ranks.values())
        torch.testing.assert_close(after + owed, before, rtol=1e-12, atol=1e-10)
        closes = (step + 1) % 5 == 0
        assert (owed.abs().max() == 0) if closes else (0 < owed.abs().max() < 1)


def test_an_old_model_of_a_late_rank_owes_nothing_and_what_was_owed_stays():
    size, first = 10, 5  # rank 1 sums the places from 5 on
    models = {0: [drift(0, 0, size), drift(1, 0, size)], 1: [drift(0, 1, size)]}

    async def program(comm):
        base = torch.zeros(size, dtype=torch.float64)
        rounds = ModelRounds(base, 2, None, codec=CODECS["bf16"])
        rounds.publish(models[comm.rank][0])
        await rounds.reduce(comm, round_of(0), round_of(0))
        owed, newest = rounds.error, round_of(0)
        if comm.rank == 0:  # rank 1 is late
            newest = round_of(1)
            rounds.publish(models[0][1])
        sent = rounds._vector
        return owed, sent, await rounds.reduce(comm, round_of(1), newest), rounds.error

    (_, fresh, total, _), (owed, old, _, error) = simulate(program, 2).results
    exact = old[first:] + fresh[first:].to(torch.bfloat16).double()
    torch.testing.assert_close(error[first:], owed[first:] + exact - total[first:])
    assert torch.equal(error[:first], owed[:first])
    assert (owed[first:] != 0).any()


@pytest.mark.parametrize("values", ROUNDED)
def test_errors_do_not_grow_with_the_way_from_the_first_model(values):
    async def program(comm):
        averager = Wagma(group_size=2, sync_period=5, values=values)
        vector, errors = torch.zeros(64), []
        ramp = torch.linspace(0.8, 1.1, 64)
        await averager.begin(comm, vector, 0)
        for step in range(60):
            vector = await averager.average(comm, vector + ramp + 0.1 * comm.rank, step)
            errors.append(averager.memory["error"].abs().max() if (step + 1) % 5 else 0)
        return max(errors[:10]), max(errors[50:])

    for early, at_last in simulate(program, 4, links=FREE).results:
        assert 0 < at_last < 3 * early


@pytest.mark.parametrize(("values", "less"), [("bf16", 1.9), ("int8", 3.6)])
def test_fewer_bytes_travel(values, less):
    def sent(values):
        make = partial(Wagma, group_size=4, sync_period=None, values=values)
        return trained(make, 8, 3, 1 << 15, conclude=False).ledgers[0].total().sent

    # float64, where "fp32" is what the model has
    assert sent("fp32") / sent(values) > 2 * less


SCHEMES = {
    "adpsgd": AdPsgd,
    "eager, solo": partial(EagerSgd, quorum="solo"),
    "eager, majority": partial(EagerSgd, quorum="majority"),
}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("world_size", [1, 3, 8])
@given(seed=st.integers(0, 10**6), seconds=st.sampled_from([0.01, 0.3, 2]))
@settings(max_examples=4, deadline=None)
def test_whatever_is_late_every_update_arrives_once(scheme, world_size, seed, seconds):
    delay = late(world_size, seconds, 1, seed)
    everyone = models(simulate(train(SCHEMES[scheme], 15, delay), world_size))
    mean = 15 * (world_size + 1) / 2  # every rank adds rank + 1 per step
    for vector in everyone:
        torch.testing.assert_close(vector, torch.full((6,), mean, dtype=torch.float64))
        assert torch.equal(vector, everyone[0])


def seconds_of(make, world_size=8):
    delay = late(world_size, 0.3, 2)
    return simulate(train(make, 30, delay), world_size, links=Links(alpha=1e-6)).seconds


def test_whoever_waits_less_ends_earlier():
    """Two of eight ranks are late per step: allreduce waits for both; a random rank is rarely late."""
    named = ALL_SCHEMES["allreduce"], SCHEMES["eager, majority"], SCHEMES["eager, solo"], AdPsgd
    allreduce, majority, solo, pairs = map(seconds_of, named)
    assert allreduce == pytest.approx(30 * (COMPUTE + 0.3), rel=0.01)
    assert pairs <= solo * 1.01 < majority < 0.75 * allreduce


# seconds per step of ranks that starve for a core, temporarily or permanently
STARVED = {
    "three of four": lambda rank, step: 1e-2 * (50 if rank else 1),
    "by turns": lambda rank, step: 1e-2 * (60 if step // 15 % 4 == rank else 1),
}


@pytest.mark.parametrize("name", ["adpsgd", "eager-majority", "eager-solo", "wagma"])
@pytest.mark.parametrize("starved", STARVED)
def test_who_waits_for_nobody_learns_at_its_defaults_where_ranks_starve(name, starved):
    """Gradient descent at a quarter of the longest stable step, with targets that differ by rank."""
    curvature = torch.linspace(0.1, 0.5, 8, dtype=torch.float64)

    async def program(comm):
        averager, vector = ALL_SCHEMES[name](), torch.zeros(8, dtype=torch.float64)
        await averager.begin(comm, vector, 0)
        for step in range(60):
            await comm.compute(STARVED[starved](comm.rank, step))
            vector = vector - curvature * (vector - 1 - 0.1 * comm.rank)
            vector = await averager.average(comm, vector, step)
        return await averager.conclude(comm, vector, 60)

    for vector in simulate(program, 4).results:
        assert (vector - 1.15).abs().max() < 0.2


def test_the_drawn_ranks_begin_equally_often():
    rounds = EagerRounds("majority", 3, 4, torch.zeros(1))
    begun = [sum(rounds.activates(round_of(s), rank) for s in range(400)) for rank in range(4)]
    assert sum(begun) == 400 and min(begun) > 70


def test_whoever_has_an_answer_knows_that_both_models_are_averaged():
    """A rank with the answer may conclude at once; the mean over ranks then uses the agents' models."""
    agent, told = _PairAgent(torch.zeros(2), seed=0, step=0), []

    class Host:
        rank, world_size = 0, 2

        def send(self, dest, message):
            told.append((dest, message[8:].view(torch.float32).tolist(), agent.model.tolist()))

    agent.meet(Host())
    ask = torch.cat([torch.zeros(8, dtype=torch.uint8), torch.ones(2).view(torch.uint8)])
    agent.receive(1, ask)
    assert told == [(1, [0.0, 0.0], [0.5, 0.5])]


@pytest.mark.parametrize("values", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("reload_at", [3, 4])
def test_synchronous_groups_resume_bit_for_bit(values, reload_at):
    """Between two global averages, when the ranks' models differ."""
    make = partial(Wagma, group_size=2, sync_period=6, grouping="synchronous", values=values)
    check_resumption(make, 10, reload_at, world_size=4)


@cases(
    ({"values": "bf16"}, {}, "['values'] is 'bf16', expected 'fp32'"),
    ({"sync_period": None}, {}, "['sync_period'] is None, expected 10"),
    ({"deadline": 60.0}, {"deadline": 90.0}, ""),
)
def test_a_state_is_loaded_only_with_the_options_that_it_was_saved_with(saved, then, words):
    state, averager = Wagma(linear(), **saved).state_dict(), Wagma(linear(), **then)
    if words:
        assert words in failure(ConfigurationError, averager.load_state_dict, state)
    else:
        averager.load_state_dict(state)


@pytest.mark.parametrize("make", [partial(Wagma, values="bf16"), EagerSgd, AdPsgd])
@pytest.mark.parametrize("other", ["model", "moments", "dtype"])
def test_a_state_whose_vectors_do_not_fit_is_refused(make, other):
    saved, model = make(linear()), linear(dtype=torch.float64 if other == "dtype" else None)
    saved.step()
    options = {}
    if other == "model":
        model = torch.nn.Linear(4, 1)
    if other == "moments":
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        options = {"optimizer": optimizer, "moments": "average"}
    expected = {"model": "float32[5]", "moments": "float32[6]", "dtype": "float64[3]"}[other]
    words = failure(ConfigurationError, make(model, **options).load_state_dict, saved.state_dict())
    assert "state['memory']['" in words
    assert f"is a tensor float32[3], expected a tensor {expected}" in words


def test_a_rank_that_was_left_out_resumes_from_an_earlier_state():
    def program(comm):
        averager = Wagma(linear(), comm=comm, deadline=60.0, sync_period=1)
        averager.step()
        state = averager.state_dict()
        # as if ranks had gone on, and rank 1 had been left out and had come back at step 9
        if comm.rank == 1:
            averager.resume_at = 9
        else:
            averager.left_out, averager._present = ((1, 5, "it was silent"),), [0]
        averager.load_state_dict(state)
        averager.step()
        averager.finish()
        averager.close()
        return averager.steps, averager.left_out

    assert together(program, 2) == [(2, ())] * 2


def test_ranks_whose_saved_sums_differ_resume_with_nothing_lost():
    """A late rank saves after others, so its shared model may contain a sum that theirs lacks."""
    size = 4

    async def program(comm):
        averager, vector = EagerSgd(), torch.zeros(size, dtype=torch.float64)
        await averager.begin(comm, vector, 0)
        for step in range(3):
            vector = await averager.average(comm, vector + drift(step, comm.rank, size), step)
        state, averager = averager.state_dict(), EagerSgd()
        state["content"]["memory"]["shared"] += comm.rank
        averager.load_state_dict(state)
        own = vector.clone()
        await averager.begin(comm, vector, 3)
        vector = await averager.average(comm, vector + comm.rank, 3)
        return own + comm.rank, await averager.conclude(comm, vector, 4)

    models, ends = map(torch.stack, zip(*simulate(program, 3).results, strict=True))
    assert (ends == ends[0]).all()
    torch.testing.assert_close(ends[0], models.mean(0))


@pytest.mark.parametrize("scheme", [*SCHEMES.values(), partial(Wagma, group_size=3)])
def test_it_runs_next_to_real_threads_and_one_may_be_late(scheme):
    def rank(comm):
        model = linear()
        before = model.weight.detach().clone()
        with scheme(model, comm=comm) as averager:
            for step in range(6):
                time.sleep(0.05 * (step == 2 and comm.rank == 0))
                add_(model, comm.rank)
                averager.step()
            assert comm.ledger.total().sent > 0
        return model.weight.detach() - before

    moves = together(rank, 3)
    assert all(torch.equal(moves[0], moved) for moved in moves)
    if scheme in SCHEMES.values():  # schemes in which all learnt updates count fully
        torch.testing.assert_close(moves[0], torch.full_like(moves[0], 6.0))
