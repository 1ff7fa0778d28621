"""Compare the compressed outer step with plain averaging and torch's SGD, and check the law."""

import math
import pickle
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sparsync import ConfigurationError, simulate, sparse
from sparsync.averaging import LocalSgd
from sparsync.errors import NonFiniteGradientError
from sparsync.fields import sealed
from sparsync.presets import resolve
from sparsync.updates import AdaptivePeriod, OuterAverager, OuterStep, outer_engine
from sparsync.updates.family import OUTER_SETTINGS, sparseloco
from tests.draws import noise, seeded
from tests.tables import cases, refuses

from .average_runs import SIZE, WORLD_SIZE, check_resumption, on_all_ranks, update
from .small_training import STEPS, backward, flat, model, trained


def broken(rank, step, value=math.nan):
    """Return updates, one of which is not finite."""
    return lambda r, s: update(r, s) * (value if (r, s) == (rank, step) else 1)


def residual(averager):
    pieces = [*averager.state_dict()["content"]["reducer"]["residual"].values()]  # as units are
    return torch.cat(pieces) if pieces else torch.zeros_like(averager.memory["shared"])


@pytest.mark.parametrize("algorithm", ["dense", "allgather", resolve("sparcml", bits=None)])
def test_everything_delivered_is_averaging(algorithm):
    outer = on_all_ranks(lambda: OuterAverager(algorithm=algorithm, density=1.0, period=3), 7)
    plain = on_all_ranks(lambda: LocalSgd(period=3), 7)
    torch.testing.assert_close(outer, plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", sorted(OUTER_SETTINGS))
def test_replicas_are_equal_after_every_exchange(name):
    at_once = {"period": 2, "fragments": 1, "delay": 0, "residual": "apart", "warmup_steps": 0}
    models = on_all_ranks(lambda: OuterAverager(**{**OUTER_SETTINGS[name], **at_once}), 9)
    after = [1, 3, 5, 7, 9]  # the last: conclude, in the middle of a period
    assert torch.equal(models[after], models[after][:, :1].expand_as(models[after]))
    assert not torch.equal(models[8, 0], models[8, 1])


@cases("allgather", "oktopk", "budgeted", "quantised", sparseloco())
@settings(max_examples=4)
@given(decay=st.sampled_from([0.5, 1.0]), density=st.floats(0.02, 0.3), seed=st.integers(0, 10**6))
def test_nothing_is_lost(algorithm, decay, density, seed):
    """The old residuals plus all moves equal the applied total plus the new residuals."""
    movements, kept = {}, {}

    def watch(rank, step, averager, local):
        movements[step, rank] = local
        kept[step, rank] = residual(averager)

    def make():
        return OuterAverager(algorithm=algorithm, density=density, period=1, residual_decay=decay)

    def over_ranks(values, step):
        return sum(values[step, rank] for rank in range(WORLD_SIZE))

    models = on_all_ranks(make, 6, watch=watch, update=lambda rank, step: update(rank, step + seed))
    shared = torch.cat([torch.ones(1, SIZE, dtype=torch.float64), models[:, 0]])
    for step in range(6):
        moved = WORLD_SIZE * shared[step] - over_ranks(movements, step)
        before = decay * over_ranks(kept, step - 1) if step else 0
        total = WORLD_SIZE * (shared[step] - shared[step + 1])
        torch.testing.assert_close(before + moved, total + over_ranks(kept, step))
        assert over_ranks(kept, step).abs().max() > 0.1
    # conclude delivers everything
    torch.testing.assert_close(shared[-1], shared[-2] - over_ranks(kept, 5) / WORLD_SIZE)


OTHERS = {"density": 0.2, "period": 2, "algorithm": "quantised", "residual": "weights", "dct": 64}
OTHERS |= {"fragments": 2, "delay": 1}


@refuses(*(({what: other}, rf"the saved state\['{what}'\] is") for what, other in OTHERS.items()))
def test_states_of_other_set_ups_are_refused(other):
    settings = {"density": 0.1, "period": 4}
    state = OuterAverager(model(), **settings).state_dict()
    OuterAverager(model(), **{**settings, **other}).load_state_dict(state)


def test_nan_on_one_rank_is_skipped_by_all_and_residuals_stay():
    kept = {}

    def watch(rank, step, averager, local):
        kept[step, rank] = residual(averager)
        assert averager.state.refused == (step in (5, 6))

    def make():
        return OuterAverager(density=0.1, period=2, momentum=0.9, residual_decay=0.5)

    models = on_all_ranks(make, 8, update=broken(1, 4), watch=watch)
    assert torch.equal(models[5], models[3])
    for rank in range(WORLD_SIZE):
        assert torch.equal(kept[5, rank], kept[3, rank]) and kept[3, rank].any()
        assert not torch.equal(kept[7, rank], kept[3, rank])
    assert models[5:].isfinite().all() and not torch.equal(models[7], models[5])


def test_a_second_refusal_in_a_row_raises():
    def late(rank, step):
        return update(rank, step) * (math.nan if rank == 1 and step >= 2 else 1)

    with pytest.raises(NonFiniteGradientError, match=r"step 3: a second exchange in a row"):
        on_all_ranks(lambda: OuterAverager(density=0.1, period=1), 5, update=late)


def test_what_is_broken_at_the_end_is_left_out():
    make = partial(OuterAverager, density=0.1, period=2)
    models = on_all_ranks(make, 3, update=broken(2, 2, math.inf))
    assert torch.equal(models[3], models[1])


@pytest.mark.parametrize("residual_in", ["apart", "weights"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_broken_element_at_the_end_leaves_out_the_whole_vector(monkeypatch, value, residual_in):
    """The vector is delivered in runs, and all of the runs but one are finite."""
    monkeypatch.setattr(outer_engine, "_FINISHED", 4)

    def one(rank, step):
        made = update(rank, step)
        if (rank, step) == (2, 2):
            made[0] = value
        return made

    def watch(rank, step, averager, local):
        kept[rank] = averager, averager.memory["shared"].clone(), residual(averager)

    kept, make = {}, partial(OuterAverager, density=0.1, period=2, residual=residual_in)
    models = on_all_ranks(make, 3, update=one, watch=watch)
    for averager, shared, withheld in kept.values():
        assert torch.equal(averager.memory["shared"], shared)
        assert torch.equal(residual(averager), withheld) and withheld.any()
        assert (models[3] == shared).all()


# ---- fragments and delay --------------------------------------------------------------------------


def divided(**options):
    """Return an averager of vectors with three named parameters, like a model's."""
    averager = OuterAverager(**{"algorithm": "allgather", "density": 0.2, "period": 4, **options})
    averager.parts = lambda vector: dict(zip("abc", vector.split([10, 10, 20]), strict=True))
    return averager


@pytest.mark.fast(10)
@pytest.mark.parametrize("residual_in", ["apart", "weights"])
@pytest.mark.parametrize(("fragments", "delay"), [(1, 3), (2, 0), (2, 1), (4, 3), (9, 2)])
@pytest.mark.parametrize("algorithm", ["allgather", "budgeted", "quantised"])
def test_nothing_is_lost_on_the_way(algorithm, fragments, delay, residual_in):
    """After every step, each move has been applied, or is in a residual, in flight, or in the weights."""
    kept, movements, steps = {}, {}, 13

    def watch(rank, step, averager, local):
        movements[step, rank] = update(rank, step)
        kept[step, rank] = averager

    options = {"fragments": fragments, "delay": delay, "residual": residual_in}
    models = on_all_ranks(partial(divided, algorithm=algorithm, **options), steps, watch=watch)
    everything = sum(movements.values()) / WORLD_SIZE
    # after ``conclude``, the shared weights contain the sum of all moves
    torch.testing.assert_close(models[-1, 0], 1 + everything)
    assert torch.equal(models[-1], models[-1][:1].expand_as(models[-1]))
    assert not torch.equal(models[-2, 0], models[-2, 1])


def test_a_delayed_exchange_leaves_what_was_done_meanwhile():
    """If all entries are delivered, a delay merely shifts the average of period r by d steps."""
    at_once = on_all_ranks(lambda: OuterAverager(density=1.0, period=4), 12)
    late = on_all_ranks(lambda: OuterAverager(density=1.0, period=4, delay=2), 12)
    for step in (5, 9):
        for rank in range(WORLD_SIZE):
            since = update(rank, step - 1) + update(rank, step)
            torch.testing.assert_close(late[step, rank], at_once[step - 2, rank] + since)


def test_fragments_are_exchanged_in_turn():
    """Each fragment is exchanged once per period, at even intervals, and no parameter is divided."""
    seen = {}

    def watch(rank, step, averager, local):
        if rank == 0:
            seen[step] = averager.memory["shared"].clone()

    on_all_ranks(lambda: divided(density=1.0, fragments=2), 12, watch=watch)
    times = [
        [step for step in range(1, 12) if (seen[step][part] != seen[step - 1][part]).any()]
        for part in (slice(0, 20), slice(20, 40))
    ]
    assert times == [[3, 7, 11], [1, 5, 9]]


# ---- in cosine coefficients -----------------------------------------------------------------------


def cosines(size):
    """Return the rows of the DCT-II by its formula."""
    rows = [[math.cos(math.pi * k * (i + 0.5) / size) for i in range(size)] for k in range(size)]
    basis = torch.tensor(rows, dtype=torch.float64)
    return basis / basis.norm(dim=1, keepdim=True)


def test_demo_is_decoupled_momentum():
    """Compare with DeMo's own loop on one vector with chunks of 16, 16 and 8."""
    basis = torch.block_diag(cosines(16), cosines(16), cosines(8))
    momenta, weights, expected = torch.zeros(WORLD_SIZE, SIZE, dtype=torch.float64), 1.0, []
    for step in range(6):
        sent = torch.zeros_like(momenta)
        for rank in range(WORLD_SIZE):
            momenta[rank] = 0.9 * momenta[rank] - update(rank, step)
            fast = basis @ momenta[rank]
            largest = fast.abs().topk(4).indices
            sent[rank] = basis[largest].T @ fast[largest]
            momenta[rank] -= sent[rank]
        weights = weights - 0.1 * sent.mean(0).sign()
        expected.append(weights)
    options = {"dct": 16, "density": 0.1, "residual_decay": 0.9, "outer_lr": 0.1}
    models = on_all_ranks(lambda: OuterAverager(**{**OUTER_SETTINGS["demo"], **options}), 6)
    torch.testing.assert_close(models[:6], torch.stack(expected)[:, None].expand_as(models[:6]))
    torch.testing.assert_close((models[6] - models[5]).abs(), torch.full_like(models[5], 0.1))


@pytest.mark.parametrize("residual_in", ["apart", "weights"])
@pytest.mark.parametrize("algorithm", ["allgather", "budgeted", "quantised"])
def test_coefficients_lose_nothing(algorithm, residual_in):
    make = partial(divided, algorithm=algorithm, residual=residual_in, dct=8, fragments=2, delay=1)
    models = on_all_ranks(make, 9)
    moved = sum(update(rank, step) for rank in range(WORLD_SIZE) for step in range(9))
    torch.testing.assert_close(models[-1], (1 + moved / WORLD_SIZE).expand(WORLD_SIZE, -1))


def test_a_step_by_signs_has_the_rate_that_is_scheduled():
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=0.01)
    local = OuterAverager(net, **OUTER_SETTINGS["demo"], optimizer=optimizer)
    for step, rate in enumerate((0.1, 0.1, 0.02)):
        optimizer.param_groups[0]["lr"] = rate
        before = flat(net)
        train(net, local, [step], optimizer)
        moved = (flat(net) - before).abs()
        moved = moved[moved > 0]  # the gradient may be zero in a whole chunk
        assert moved.numel() > 10
        torch.testing.assert_close(moved, torch.full_like(moved, rate), rtol=1e-3, atol=0)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "lr": 0.3})
    backward(net, 3)
    optimizer.step()
    with pytest.raises(ConfigurationError, match=r"learning rates \[0.02, 0.3\]"):
        local.step()


