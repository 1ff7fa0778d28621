"""If a rank fails, the others end in time and name the rank, step and phase; nothing is left over.

The failures are ranks that are killed or frozen in every phase (the slow sweeps take their phases
from simulated runs of all presets and schemes), full disks, models that raise, links that are cut,
and Ctrl-C.
"""

import contextlib
import os
import random
import re
import signal
import subprocess
import time

import pytest
import torch
import torch.distributed as dist

from sparsync.averaging.schemes import SCHEMES
from sparsync.cli.lab import Lab, _run_command
from sparsync.cli.launch import launch
from sparsync.presets import PRESETS
from sparsync.published.wagma import Wagma
from sparsync.transports.process_group import RollCall, connect_group
from tests.on_ranks import same_everywhere

from . import fault_programs as programs
from .commands import end, start, torchrun
from .fault_jobs import Fault, run
from .fault_programs import STEPS, breakdowns_of_preset, breakdowns_of_scheme
from .test_lab import IN_THE_LAB

pytestmark = pytest.mark.gloo

RANKS = 3
LINGER = 5.0  # seconds that closing may take: ``zmq.mesh.LINGER``
BOTH = pytest.mark.parametrize("transport", ["zmq", "torch"])


def said_by(answer, codes=(0, 0, 0)):
    """Return every rank's error."""
    assert [rank["code"] for rank in answer] == list(codes), answer
    return [rank["said"] for rank in answer]


def check_survivors(answer, fault, step, seconds):
    """Check that every survivor names itself, the step and a peer in time, and loses nothing."""
    named = set()
    for number, rank in enumerate(answer):
        if number != fault.victim:
            said = rank["said"]
            assert rank["code"] == 0 and rank["seconds"] < seconds, answer
            assert said["error"] in ("PeerError", "DeadlineError"), answer
            # the victim's last messages may be lost with it, or may be all that the others need for
            # that step
            at = rf"({step - 1}|{step}|{step + 1})"  # updates: exchanges, here one per local step
            place = rf"rank {number}, (step|exchange {at}, local step) {at}[:,] .*phase '[a-z -]+'"
            assert re.match(place, said["text"]), answer
            assert said["kept"], "a residual, threshold or boundary has changed"
            named |= set(re.findall(r"rank (\d+)", said["text"].split("phase")[0])[1:])
            named |= set(re.findall(r"ranks? (\d+)", said["text"].split("phase")[1]))
    assert str(fault.victim) in named, answer


# ---- killed, in every phase of every collective ---------------------------------------------------


def kill(transport, preset, victim, moment):
    fault = Fault(transport, victim=victim, moment=moment)
    answer = run(programs.reduce_steps, RANKS, fault, algorithm=preset)
    assert answer[victim]["code"] == -9, "the victim never came to its moment"
    check_survivors(answer, fault, moment[0], fault.timeout + LINGER)


@pytest.mark.parametrize(
    ("transport", "preset", "victim", "moment"),
    [
        ("zmq", "budgeted", 1, (3, "split", 0)),
        ("zmq", "oktopk", 0, (2, "boundaries", 1)),
        ("torch", "budgeted", 2, (3, "allgather", 0)),
        ("torch", "dense", 0, (3, "dense", 0)),
    ],
)
def test_a_killed_rank_is_named(transport, preset, victim, moment):
    kill(transport, preset, victim, moment)


def in_turn(found, transport):
    """Return a transport's share of the moments: each phase's first with one, its middle with the other.

    Phases take turns, and both transports get a phase that has one moment only.
    """
    phases = {}
    for victim, moment in found:
        phases.setdefault(moment[:2], []).append((victim, moment))
    turn = transport == "torch"
    return [both[(turn + n) % len(both)] for n, both in enumerate(phases.values())]


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
@BOTH
def test_a_rank_killed_in_any_phase_is_named(transport, preset):
    found = breakdowns_of_preset(preset, RANKS)
    assert {moment[1] for _, moment in found} >= {"xi"}
    for victim, moment in in_turn(found, transport):
        kill(transport, preset, victim, moment)


def test_the_sweep_meets_every_phase_of_oktopk():
    phases = {moment[1] for _, moment in breakdowns_of_preset("oktopk", RANKS)}
    assert phases >= {"split", "sizes", "threshold", "balance", "allgatherv", "boundaries"}


def test_a_store_that_is_gone_as_well_is_said(monkeypatch):
    def gone():
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", gone)
    assert "the store does not answer" in RollCall(None, 0, 3).missing()


# ---- frozen ---------------------------------------------------------------------------------------


