"""Test that the committed fit matches its curves, and test plans, pages and errors."""

import importlib
import json
import math
import sys
from pathlib import Path

import pytest

from sparsync.cost.machine import Machine
from sparsync.cost.planner import predict, seconds_of_updates
from sparsync.errors import ConfigurationError
from sparsync.presets import candidates, resolve
from sparsync_papers.time_to_loss import steps_to_loss
from sparsync_papers.time_to_loss.methods import METHODS, allreduced, plan_loss, rounds
from sparsync_papers.time_to_loss.steps_to_loss import FARTHEST, Recipe, steps_ratio

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LOADED = ("frontier", "steps", "surface")
SLOW, FAST = Machine(alpha=1e-4, beta=8e-7), Machine(alpha=1e-6, beta=8e-11)
GPT = ["--ranks", "4", "--model-size", "8443552", "--compute", "0.25"]


def planned(machine, optimizer="adamw", size=8_443_552, ranks=4, **options):
    return plan_loss(size, ranks, machine, candidates(), optimizer=optimizer, **options)


@pytest.fixture
def fitted(monkeypatch):
    """Import the benchmark as its command does."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("steps")
    for name in [name for name in sys.modules if name.split(".")[0] in LOADED]:
        del sys.modules[name]


# ---- steps ------------------------------------------------------------------------------------------


def test_the_committed_coefficients_are_the_fit_of_the_committed_curves(fitted):
    data = fitted.observations(fitted.Results(fitted.DATA).rows)
    found = fitted.fit(data)
    assert set(steps_to_loss.COEFFICIENTS) == set(found.coefficients)
    for name, value in found.coefficients.items():
        assert steps_to_loss.COEFFICIENTS[name] == pytest.approx(value, abs=2e-3), name
    errors = [abs(math.log(s.ratio) - log) for s, log in fitted.left_out(data) if not s.bound]
    assert pytest.approx(fitted.likely(errors), abs=0.02) == steps_to_loss.LIKELY


def test_a_bound_counts_for_more_than_itself_and_a_left_out_task_is_not_seen(fitted):
    recipe = Recipe("updates", 2)
    seen = fitted.Observation("a", "updates", "adamw", 4, 8, 300, 0.5, recipe, 2.0)
    bound = fitted.replace(seen, bound=True)
    measured, bounded = fitted.fit([seen] * 3), fitted.fit([bound] * 3)
    assert bounded.log_ratio(seen) > measured.log_ratio(seen) > 0.5
    apart = fitted.left_out([seen, fitted.replace(seen, task="b", ratio=1.0)])
    assert [log for _, log in apart] == pytest.approx([0.0, math.log(2)], abs=0.1)


def test_every_planned_method_is_one_of_the_frontier(fitted):
    known = importlib.import_module("frontier.methods").METHODS
    for method in METHODS:
        if method.recipe.family not in ("dense", "sparse gradients"):
            assert fitted.recipe_of(method.name) == method.recipe, method.name
            assert set(method.optimizers) & set(known[method.name].optimizers)


def test_ratios_grow_with_the_period_and_are_bounded():
    def ratio(period):
        return steps_ratio(Recipe("updates", period), "adamw", 4, 300)

    assert ratio(2).mean < ratio(4).mean < ratio(20).mean
    assert 0.5 < ratio(2).low < ratio(2).mean < ratio(2).high < 2
    assert ratio(2).reached and not ratio(100).reached
    assert not steps_ratio(Recipe("sparse gradients"), "adamw", 4, 300).reached
    assert steps_ratio(Recipe("sparse gradients"), "sgd", 4, 300).reached
    longest = steps_ratio(Recipe("updates", 2), "adamw", 4, 3000)
    assert longest == steps_ratio(Recipe("updates", 2), "adamw", 4, 10**6)


# ---- seconds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("idle", [0.0, 1.0])
@pytest.mark.parametrize("alpha", [0.0, 5e-5, 0.04])
def test_fewer_bytes_never_take_longer(alpha, idle):
    machine = Machine(alpha=alpha, beta=8e-8)
    sizes = [2.0**power for power in range(28)]
    for seconds in (
        [allreduced(size, 4, machine, idle) for size in sizes],
        [rounds(2, size, 4, machine, idle) for size in sizes],
    ):
        assert seconds == sorted(seconds) and seconds[0] >= 2 * alpha


def test_the_seconds_behind_auto_are_about_those_of_the_lab(fitted):
    """The prediction of ``docs/planning.md`` does not model TCP's windows and losses."""
    surface, near, fewer = importlib.import_module("surface"), {}, set()
    found = {}
    for row in [*fitted.Results(fitted.DATA).rows, *fitted.Results(surface.CELLS).rows]:
        if row["lab"] and row.get("rest") and row["optimizer"] == "adamw":
            found[row["task"], row["lab"], row["method"]] = row
    for task, lab, method in found:
        if method != "updates-1bit":
            continue
        for name in ("dense", "updates-1bit"):
            row = found[task, lab, name]
            on = {"size": row["parameters"], "world_size": row["ranks"]}
            on["machine"] = surface.machine_of(lab, row["ranks"])
            one_bit = resolve("quantised", bits=1, block=512)
            dense = predict(resolve("dense"), k=on["size"], **on).seconds
            exchange = dense if name == "dense" else seconds_of_updates(one_bit, 2, **on)
            ratio = (row["computation"] + exchange) / row["rest"]["seconds"]
            near.setdefault(name, []).append(1 / 1.25 <= ratio <= 1.25)
        fewer.add(
            found[task, lab, "updates-1bit"]["rest"]["seconds"]
            < found[task, lab, "dense"]["rest"]["seconds"]
        )
    counts = {name: (sum(good), len(good)) for name, good in near.items()}
    assert counts == {"dense": (12, 15), "updates-1bit": (13, 15)} and fewer == {True}