# torch 2.9 has the first Muon
INNER = {"muloco": getattr(torch.optim, "Muon", torch.optim.AdamW), "demo": torch.optim.SGD}


@pytest.mark.fast(4)
@pytest.mark.parametrize("name", sorted(OUTER_SETTINGS))
def test_every_member_trains(name):
    """Ranks with different target matrices find their mean, using the optimizer meant for the method."""
    generator = seeded(0)
    mean = torch.randn(8, 4, generator=generator)
    apart = torch.randn(WORLD_SIZE, 8, 4, generator=generator) / 2
    targets = mean + apart - apart.mean(0)
    published = OUTER_SETTINGS[name]
    small = {"period": min(published["period"] or 1, 2), "density": max(published["density"], 0.2)}

    rate = 0.04 * (1 - (published.get("momentum") or 0))  # an outer momentum lengthens steps

    async def program(comm):
        weights, outer = nn.Parameter(torch.zeros(8, 4)), OuterAverager(**{**published, **small})
        optimizer = INNER.get(name, torch.optim.AdamW)([weights], lr=0.02)
        outer.optimizers = [optimizer]
        await outer.begin(comm, torch.zeros(32), 0)
        for step in range(200):
            optimizer.param_groups[0]["lr"] = rate * (1 - step / 200)
            weights.grad = weights.detach() - targets[comm.rank]
            optimizer.step()
            moved = await outer.average(comm, weights.detach().flatten().clone(), step)
            weights.data.copy_(moved.view(8, 4))
        return await outer.conclude(comm, weights.detach().flatten().clone(), 200)

    for found in simulate(program, WORLD_SIZE).results:
        assert (found.view(8, 4) - mean).norm() < mean.norm() / 3


