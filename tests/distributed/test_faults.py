"""Ranks that are killed or frozen in every phase: the others end in time, and say who, when and where.

The slow sweeps take their phases from simulated runs of all presets and schemes.
"""

import random
import re
import time

import pytest
import torch
import torch.distributed as dist

from sparsync.averaging import Wagma
from sparsync.averaging.schemes import SCHEMES
from sparsync.cli.launch import launch
from sparsync.presets import PRESETS
from sparsync.transports.process_group import RollCall, connect_group
from tests.on_ranks import same_everywhere

from .fault_programs import STEPS, breakdowns_of_preset, breakdowns_of_scheme
from .fault_server import Jobs

pytestmark = pytest.mark.gloo

RANKS = 3
TIMEOUT = 10.0  # seconds; of the ranks' waits
LINGER = 5.0  # seconds that closing may take: ``zmq.mesh.LINGER``
FROZEN_TIMEOUT = 1.5


@pytest.fixture(scope="module")
def jobs():
    jobs = Jobs()
    yield jobs
    jobs.close()


def check(answer, victim, step, code=-9, seconds=TIMEOUT + LINGER):
    """What always holds: nobody hangs, nothing is left, every survivor names a peer in time."""
    assert not answer["hung"] and not answer["left"], answer
    assert answer["ranks"][victim]["code"] == code, "the victim never came to its moment"
    named = set()
    for number, rank in enumerate(answer["ranks"]):
        if number != victim:
            said = rank["said"]
            assert rank["code"] == 0 and said["threads"] == [], answer
            assert rank["seconds"] < seconds, answer
            assert said["error"] in ("PeerError", "DeadlineError"), answer
            # the victim's last messages may be lost with it, or be enough for the whole step
            place = rf"rank {number}, step ({step - 1}|{step}|{step + 1})[:,] .*phase '[a-z -]+'"
            assert re.match(place, said["text"]), answer
            assert said.get("kept", True), "a residual, threshold or boundary has changed"
            named |= set(re.findall(r"rank (\d+)", said["text"].split("phase")[0])[1:])
            named |= set(re.findall(r"ranks? (\d+)", said["text"].split("phase")[1]))
    assert str(victim) in named, answer


def kill(jobs, transport, preset, victim, moment, **more):
    return jobs.run(
        "fault_programs.reduce_steps",
        RANKS,
        transport=transport,
        timeout=TIMEOUT,
        algorithm=preset,
        victim=victim,
        moment=moment,
        **more,
    )


# ---- every phase of every collective --------------------------------------------------------------


@pytest.mark.parametrize(
    ("transport", "preset", "victim", "moment"),
    [
        ("zmq", "budgeted", 1, (3, "split", 0)),
        ("zmq", "oktopk", 0, (2, "boundaries", 1)),
        ("torch", "budgeted", 2, (3, "allgather", 0)),
        ("torch", "dense", 0, (3, "dense", 0)),
    ],
)
def test_a_killed_rank_is_named(jobs, transport, preset, victim, moment):
    check(kill(jobs, transport, preset, victim, moment), victim, moment[0])


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("transport", ["zmq", "torch"])
def test_a_rank_killed_in_any_phase_is_named(jobs, transport, preset):
    found = breakdowns_of_preset(preset, RANKS)
    assert {moment[1] for _, moment in found} >= {"xi"}
    for victim, moment in found:
        check(kill(jobs, transport, preset, victim, moment), victim, moment[0])


def test_the_sweep_meets_every_phase_of_oktopk():
    phases = {moment[1] for _, moment in breakdowns_of_preset("oktopk", RANKS)}
    assert phases >= {"split", "sizes", "threshold", "balance", "allgatherv", "boundaries"}


def test_a_store_that_is_gone_as_well_is_said(monkeypatch):
    def gone():
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", gone)
    assert "the store does not answer" in RollCall(None, 0, 3).missing()


# ---- frozen ---------------------------------------------------------------------------------------