def test_slower_links_never_make_a_step_shorter():
    for alpha in (1e-5, 1e-2):
        steps_of = [
            {one.method: one.seconds_step for one in planned(Machine(alpha=alpha, beta=b)).table}
            for b in (8e-10, 8e-9, 8e-8, 8e-7)
        ]
        for method in ("dense", "fp16", "powersgd-r4", "updates", "updates-overlap", "diloco-h30"):
            seconds = [of[method] for of in steps_of]
            assert seconds == sorted(seconds), method


def test_the_lab_measured_such_steps():
    """The steps are those of ``benchmarks/frontier.md``: 8.4 M parameters, 4 ranks on 2 cores."""
    measured = {("dense", 8e-7): 43.5, ("dense", 8e-8): 4.5}
    measured |= {("updates-1bit", 8e-7): 1.04, ("updates-h4-overlap1", 8e-7): 0.40}
    measured |= {("updates-1bit", 8e-8): 0.42, ("updates-overlap", 8e-8): 0.37}
    for (method, beta), seconds in measured.items():
        made = planned(Machine(alpha=1e-4, beta=beta), compute=0.26)
        found = next(one for one in made.table if one.method == method)
        assert found.seconds_step == pytest.approx(seconds, rel=0.25), method


def test_a_window_is_halved_in_every_pause_and_opens_again():
    """At 100 Mbit/s and 80 ms RTT, all of 0.9 MB is in flight, and takes 0.072 s plus latency."""
    far = Machine(alpha=0.04, beta=8e-8)

    def late(idle):
        return rounds(1, 3e5, 4, far, idle) - rounds(1, 3e5, 4, far)

    assert rounds(1, 3e5, 4, far) == pytest.approx(0.112)
    assert [late(idle) for idle in (0.1, 0.21, 0.5)] == pytest.approx([0, 0.044, 0.044 + 0.062])
    assert late(10.0) == late(100.0) > late(1.0)  # from ten packets per connection on
    assert rounds(1, 1e6, 4, Machine(alpha=0.0, beta=8e-8), 10.0) == pytest.approx(0.24)