@pytest.mark.parametrize("algorithm", ["oktopk-paper", "budgeted", sparseloco()])
@pytest.mark.parametrize("reload_at", [4, 5])
def test_a_saved_state_continues_bit_for_bit(algorithm, reload_at):
    """The first exchange after the reload is refused."""
    make = partial(OuterAverager, algorithm=algorithm, density=0.1, period=2, momentum=0.9)
    check_resumption(make, 11, reload_at, update=broken(1, 5))


@pytest.mark.parametrize("reload_at", [5, 6])
def test_what_is_under_way_is_saved(reload_at):
    options = {"momentum": 0.9, "residual": "weights", "algorithm": "quantised"}
    check_resumption(partial(divided, fragments=2, delay=1, **options), 11, reload_at)


@pytest.mark.parametrize("reload_at", [4, 5, 6, 7])
def test_a_state_between_two_fragments_continues_bit_for_bit(reload_at):
    """The random bits of rounding depend on the number of the step that all fragments share."""
    make = partial(divided, fragments=2, algorithm=sparseloco(), density=0.1)
    check_resumption(make, 13, reload_at)


@pytest.mark.parametrize("residual_in", ["apart", "weights"])
def test_nan_under_way_brings_all_fragments_back(residual_in):
    make = partial(divided, fragments=2, delay=1, residual=residual_in)
    models = on_all_ranks(make, 12, update=broken(1, 4))
    assert models[-1].isfinite().all()
    assert torch.equal(models[-1], models[-1][:1].expand_as(models[-1]))
    # the rank's values stay broken until their first exchange ends
    finite = models[:-1, 1].isfinite().all(1).tolist()
    assert finite.count(False) <= 2 and all(finite[7:])
    assert models[:-1, 0].isfinite().all()