def freeze(transport, preset, victim, moment):
    fault = Fault(transport, 1.5, victim, moment, "SIGSTOP")
    answer = run(programs.reduce_steps, RANKS, fault, algorithm=preset)
    check_survivors(answer, fault, moment[0], fault.timeout + 1 + LINGER)
    late = said_by(answer).pop(victim)  # when it may continue
    assert late["error"] in ("PeerError", "DeadlineError") and late["kept"], answer
    others = [one["said"]["error"] for one in answer if one["said"] is not late]
    assert "DeadlineError" in others, answer


@BOTH
def test_a_frozen_rank_is_named_at_the_deadline(transport):
    freeze(transport, "budgeted", 1, (3, "split", 0))


@pytest.mark.slow
def test_a_rank_that_stands_still_for_less_than_the_timeout_goes_on():
    """With a short ``timeout=``, the pause is longer than ZeroMQ waits for a sign of life."""
    fault = Fault("zmq", 60.0, 1, (3, "split", 0), "SIGSTOP", thaw=25.0, limit=120.0)
    said = said_by(run(programs.reduce_steps, RANKS, fault, algorithm="budgeted"))
    assert [one["error"] for one in said] == [None] * RANKS, said


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_a_rank_frozen_in_any_preset_is_named(preset):
    freeze("zmq", preset, *breakdowns_of_preset(preset, RANKS)[0])


# ---- averages of models ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
@BOTH
def test_averaging_ends_or_goes_on_when_a_rank_is_killed(transport, scheme):
    for victim, moment in in_turn(breakdowns_of_scheme(scheme, RANKS), transport):
        fault = Fault(transport, 4.0, victim, moment)
        answer = run(programs.average_steps, RANKS, fault, scheme=scheme)
        assert answer[victim]["code"] == -9, "the victim never came to its moment"
        for number, rank in enumerate(answer):
            if number != victim:
                said = rank["said"]
                assert rank["code"] == 0 and rank["seconds"] < 4.0 + 1 + LINGER, answer
                if said["error"] is None:  # pairs that did not need the victim
                    assert scheme == "adpsgd" and said["step"] == STEPS + 1, answer
                    continue
                place = rf"rank {number}, (exchange \d+, )?(local )?step \d+[:,] .*phase '[a-z]+'"
                assert re.match(place, said["text"]), answer
                assert re.search(r"rank \d+.*ranks? \d+", said["text"]), answer


def wagma(transport, how, thaw=0.0):
    """Run four ranks, one of which fails at step 7 of 30; the others wait 1 s for it."""
    fault = Fault(transport, 60.0, 2, 7, how, thaw, limit=90.0)
    answer = run(programs.average_by_wagma, 4, fault, steps=30, deadline=1.0)
    others = [rank["said"] for number, rank in enumerate(answer) if number != 2]
    assert all(rank["left out"] == [2] and rank["own"] == 30 for rank in others), answer
    return answer[2], {rank["weights"] for rank in others}


@BOTH
def test_the_others_train_on_when_a_rank_is_killed(transport):
    victim, weights = wagma(transport, "SIGKILL")
    assert victim["code"] == -9 and len(weights) == 1


def test_a_rank_that_stands_still_is_left_out_and_comes_back():
    victim, weights = wagma("zmq", "SIGSTOP", thaw=2.0)
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


# ---- a model that raises --------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_model_that_raises_on_one_rank_ends_all(when, transport):
    fault = Fault(transport, 3.0, 1)
    answer = run(programs.model_raises, 3, fault, when=when)
    check_survivors(answer, fault, 2, 3 + 1 + LINGER)
    said = said_by(answer)
    assert said[1]["text"] == f"the model failed going {when}" and said[1]["kept"]
    assert all("rank 1" in said[rank]["text"] for rank in (0, 2)), said


@BOTH
def test_a_rank_killed_in_an_exchange_of_updates_is_named(transport):
    fault = Fault(transport, 3.0, 1)
    answer = run(programs.killed_while_exchanging, RANKS, fault)
    assert answer[1]["code"] == -9, "the victim never came to its moment"
    check_survivors(answer, fault, 5, 3 + 1 + LINGER)


# ---- checkpoints ----------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MB."""
    try:
        _run_command(f"mount -t tmpfs -o size=1m tmpfs {tmp_path}")
    except Exception as error:
        pytest.skip(f"no file system can be mounted here ({error})")
    yield tmp_path
    _run_command(f"umount {tmp_path}")


def check_full_disk(folder, means, reason):
    fault = Fault(victim=1)
    said = said_by(run(programs.full_disk, 2, fault, folder=folder, means=means), (0, 0))
    names = ["shared.pt", *(f"sparsync-rank-{rank}-of-2.pt" for rank in range(2))]
    for one in said:
        assert one["error"] == "CheckpointError" and "\n" not in one["text"], one
        assert "earlier checkpoints are unchanged" in one["text"]
        assert one["files"] == [f"000001-step-00000002/{name}" for name in names], one
        assert one["loaded"] and one["as before"], one
        assert one["saved again"] == "000002-step-00000006", one
        assert one["seconds"] < 8, "waited for the timeout of 10 s"
    assert re.search(rf"cannot write .*rank-1-of-2\.pt: .*{reason}", said[1]["text"]), said[1]
    return said