def test_what_does_not_fit_into_a_queue_costs_round_trips():
    """0.1 s at 10 Mbit/s is 125 kB; 100 packets to each of 3 ranks take sqrt(300) / 4 round trips."""
    far, near = (Machine(alpha=alpha, beta=8e-7) for alpha in (0.02, 0.0))

    def late(nbytes, world_size=4):
        alone = [rounds(1, nbytes, world_size, machine) for machine in (far, near)]
        return alone[0] - 0.02 - alone[1]

    assert late(41_000) == pytest.approx(0)
    assert late(144_800) == pytest.approx(0.04 * 0.25 * 300**0.5)
    assert 0 < late(60_000) < 0.5 * late(80_000)
    assert late(10**6, 2) == pytest.approx(0), "one connection has the link for itself"


def test_buckets_are_summed_two_at_a_time():
    far = Machine(alpha=0.04, beta=0.0)
    whole, halves = (allreduced(64 * 2**20, 4, far, bucket=2**power * 2**20) for power in (6, 5))
    assert whole == 2 * halves == pytest.approx(6 * 16 * 0.04)
    assert allreduced(64 * 2**20, 4, far, bucket=2**20) == pytest.approx(halves)
    alone = allreduced(64 * 2**20, 4, Machine(alpha=0.0, beta=8e-8), bucket=2**20)
    assert alone == pytest.approx(1.5 * 64 * 2**20 * 8e-8)


# ---- choices ----------------------------------------------------------------------------------------


def test_slow_links_take_few_bits_and_fast_ones_dense():
    for optimizer, ways in (
        ("adamw", ("averages", "local steps every ")),
        ("muon", ("averages", "local steps every ")),
        ("sgd", ("sparse gradients",)),
    ):
        slow, fast = (planned(m, optimizer, compute=0.25) for m in (SLOW, FAST))
        assert slow.way.startswith(ways) and slow.why.startswith(
            f"{slow.way}: {slow.choice} takes "
        )
        assert (fast.choice, fast.way) == ("dense", "dense") and fast.why.startswith(
            "dense: the next"
        )
        assert slow.table[0].seconds.mean < 0.1 * slow.dense.seconds.mean
    only = planned(SLOW, methods=("dense", "updates"))
    assert [one.method for one in only.table] == ["updates", "dense"]


def test_of_methods_that_are_about_as_soon_the_simplest_is_chosen():
    order = [method.name for method in METHODS]
    for beta in (8e-7, 8e-8, 2e-8, 8e-9, 2e-9, 8e-10, 8e-11):
        made = planned(Machine(alpha=1e-5, beta=beta), compute=0.25)
        there = [one for one in made.table if one.steps.surely_reached]
        soonest = min(one.seconds.mean for one in there)
        near = [one.method for one in there if one.seconds.mean <= 1.1 * soonest]
        assert made.choice == min(near, key=order.index)
        times = [one.seconds.mean for one in there[1:]]
        assert times == sorted(times)


def test_what_may_not_reach_the_loss_is_not_chosen():
    made = planned(Machine(alpha=0.04, beta=8e-7), steps=300, compute=0.25)
    (rare,) = (one for one in made.table if one.method == "updates-h10-overlap2")
    assert rare.steps.reached and rare.steps.high > FARTHEST
    assert rare.seconds.mean < made.table[0].seconds.mean and made.choice != rare.method


def test_dense_steps_at_the_start_are_counted():
    steps_of = {}
    for length in (100, 200, 300):
        (steps_of[length],) = (
            one for one in planned(SLOW, "sgd", steps=length).table if one.method == "powersgd-r4"
        )
    dense = planned(SLOW, "sgd").dense.seconds_step
    one = steps_of[100]
    more = one.seconds.mean - 100 * one.steps.mean * one.seconds_step
    assert more == pytest.approx(10 * (dense - one.seconds_step)) and more > 0
    each = (steps_of[300].seconds.mean - steps_of[200].seconds.mean) / 100
    assert each == pytest.approx(one.steps.mean * one.seconds_step)


def test_what_is_not_reached_is_never_chosen():
    made = planned(Machine(alpha=1e-4, beta=1e-3), compute=0.0)
    reached = [one.steps.reached for one in made.table]
    assert reached == sorted(reached, reverse=True) and not all(reached)
    assert made.table[-1].seconds_step < made.dense.seconds_step