def train(net, averager, steps, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.05)
    for step in steps:
        backward(net, step)
        optimizer.step()
        averager.step()


def test_units_follow_the_names_of_a_model():
    net = model()
    averager = OuterAverager(net, algorithm="sparcml", density=0.1, period=2)  # layer by layer
    train(net, averager, range(3))
    units = [[slot.name for slot in unit.slots] for unit in averager.reducer.units]
    assert units == [[name] for name, _ in net.named_parameters()]
    before, kept = flat(net), residual(averager)
    averager.finish()
    shared = averager.memory["shared"]
    torch.testing.assert_close(flat(net), before - kept)
    averager.finish()
    assert torch.equal(flat(net), shared)


# ---- the residual in the weights ------------------------------------------------------------------


def in_weights(net, algorithm="allgather", **options):
    return OuterAverager(net, algorithm=algorithm, residual="weights", **options)


@pytest.mark.parametrize("algorithm", ["quantised", "budgeted"])
def test_one_rank_trains_as_alone(algorithm):
    """Undelivered changes stay in the rank's own weights."""
    net = model()
    local, exchanges = in_weights(net, algorithm, density=0.1), 0
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for step in range(STEPS):
        train(net, local, [step], optimizer)
        if local.reducer.step > exchanges:
            exchanges = local.reducer.step
            own, owed = flat(net), residual(local)
            with local.shared():
                torch.testing.assert_close(own, flat(net) - owed)
    assert exchanges
    alone = trained(lambda net: torch.optim.SGD(net.parameters(), lr=0.05))
    torch.testing.assert_close(flat(net), alone, rtol=1e-3, atol=1e-4)
    own = flat(net)
    local.finish()
    torch.testing.assert_close(flat(net), own)
    with local.shared():
        torch.testing.assert_close(flat(net), own)


