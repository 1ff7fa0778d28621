"""If a Ray Train worker dies, all continue from the checkpoint and reach the same result."""

import os
import re
import secrets
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE

import pytest

from .commands import ROOT, end, start

pytestmark = [pytest.mark.gloo, pytest.mark.alone]

EXAMPLE = ROOT / "examples" / "ray_train.py"


def members(session):
    """List the processes of a whole session, because Ray gives each worker its own process group."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(ProcessLookupError):
            if os.getsid(int(process.name)) == session:
                found.append(int(process.name))
    return found


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run the example with a separate Ray instance, and check that none of its processes remains."""
    pytest.importorskip("ray")
    started = []
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))  # otherwise in the home directory
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "200")  # four import torch

    def run_example(name, *options):
        started.append(start(EXAMPLE, "--folder", tmp_path / name, *options, stderr=PIPE))
        out, err = end(started[-1], 280)
        assert started[-1].returncode == 0, err[-3000:]
        deadline = time.monotonic() + 60  # workers end once they miss their raylet
        while members(started[-1].pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert members(started[-1].pid) == [], "processes were left running"
        return out

    # with sockets, whose paths have at most 107 characters
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        yield run_example
        for process in started:
            for left in members(process.pid):
                with suppress(ProcessLookupError):
                    os.kill(left, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_worker_changes_no_bit(run, tmp_path):
    killed, through = run("killed", "--kill", 25), run("through")
    ends = r"loss [\d.]+, digest (\w{16}), restarts: (.*)$"
    found = [re.search(ends, out.rstrip()).groups() for out in (killed, through)]
    digest, _ = found[0]
    assert found == [(digest, "1, at steps [20]"), (digest, "0, at steps []")]
    losses = re.findall(r"step (\d+): loss ([\d.]+)", killed)
    assert losses == re.findall(r"step (\d+): loss ([\d.]+)", through)
    assert [step for step, _ in losses] == ["10", "20", "30", "40", "50", "60"]
    assert float(losses[-1][1]) < 0.3 * float(losses[0][1])
    saved = sorted(path.name for path in (tmp_path / "killed").rglob("*.pt"))
    assert saved == sorted(6 * [f"sparsync-rank-{rank}-of-4.pt" for rank in range(4)])