def test_where_nothing_is_exchanged_dense_is_the_answer():
    assert planned(SLOW, ranks=1).why == "dense: one rank has nobody to exchange with"
    assert planned(SLOW, size=0).choice == "dense"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer": "adam"}, "optimizer is adam; give one of adamw, muon, sgd"),
        ({"steps": 0}, "steps is 0; give the steps that dense takes, >= 1"),
        ({"compute": math.inf}, "compute is inf; give seconds >= 0"),
        ({"size": -1}, "size is -1"),
        ({"ranks": 0}, "world_size is 0; give at least 1 rank"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(options, words):
    with pytest.raises(ConfigurationError, match=words):
        planned(SLOW, **options)


# ---- commands ---------------------------------------------------------------------------------------


def test_the_page_names_a_way_and_why(command):
    given = [*GPT, "--network", "10mbit,10ms", "--optimizer", "adamw"]
    code, out, err = command("time-to-loss", *given)
    assert (code, err) == (0, "")
    rows = [line.split()[0] for line in out.splitlines() if " x " in line or "not reached" in line]
    assert {"dense", "fp16", "updates", "updates-overlap", "diloco-h100"} <= set(rows)
    assert "local steps every" in out and "times (" in out and "that is: OuterStep" in out
    alone = ["--ranks", 1, "--model-size", 9, "--network", "1gbit,1us", "--optimizer", "sgd"]
    code, out, _ = command("time-to-loss", *alone)
    assert code == 0 and out.splitlines()[-1] == "dense: one rank has nobody to exchange with"


def test_the_json_of_a_plan_has_ratios_and_times(command, tmp_path):
    path = tmp_path / "plan.json"
    given = [*GPT, "--network", "100mbit,50us", "--optimizer", "muon"]
    assert command("time-to-loss", *given, "--steps-to-loss", 300, "--json", path)[0] == 0
    made = json.loads(path.read_text())
    assert (made["choice"], made["steps_of_dense"]) == (made["table"][0]["method"], 300)
    starts = {method.name: method.start for method in METHODS}
    (dense,) = (one["seconds_step"] for one in made["table"] if one["method"] == "dense")
    for entry in made["table"]:
        until = 300 * entry["seconds_step"] * entry["steps"]["mean"]
        until += starts.get(entry["method"], 0) * (dense - entry["seconds_step"])
        assert entry["seconds"]["mean"] == pytest.approx(until)
        assert entry["seconds"]["low"] <= until <= entry["seconds"]["high"]
        assert entry["reached"] == (entry["steps"]["mean"] <= steps_to_loss.FARTHEST)
    alone = json.loads(command("time-to-loss", *given, "--steps-to-loss", 300, "--json", "-")[1])
    assert alone == made


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "Missing option '--optimizer'"),
        (["--optimizer", "lion"], "optimizer is lion; give one of adamw, muon, sgd"),
        (["--optimizer", "sgd", "--steps-to-loss", "0"], "give a number > 0"),
        (["--optimizer", "sgd", "--compute", "-1"], "compute is -1"),
    ],
)
def test_wrong_options_are_refused(command, options, words):
    code, out, err = command("time-to-loss", *GPT[:4], "--network", "100mbit,50us", *options)
    assert code == 2 and err.startswith("error: ") and words in err and out == ""


def test_it_takes_the_doctors_measurements(command, tmp_path):
    path = tmp_path / "doctor.json"
    path.write_text(json.dumps({"machine": SLOW.as_dict()}))
    given = [*GPT, "--optimizer", "adamw", "--machine", path, "--json", "-"]
    made = json.loads(command("time-to-loss", *given)[1])
    assert made["why"] == planned(SLOW, compute=0.25).why


def test_a_long_pause_only_closes_the_windows():
    """A long pause halves TCP's windows repeatedly, but not below the smallest window."""
    far = Machine(alpha=0.04, beta=8e-8)
    hour, day = (allreduced(1e7, 4, far, idle) for idle in (3_600.0, 86_400.0))
    assert hour == day > allreduced(1e7, 4, far)
