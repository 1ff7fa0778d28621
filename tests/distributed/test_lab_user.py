"""The lab of a user who is not root: inside a user namespace, or one clear line."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = [sys.executable, "-m", "tests.distributed.lab_programs", "unprivileged"]
# root with no capability but the one to map itself is as ordinary as any user; it may read this
# installation, which others perhaps may not
DROP = ["setpriv", "--bounding-set=-all,+setfcap", "--inh-caps=-all"] if os.geteuid() == 0 else []
FORBID = "echo 0 > /proc/sys/user/max_user_namespaces && exec"

pytestmark = [
    pytest.mark.gloo,
    pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are Linux's"),
    pytest.mark.skipif(not shutil.which("setpriv"), reason="needs setpriv of util-linux"),
    pytest.mark.skipif(not shutil.which("unshare"), reason="needs unshare of util-linux"),
]


def may_have_user_namespaces() -> bool:
    trial = [*DROP, "unshare", "-Urn", "true"]
    return subprocess.run(trial, capture_output=True, timeout=30).returncode == 0


def run(*command: str) -> tuple[subprocess.Popen, str, str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as process:
        out, err = process.communicate(timeout=120)
    return process, out, err


@pytest.mark.slow
@pytest.mark.skipif(not may_have_user_namespaces(), reason="the kernel allows no user namespaces")
def test_an_ordinary_user_gets_a_user_namespace():
    process, out, err = run(*DROP, *PROGRAM)
    assert process.returncode == 0, err
    pid, user, sent, first, second = out.split()
    assert int(pid) == process.pid  # the same process: executed again, not started
    assert int(user) != Path("/proc/self/ns/user").stat().st_ino
    assert int(sent) >= 400_000
    assert (first, second) == ("10.77.0.1", "10.77.0.2")


@pytest.mark.skipif(not may_have_user_namespaces(), reason="the kernel allows no user namespaces")
def test_where_the_kernel_allows_neither_there_is_one_line():
    script = f'{FORBID} setpriv --bounding-set=-all,+setfcap --inh-caps=-all "$@"'
    process, out, err = run("unshare", "-Ur", "sh", "-c", script, "sh", *PROGRAM)
    assert process.returncode == 1
    assert out == ""
    line = err.splitlines()[-1]
    assert "ConfigurationError: lab: this process may not make network namespaces (" in line
    assert "run as root" in line
