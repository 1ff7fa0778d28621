"""Averaging between real processes, one of which is killed, or stands still for a while."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from sparsync.cli.launch import launch

from .averaging_programs import many_steps

pytestmark = pytest.mark.gloo

RANKS, BREAKS = 4, 2


@contextmanager
def started(store, transport, how):
    """Processes of which one sends itself a signal at step 7; none is left behind."""
    program = [sys.executable, "-m", "tests.distributed.averaging_programs"]
    common = [str(RANKS), str(store), transport, str(BREAKS), str(int(how))]
    processes = [
        subprocess.Popen(
            [*program, str(rank), *common],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "MASTER_ADDR": "127.0.0.1"},
        )
        for rank in range(RANKS)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()


def state(process):
    """What the kernel says of a process: "T" is stopped."""
    return Path(f"/proc/{process.pid}/stat").read_text().rsplit(") ", 1)[1][0]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["torch", "zmq"])
def test_the_others_train_on_when_a_rank_is_killed(tmp_path, transport):
    with started(tmp_path / "store", transport, signal.SIGKILL) as processes:
        ends = [process.communicate(timeout=90) for process in processes]
    assert processes[BREAKS].returncode == -9
    said = {ends[rank][0] for rank in range(RANKS) if rank != BREAKS}
    assert len(said) == 1, ends  # equal models, and all left out the same
    assert said.pop().startswith(f"60 steps, left out [{BREAKS}], "), ends


def test_a_rank_that_stands_still_is_left_out_and_comes_back(tmp_path):
    with started(tmp_path / "store", "zmq", signal.SIGSTOP) as processes:
        frozen = processes[BREAKS]
        deadline = time.monotonic() + 60
        while state(frozen) != "T":
            assert time.monotonic() < deadline, "rank 2 never came to its step"
            time.sleep(0.05)
        time.sleep(4.0)  # the others' deadline is 2
        frozen.send_signal(signal.SIGCONT)
        ends = [process.communicate(timeout=90) for process in processes]
    lines = [out.splitlines() for out, _ in ends]
    assert len({line[0].rsplit(", ", 1)[1] for line in lines}) == 1, ends  # equal models
    for rank, (said, done) in enumerate(lines):
        assert said.startswith("60 steps, "), ends
        if rank == BREAKS:
            assert int(done) < 60, ends  # it was given the others' step
        else:
            assert said.startswith(f"60 steps, left out [{BREAKS}], ") and done == "60", ends


@pytest.mark.slow
def test_nobody_hangs_in_10000_steps_with_random_delays():
    assert launch(many_steps, 8, 10_000, timeout=60.0) == (True, 10_000)
