"""Whole jobs that fail: full disks, models that raise, links that are cut, Ctrl-C.  Nothing is left."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import astuple
from pathlib import Path

import pytest

from sparsync.cli.lab import Lab, _run_command

from .fault_server import Jobs, group_is_alive
from .test_lab import refusal

pytestmark = pytest.mark.gloo

ROOT = Path(__file__).parents[2]
MODULE = "tests.distributed.fault_training"


@pytest.fixture(scope="module")
def jobs():
    jobs = Jobs()
    yield jobs
    jobs.close()


def said_by(answer, codes=(0, 0, 0)):
    """What every rank said; nobody hung, and nothing is left."""
    assert not answer["hung"] and not answer["left"], answer
    assert [rank["code"] for rank in answer["ranks"]] == list(codes), answer
    said = [rank["said"] for rank in answer["ranks"]]
    assert all(one["threads"] == [] for one in said if one), answer
    return said


# ---- a model that raises --------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["zmq", "torch"])
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_model_that_raises_on_one_rank_ends_all(jobs, when, transport):
    seating = {"transport": transport, "timeout": 3.0, "victim": 1}
    answer = jobs.run("fault_training.model_raises", 3, when=when, **seating)
    said = said_by(answer)
    assert said[1]["text"] == f"the model failed going {when}"
    for rank in (0, 2):
        assert said[rank]["error"] in ("PeerError", "DeadlineError"), said[rank]
        assert re.match(rf"rank {rank}, step 2: .*phase '[a-z]+'.*", said[rank]["text"])
        assert "rank 1" in said[rank]["text"], said[rank]
    assert all(one["kept"] for one in said), said
    assert all(rank["seconds"] < 3 + 1 + 5 for rank in answer["ranks"])


# ---- checkpoints ----------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MB."""
    try:
        _run_command(f"mount -t tmpfs -o size=1m tmpfs {tmp_path}", 10.0)
    except Exception as error:
        pytest.skip(f"no file system can be mounted here ({error})")
    yield tmp_path
    _run_command(f"umount {tmp_path}", 10.0)


def check_full_disk(jobs, folder, means, reason):
    seating = {"transport": "zmq", "timeout": 10.0, "victim": 1}
    said = said_by(
        jobs.run("fault_training.full_disk", 2, folder=str(folder), means=means, **seating), (0, 0)
    )
    kept = ["000001-step-00000002/" + name for name in ("shared.pt", *FILES)]
    for one in said:
        assert one["error"] == "CheckpointError" and "\n" not in one["text"], one
        assert "the checkpoints of before are as they were" in one["text"]
        assert one["files"] == kept and one["loaded"] and one["as before"], one
        assert one["saved again"] == "000002-step-00000006", one
        assert one["seconds"] < 8, "waited for the timeout of 10 s"
    assert re.search(rf"cannot write .*rank-1-of-2\.pt: .*{reason}", said[1]["text"]), said[1]
    return said


FILES = [f"sparsync-rank-{rank}-of-2.pt" for rank in range(2)]


def test_a_full_disk_leaves_the_last_checkpoint_and_training_goes_on(jobs, small_disk):
    check_full_disk(jobs, small_disk, "mount", "(No space|unexpected pos|failed|write)")


def test_a_rank_that_may_not_write_more_leaves_the_last_checkpoint(jobs, tmp_path):
    said = check_full_disk(jobs, tmp_path, "limit", "(File too large|unexpected pos|failed|write)")
    assert "rank 1 could not write its part of" in said[0]["text"]


def test_a_rank_killed_while_it_saves_leaves_the_last_checkpoint(jobs, tmp_path):
    seating = {"transport": "zmq", "timeout": 10.0, "victim": 1}
    answer = jobs.run("fault_training.killed_while_saving", 3, folder=str(tmp_path), **seating)
    said = said_by(answer, (0, -9, 0))
    for rank in (0, 2):
        assert said[rank]["error"] == "PeerError" and "'checkpoint'" in said[rank]["text"], said
        assert "step 4" in said[rank]["text"]
    for one in said_by(jobs.run("fault_training.resume", 3, folder=str(tmp_path), **seating)):
        assert one == {"steps": 2, "as if": True, "threads": []}


# ---- links ----------------------------------------------------------------------------------------