def test_a_full_disk_leaves_the_last_checkpoint_and_training_goes_on(small_disk):
    check_full_disk(small_disk, "mount", "(No space|unexpected pos|failed|write)")


def test_a_rank_that_may_not_write_more_leaves_the_last_checkpoint(tmp_path):
    said = check_full_disk(tmp_path, "limit", "(File too large|unexpected pos|failed|write)")
    assert "rank 1 could not write its part of" in said[0]["text"]


def test_a_rank_killed_while_it_saves_leaves_the_last_checkpoint(tmp_path):
    said = said_by(
        run(programs.killed_while_saving, 3, Fault(victim=1), folder=tmp_path), (0, -9, 0)
    )
    for rank in (0, 2):
        assert said[rank]["error"] == "PeerError" and "'checkpoint'" in said[rank]["text"], said
        assert "step 4" in said[rank]["text"]
    for one in said_by(run(programs.resume, 3, Fault(), folder=tmp_path)):
        assert one["steps"] == 2 and one["as if"], one


# ---- links ----------------------------------------------------------------------------------------


def in_the_lab(transport, how, timeout, scale):
    """Do steps of ``budgeted`` on links of 100 Mbit/s; at step 2, the link of rank 1 is changed."""
    with Lab(3, "100mbit") as lab:
        seats = [lab.seat(rank) for rank in range(3)]
        moment = (2, "split", 0)
        fault = Fault(transport, timeout, 1, moment, how, limit=60.0, seats=seats)
        return run(programs.reduce_steps, 3, fault, algorithm="budgeted", scale=scale)


def throttled(share):
    slow = round(100e6 * share)
    return [f"tc qdisc change dev eth0 root tbf rate {slow}bit burst 16384 limit 4000000"]


@IN_THE_LAB
@BOTH
def test_a_cut_link_is_a_named_error_at_the_deadline(transport):
    answer = in_the_lab(transport, ["ip link set eth0 down"], 2.0, 1)
    said = said_by(answer)
    for rank, one in enumerate(said):
        assert one["error"] in ("PeerError", "DeadlineError") and one["kept"], one
        assert re.match(rf"rank {rank}, step 2: .*phase '[a-z]+'", one["text"]), one
        assert answer[rank]["seconds"] < 2 + 1 + LINGER + 1, answer
    # the store is outside the lab, so rank 1 can still answer gloo's roll call through it
    named = "rank 1" if transport == "zmq" else "(rank 1|all ranks are there)"
    assert all(re.search(named, said[rank]["text"]) for rank in (0, 2)), said


@pytest.mark.slow
@IN_THE_LAB
@BOTH
def test_a_throttled_link_is_slow_and_right_or_a_deadline(transport):
    fast = said_by(in_the_lab(transport, [], 20.0, 400))
    slow = said_by(in_the_lab(transport, throttled(0.01), 20.0, 400))
    late = said_by(in_the_lab(transport, throttled(0.001), 1.5, 400))
    assert [one["digest"] for one in slow] == [one["digest"] for one in fast]
    assert slow[1]["seconds"][3] > 5 * fast[1]["seconds"][3], (fast, slow)
    for rank, one in enumerate(late):
        assert one["error"] in ("PeerError", "DeadlineError") and one["kept"], one
        assert re.match(rf"rank {rank}, step [23]: .*phase '[a-z]+'", one["text"]), one
    assert "DeadlineError" in [one["error"] for one in late]


# ---- scripts and commands -------------------------------------------------------------------------

SCRIPT = [*torchrun(2), "-m", programs.__name__]


@pytest.mark.slow
def test_a_script_whose_model_raises_ends_by_itself():
    process = start(*SCRIPT, "backward")
    out, _ = end(process)
    assert process.returncode == 1, out
    assert "ValueError: the model failed going backward" in out


@pytest.mark.slow
def test_ctrl_c_under_torchrun_ends_all():
    process = start(*SCRIPT, "never")
    while "rank 0 at step" not in process.stdout.readline():
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, _ = end(process)
    assert process.returncode != 0, out


@pytest.mark.slow
def test_ctrl_c_while_the_command_starts_ends_all():
    """An interrupt during training is tested in ``test_train_cli.test_an_interrupt_ends_all``."""
    options = ["--algorithm", "budgeted", "--ranks", "2", "--steps", "1000000"]
    process = start("-m", "sparsync", "train", *options, "--layers", "1", "--width", "64")
    for seconds in (3, 20, 20):  # torch may swallow exceptions raised during its import
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            break
        os.killpg(process.pid, signal.SIGINT)
    out, _ = end(process)
    assert process.returncode in (130, -signal.SIGINT), out