def test_the_period_makes_up_for_sending_every_element():
    for density, period in [(0.01, 4), (0.001, 33), (0.1, 1), (1.0, 1)]:
        assert OuterAverager(algorithm="quantised", density=density).settings.first_period == period
        assert (2 + 16 / 256) / 64 / period <= density  # sent per step, in words of pairs
        assert OuterAverager(density=density).settings.first_period == 1


def test_the_period_doubles_while_warming_up():
    net = model()
    local = in_weights(net, "quantised", period=8, warmup_steps=16)
    exchanged = []
    for step in range(33):
        before = local.reducer.step
        local.step()
        if local.reducer.step > before:
            exchanged.append(step)
    assert exchanged == [0, 1, 2, 3, 5, 7, 11, 19, 27]


# ---- a period from the measured drift --------------------------------------------------------------


def adaptive(drift=0.1, least=1, most=8, **options):
    options = {"algorithm": "quantised", "density": 1.0, "residual": "weights", **options}
    return OuterAverager(period=AdaptivePeriod(drift, least, most), **options)


def exchanges(rate, steps, make=adaptive, **options):
    """Train three ranks with steps in random directions; return the steps that ended with an exchange."""
    seen = set()

    def watch(rank, step, averager, local):
        if averager.engine._sent[0] == step:
            seen.add((step, averager.stats()["period"], rank))

    def moves(rank, step):
        return rate(step) * update(rank, step)

    models = on_all_ranks(make, steps, update=moves, watch=watch, **options)
    steps = {(step, period) for step, period, _ in seen}
    assert len(steps) * WORLD_SIZE == len(seen), "ranks differ"
    return sorted((step, period) for step, period, rank in seen if rank == 0), models


def test_a_period_follows_the_drift_of_the_ranks():
    """Steps of twice the limit are exchanged every time, and steps of a tenth as rarely as allowed."""
    assert exchanges(lambda step: 0.2, 6)[0] == [(step, 1) for step in range(6)]
    quiet, _ = exchanges(lambda step: 0.01, 32)
    assert quiet == [(0, 2), (2, 4), (6, 8), (14, 8), (22, 8), (30, 8)]
    # longer steps halve the period until the drift is within a factor of two of the limit; then the
    # period stays
    louder, _ = exchanges(lambda step: 0.01 if step < 15 else 0.055, 45)
    periods = [period for _, period in louder]
    assert periods[:4] == [2, 4, 8, 8] and periods[4:] == [4, 2] + [2] * (len(louder) - 6)


