"""Test how ``attach(ddp, adamw, "auto")`` predicts and chooses the faster exchange."""

import pytest

from sparsync.cost.machine import Machine
from sparsync.cost.planner import predict, seconds_of_updates
from sparsync.dense_or_updates import by_seconds
from sparsync.errors import ConfigurationError
from sparsync.presets import resolve
from sparsync.updates import OuterStep
from sparsync.updates.family import OUTER_SETTINGS
from tests.tables import cases

SIZE = 8_443_552
ONE_BIT, TWO_BITS = (resolve("quantised", bits=bits, block=512) for bits in (1, 2))


def choice(machine, size=SIZE, ranks=4, **settings):
    outer = OuterStep(**{**OUTER_SETTINGS["updates"], **settings})
    return by_seconds(outer, size, ranks, machine)


def seconds(machine, period=2, algorithm=TWO_BITS):
    on = {"size": SIZE, "world_size": 4, "machine": machine}
    updates = seconds_of_updates(algorithm, period, **on)
    return predict(resolve("dense"), k=SIZE, **on).seconds, updates


@cases((8e-7, 43.5, 1.04), (8e-8, 4.5, 0.382), (8e-9, 0.644, 0.317))
def test_the_lab_measured_such_steps(beta, dense, updates):
    """The steps are those of ``benchmarks/time_to_loss.md``: one bit, 4 ranks, 0.22 s of computation."""
    found = [0.22 + part for part in seconds(Machine(alpha=1e-4, beta=beta), algorithm=ONE_BIT)]
    assert found == pytest.approx([dense, updates], rel=0.12)


def test_only_the_exchange_is_rarer_with_a_longer_period():
    """A step's passes over 8.4 M elements at 0.16 ns per byte take 5.4 ms each."""
    often, rare = (seconds(Machine(), period)[1] for period in (1, 10**9))
    assert rare == pytest.approx(8 * 4 * SIZE * 0.16e-9)
    assert seconds(Machine(), 4)[1] - rare == pytest.approx((often - rare) / 4)


@pytest.mark.parametrize("alpha", [0.0, 5e-5, 1e-3])
def test_updates_are_chosen_below_one_bandwidth_and_dense_above(alpha):
    machines = [Machine(alpha=alpha, beta=2.0**power) for power in range(-10, -60, -1)]
    chosen = [choice(machine).exchange for machine in machines]
    assert chosen == sorted(chosen, reverse=True) and {*chosen} == {"updates", "gradients"}


def test_dense_is_chosen_unless_updates_save_a_tenth():
    """From about 5.6 Gbit/s, dense gradients take no longer."""
    near = 0
    for beta in (1.3e-9 + 1e-11 * step for step in range(60)):
        machine = Machine(beta=beta)
        dense, updates = seconds(machine)
        assert (choice(machine).exchange == "updates") == (updates < 0.9 * dense)
        near += 0.9 * dense <= updates < dense
    assert near > 3


def test_where_nothing_is_exchanged_dense_is_the_answer():
    for machine in (Machine(beta=1e-3), Machine(alpha=0.0, beta=0.0, gamma=0.0)):
        assert choice(machine, ranks=1).exchange == "gradients"
        assert choice(machine, size=0).exchange == "gradients"


def test_it_says_both_times_and_what_they_do_not_tell():
    slow, fast = (choice(Machine(beta=beta)) for beta in (8e-8, 8e-12))
    assert slow.why.startswith("updates every 2 steps take about ")
    assert ", dense gradients 4" in slow.why
    assert fast.why.startswith("dense gradients take about ")
    assert ", updates every 2 steps" in fast.why
    for made in (slow, fast):
        assert "steps to a given loss differs between the two and is not known" in made.why
        assert "sparsync-papers" in made.why and "\n" not in made.why
    assert choice(Machine(beta=8e-8), period=8).why.startswith("updates every 8 steps take")


def test_updates_whose_seconds_are_not_known_are_refused():
    with pytest.raises(ConfigurationError, match="the cost of 'auto' is unknown"):
        seconds_of_updates(resolve("auto"), 2, size=9, world_size=2, machine=Machine())