def freeze(jobs, transport, preset, victim, moment):
    answer = jobs.run(
        "fault_programs.reduce_steps",
        RANKS,
        transport=transport,
        timeout=FROZEN_TIMEOUT,
        algorithm=preset,
        victim=victim,
        moment=moment,
        how="SIGSTOP",
    )
    check(answer, victim, moment[0], code=0, seconds=FROZEN_TIMEOUT + 1 + LINGER)
    errors = [rank["said"]["error"] for rank in answer["ranks"]]
    assert "DeadlineError" in errors[:victim] + errors[victim + 1 :], answer
    assert errors[victim] in ("PeerError", "DeadlineError"), answer  # when it may go on
    assert answer["ranks"][victim]["said"]["kept"], answer


@pytest.mark.parametrize("transport", ["zmq", "torch"])
def test_a_frozen_rank_is_named_at_the_deadline(jobs, transport):
    freeze(jobs, transport, "budgeted", 1, (3, "split", 0))


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_a_rank_frozen_in_any_preset_is_named(jobs, preset):
    victim, moment = breakdowns_of_preset(preset, RANKS)[0]
    freeze(jobs, "zmq", preset, victim, moment)


# ---- averages of models ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("transport", ["zmq", "torch"])
def test_averaging_ends_or_goes_on_when_a_rank_is_killed(jobs, transport, scheme):
    for victim, moment in breakdowns_of_scheme(scheme, RANKS):
        answer = jobs.run(
            "fault_programs.average_steps",
            RANKS,
            transport=transport,
            timeout=4.0,
            scheme=scheme,
            victim=victim,
            moment=moment,
        )
        assert not answer["hung"] and not answer["left"], answer
        assert answer["ranks"][victim]["code"] == -9, "the victim never came to its moment"
        for number, rank in enumerate(answer["ranks"]):
            if number != victim:
                said = rank["said"]
                assert rank["code"] == 0 and said["threads"] == [], answer
                assert rank["seconds"] < 4.0 + 1 + LINGER, answer
                if said["error"] is None:  # pairs that did not need the victim
                    assert scheme == "adpsgd" and said["step"] == STEPS + 1, answer
                    continue
                assert re.match(rf"rank {number}, step \d+[:,] .*phase '[a-z]+'", said["text"]), (
                    answer
                )
                assert re.search(r"rank \d+.*ranks? \d+", said["text"]), answer


def wagma(jobs, transport, how, **more):
    """Four ranks, of which one breaks down at step 7 of 30; the others wait 1 s for it."""
    answer = jobs.run(
        "fault_programs.average_by_wagma",
        4,
        limit=90.0,
        transport=transport,
        timeout=60.0,
        victim=2,
        moment=7,
        how=how,
        steps=30,
        deadline=1.0,
        **more,
    )
    assert not answer["hung"], answer
    others = [rank["said"] for rank in answer["ranks"] if rank is not answer["ranks"][2]]
    assert all(rank["left out"] == [2] and rank["own"] == 30 for rank in others), answer
    return answer["ranks"][2], {rank["weights"] for rank in others}


@pytest.mark.parametrize("transport", ["torch", "zmq"])
def test_the_others_train_on_when_a_rank_is_killed(jobs, transport):
    victim, weights = wagma(jobs, transport, "SIGKILL")
    assert victim["code"] == -9 and len(weights) == 1


def test_a_rank_that_stands_still_is_left_out_and_comes_back(jobs):
    victim, weights = wagma(jobs, "zmq", "SIGSTOP", thaw=2.0)
    assert victim["said"]["own"] < 30, "it was given the others' steps"
    assert weights == {victim["said"]["weights"]}


def many_steps(steps):
    """Average next to random delays."""
    rank, drawn = dist.get_rank(), random.Random(dist.get_rank())
    model = torch.nn.Linear(8, 4)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    with Wagma(model, comm=connect_group(transport="torch", timeout=60.0)) as averager:
        for _ in range(steps):
            if drawn.random() < 0.05:
                time.sleep(drawn.choice([0.001, 0.01, 0.05]))
            with torch.no_grad():
                model.weight += rank
            averager.step()
        averager.finish()
        assert same_everywhere(model.weight.detach()) and averager.steps == steps


@pytest.mark.slow
def test_nobody_hangs_in_thousands_of_steps_with_random_delays():
    launch(many_steps, 8, 3000, timeout=60.0)