@pytest.mark.parametrize("run", [1, 3, 1 << 20])
def test_drift_is_how_far_ranks_go_of_the_shared_weights(run, monkeypatch):
    monkeypatch.setattr(sparse, "run_length", lambda like: run)

    async def program(comm):
        outer = adaptive(0.5, algorithm="dense")
        await outer.begin(comm, torch.full((4,), 2.0), 0)
        found = []
        for step, moved in enumerate((0.5, 3.0)):
            shared = outer.memory["shared"].clone()
            await outer.average(comm, shared * (1 + moved * (comm.rank - 0.5)), step)
            found.append((outer.engine.drift, outer.engine.period))
        return found

    (first, second), other = simulate(program, 2).results
    assert first == (pytest.approx(0.25), 1) and [first, second] == other
    # the period stays if the drift is half the limit, or above the limit at the shortest period
    assert second == (pytest.approx(1.5), 1)


@pytest.mark.parametrize("reload_at", [5, 9])
def test_a_chosen_period_is_saved(reload_at):
    through = exchanges(lambda step: 0.02, 24)
    again = exchanges(lambda step: 0.02, 24, reload_at=reload_at)
    assert again[0] == through[0] and torch.equal(again[1], through[1])


@refuses(
    (0.1, 9, r"present_period.\] is 9, expected a whole number from 1 to"),
    (0.1, None, "is None, expected"),
    (0.2, 1, r"the saved state\['period'\] is 'AdaptivePeriod"),
)
def test_a_period_that_cannot_have_been_chosen_is_refused(drift, present):
    content = adaptive(model=model()).state_dict()["content"]
    saved = sealed("averager", {**content, "present_period": present})
    adaptive(drift, model=model()).load_state_dict(saved)


def test_nothing_is_lost_whatever_the_period():
    models = exchanges(lambda step: 0.02, 23)[1]
    everything = 0.02 * sum(update(r, s) for r in range(WORLD_SIZE) for s in range(23))
    torch.testing.assert_close(models[-1], (1 + everything / WORLD_SIZE).expand(WORLD_SIZE, -1))


def test_a_refused_exchange_does_not_choose():
    update_of = broken(1, 5)
    periods = {}

    def watch(rank, step, averager, local):
        periods[step, rank] = averager.engine.period

    def moves(rank, step):
        return 0.02 * update_of(rank, step)

    on_all_ranks(adaptive, 12, update=moves, watch=watch)
    assert [periods[step, 0] for step in range(12)] == [periods[step, 1] for step in range(12)]
    assert periods[6, 0] == periods[5, 0] < periods[11, 0]


def test_a_warm_up_measures_and_does_not_choose():
    seen, _ = exchanges(lambda step: 0.01, 12, lambda: adaptive(warmup_steps=4))
    assert seen[:6] == [(0, 1), (1, 1), (2, 1), (3, 1), (4, 2), (6, 4)]


def test_weights_that_broke_return_to_the_last_exchange():
    net = model()
    local = in_weights(net, density=0.1, period=2)
    train(net, local, range(4))
    before = flat(net)
    local.step()
    with torch.no_grad():
        next(net.parameters())[0, 0] = math.nan
    local.step()
    torch.testing.assert_close(flat(net), before)
    assert local.stats()["refused_exchanges"] == 1


@pytest.mark.parametrize("known", [True, False])
def test_adam_recovers_from_one_broken_gradient_if_it_is_known(known):
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    local = in_weights(net, density=0.1, optimizer=optimizer if known else None)
    for step in range(5):
        backward(net, step)
        if step == 3:
            next(net.parameters()).grad[0, 0] = math.nan
        before = flat(net)
        optimizer.step()
        if step == 4 and not known:  # its moments are NaN
            with pytest.raises(NonFiniteGradientError, match="give optimizer="):
                local.step()
            return
        local.step()
        assert bool(flat(net).isfinite().all())
        assert torch.equal(flat(net), before) == (step == 3)
    assert local.stats()["refused_exchanges"] == 1


def test_buffers_are_averaged_without_the_outer_optimizer():
    net = nn.BatchNorm1d(3)
    averager = OuterAverager(net, **{**OUTER_SETTINGS["diloco"], "period": 1})
    for _ in range(4):
        net(noise(8, 3))
        mean, variance = net.running_mean.clone(), net.running_var.clone()
        averager.step()
        torch.testing.assert_close(net.running_mean, mean)
        torch.testing.assert_close(net.running_var, variance)


