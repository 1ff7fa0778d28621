"""Start commands in separate process groups, and check that they leave nothing behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]


def torchrun(ranks):
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]


def start(*command, before=(), **options):
    """Start Python with these arguments; by default, both of its outputs are one stream.

    ``before`` is a command that starts Python in turn, such as ``env``.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **options}
    return subprocess.Popen(
        [*before, sys.executable, *map(str, command)],
        cwd=ROOT,
        text=True,
        env={**environment, "HF_HUB_OFFLINE": "1"},
        start_new_session=True,
        **pipes,
    )


def end(process, seconds=60):
    """Wait for a command and all processes that it started; return its output."""
    try:
        written = process.communicate(timeout=seconds)
        deadline = time.monotonic() + 60
        while _is_alive(process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not _is_alive(process.pid), "processes were left running"
    finally:
        if _is_alive(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
    return written


def run(*command, seconds=300):
    """Run a command to its end; return its code and the output of both streams."""
    process = start(*command, stderr=subprocess.PIPE)
    out, err = end(process, seconds)
    return process.returncode, out, err


def run_well(*command, seconds=300):
    """Run a command that must succeed; return its output."""
    code, out, err = run(*command, seconds=seconds)
    assert code == 0, err
    return out


def _is_alive(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