CUT = ["ip link set eth0 down"]


def in_the_lab(jobs, transport, how, timeout, scale):
    """Do steps of ``budgeted`` on links of 100 Mbit/s; at step 2 something happens to rank 1's."""
    with Lab(3, "100mbit") as lab:
        return jobs.run(
            "fault_programs.reduce_steps",
            3,
            limit=60.0,
            transport=transport,
            timeout=timeout,
            algorithm="budgeted",
            scale=scale,
            victim=1,
            moment=(2, "split", 0),
            how=how,
            seats=[astuple(lab.seat(rank)) for rank in range(3)],
        )


def throttled(share):
    slow = round(100e6 * share)
    return [f"tc qdisc change dev eth0 root tbf rate {slow}bit burst 16384 limit 4000000"]


@pytest.mark.skipif(bool(refusal()), reason=refusal())
@pytest.mark.parametrize("transport", ["zmq", "torch"])
def test_a_cut_link_is_a_named_error_at_the_deadline(jobs, transport):
    answer = in_the_lab(jobs, transport, CUT, 2.0, 1)
    said = said_by(answer)
    for rank, one in enumerate(said):
        assert one["error"] in ("PeerError", "DeadlineError") and one["kept"], one
        assert re.match(rf"rank {rank}, step 2: .*phase '[a-z]+'", one["text"]), one
        assert answer["ranks"][rank]["seconds"] < 2 + 1 + 5 + 1, answer
    # the store is outside of the lab: over it, rank 1 can still answer gloo's roll call
    named = "rank 1" if transport == "zmq" else "(rank 1|all ranks are there)"
    assert all(re.search(named, said[rank]["text"]) for rank in (0, 2)), said


@pytest.mark.slow
@pytest.mark.skipif(bool(refusal()), reason=refusal())
@pytest.mark.parametrize("transport", ["zmq", "torch"])
def test_a_throttled_link_is_slow_and_right_or_a_deadline(jobs, transport):
    fast = said_by(in_the_lab(jobs, transport, [], 20.0, 400))
    slow = said_by(in_the_lab(jobs, transport, throttled(0.01), 20.0, 400))
    late = said_by(in_the_lab(jobs, transport, throttled(0.001), 1.5, 400))
    assert [one["digest"] for one in slow] == [one["digest"] for one in fast]
    assert slow[1]["seconds"][3] > 5 * fast[1]["seconds"][3], (fast, slow)
    for rank, one in enumerate(late):
        assert one["error"] in ("PeerError", "DeadlineError") and one["kept"], one
        assert re.match(rf"rank {rank}, step [23]: .*phase '[a-z]+'", one["text"]), one
    assert "DeadlineError" in [one["error"] for one in late]


# ---- scripts and commands -------------------------------------------------------------------------


def start(*command):
    """Start a command in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )


def end(process, seconds):
    """Wait for a command and for all that it started; nothing may be left."""
    try:
        out, _ = process.communicate(timeout=seconds)
        deadline = time.monotonic() + 5
        while group_is_alive(process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not group_is_alive(process.pid), "processes were left running"
    finally:
        if group_is_alive(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
    return out


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]


@pytest.mark.slow
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_script_whose_model_raises_ends_by_itself(when):
    process = start(*TORCHRUN, MODULE, when)
    out = end(process, 60)
    assert process.returncode == 1, out
    assert f"ValueError: the model failed going {when}" in out


@pytest.mark.slow
def test_ctrl_c_under_torchrun_ends_all(tmp_path):
    process = start(*TORCHRUN, MODULE, "never")
    while "rank 0 at step" not in process.stdout.readline():
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does
    out = end(process, 60)
    assert process.returncode != 0, out


@pytest.mark.slow
def test_ctrl_c_while_the_command_starts_ends_all():
    """Once it trains: ``test_train_cli.test_an_interrupt_ends_all``."""
    options = ["--algorithm", "budgeted", "--ranks", "2", "--steps", "1000000"]
    process = start("-m", "sparsync", "train", *options, "--layers", "1", "--width", "64")
    for seconds in (3, 20, 20):  # torch may swallow what is raised while it is imported
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            break
        os.killpg(process.pid, signal.SIGINT)
    out = end(process, 60)
    assert process.returncode in (130, -signal.SIGINT), out