def test_rounding_to_16_bits_is_no_move():
    net = nn.Linear(64, 1, bias=False, dtype=torch.bfloat16)
    averager = OuterAverager(net, density=1.0, period=1, outer_lr=0.3)
    with torch.no_grad():
        net.weight += noise(1, 64).bfloat16()
    averager.step()
    shared = averager.memory["shared"].clone()
    assert not torch.equal(shared, shared.bfloat16().float())
    for _ in range(3):
        averager.step()  # no local step between
    assert torch.equal(averager.memory["shared"], shared)


@refuses(
    ({"period": 0}, "period is 0"),
    ({"period": 2, "delay": 2}, "delay is 2; give steps from 0 to 1"),
    ({"fragments": 0}, "fragments is 0"),
    ({"period": AdaptivePeriod(0.1), "delay": 1}, "delay 1 need a fixed period"),
    ({"period": AdaptivePeriod(0.1), "fragments": 2}, "fragments 2 and delay 0 need a"),
    ({"warmup_steps": -1}, "warmup_steps is -1"),
    ({"residual": "shared"}, "give 'apart' or 'weights'"),
    ({"outer_lr": math.nan}, "outer_lr is nan"),
    ({"momentum": 1.0}, "momentum is 1.0"),
    ({"nesterov": True}, "give a momentum"),
    ({"residual_decay": 1.1}, "residual_decay is 1.1"),
    ({"density": 0}, "density is 0"),
    ({"dct": 1}, "dct is 1"),
    ({"sign": 1}, "sign is 1"),
    ({"algorithm": "topk"}, "unknown algorithm"),
)
def test_bad_arguments_are_refused(bad):
    OuterAverager(**bad)


@refuses(
    ({"drift": 0.0}, "drift is 0.0; give a share"),
    ({"drift": 0.1, "least": 0}, "least 0, most 32; give whole"),
    ({"drift": 0.1, "least": 4, "most": 2}, "least 4, most 2"),
)
def test_bad_periods_are_refused(bad):
    AdaptivePeriod(**bad)


# ---- settings, and an averager of them -------------------------------------------------------------


def test_ranks_compare_all_settings():
    one, other = (OuterAverager(period=period)._settings() for period in (4, 8))
    assert {name for name in one if one[name] != other[name]} == {"period"}


def test_settings_are_checked_when_they_are_made_and_can_be_sent():
    with pytest.raises(ConfigurationError, match="unknown algorithm 'nonsense'"):
        OuterStep(algorithm="nonsense", period=8)
    settings = OuterStep(period=8, density=1)
    assert settings.chosen.name == "allgather" and settings.described()["period"] == 8
    again = pickle.loads(pickle.dumps(settings))
    assert again.described() == settings.described() and type(again.density) is float


def test_a_loaded_averager_still_tells_its_numbers_alone():
    """``stats`` and ``reducer`` may be used on one rank, because only a step is collective."""
    local = OuterAverager(model(), period=1, density=1.0)
    local.step()
    state, reducer = local.state_dict(), local.reducer
    local.load_state_dict(state)
    assert local.reducer is reducer and local.stats()["local_steps"] == 1
    local.step()
    assert local.reducer is not reducer and local.steps == 2


def test_a_step_that_could_not_begin_from_a_loaded_state_can_be_tried_again():
    state = trained_state()
    local = OuterAverager(torch.nn.Linear(3, 1), period=1, density=1.0)
    local.load_state_dict(state)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="elements, this model has"):
            local.step()


def trained_state():
    local = OuterAverager(model(), period=1, density=1.0)
    local.step()
    return local.state_dict()


def test_no_vector_of_the_models_size_is_kept():
    local = OuterAverager(model(), period=1, density=1.0)
    local.step()
    assert local._weights.vector.numel() == 0
    local.finish()
    assert local._weights.vector.numel() == 0
