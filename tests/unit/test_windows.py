"""Test that the library works without POSIX features, and that local ranks fail with a hint at WSL2."""

import pytest

from tests.fresh import run_python

# import other modules first, so that only this library's code misses the removed features
TAKEN_AWAY = """
import contextlib, multiprocessing.connection, multiprocessing.context, os, signal, socket
import subprocess, sys
import torch._dynamo, torch.distributed.checkpoint, torch.distributed.fsdp
import torch.distributed.pipelining, torch.optim, typer, rich.console, rich.progress, zmq

with contextlib.suppress(ImportError):
    import scipy.sparse, sklearn.base, sklearn.utils.validation

for name in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[name] = None
for module, names in {
    os: "O_DIRECTORY O_NONBLOCK fork geteuid getuid register_at_fork sched_setscheduler",
    signal: "SIGKILL SIGSTOP SIGPIPE SIGHUP",
    socket: "AF_UNIX",
}.items():
    for name in names.split():
        delattr(module, name)
multiprocessing.get_all_start_methods = lambda: ["spawn"]
sys.platform = "win32"
"""
USED = """
import importlib, pathlib
import torch
import sparsync

OTHERS = {"accelerate", "lightning", "mpi4py", "torchft", "transformers", "triton"}
sys.modules.update(dict.fromkeys(OTHERS))  # other packages' systems are their own affair
source = pathlib.Path(sparsync.__path__[0])
skipped = 0
for path in source.rglob("*.py"):
    parts = path.relative_to(source.parent).with_suffix("").parts
    try:
        if parts[-1] not in ("__init__", "__main__"):
            importlib.import_module(".".join(parts))
    except (ImportError, sparsync.ConfigurationError) as error:
        skipped += 1
        assert any(name in str(error) for name in OTHERS), error
assert skipped < 20
reduced = sparsync.allreduce(torch.arange(1000.0), sparsync.connect(), k=3)
assert reduced.total.indices.tolist() == [997, 998, 999]

"""
COMMAND = """
from sparsync.cli.app import main

sys.argv = ["sparsync", *WORDS]
main()
"""


@pytest.mark.slow
def test_the_library_imports_and_reduces_without_posix():
    process = run_python(TAKEN_AWAY + USED)
    assert process.returncode == 0, process.stderr


def command(*words):
    return run_python(f"{TAKEN_AWAY}\nWORDS = {words!r}\n{COMMAND}")


@pytest.mark.slow
def test_commands_that_simulate_work_without_posix():
    process = command("bench", "--ranks", "4", "--size", "10000", "--collectives", "budgeted")
    assert process.returncode == 0, process.stderr
    assert "budgeted" in process.stdout


def test_local_ranks_are_refused_with_one_line_that_names_wsl2():
    process = command("train", "--ranks", "2", "--steps", "1")
    assert process.returncode == 2
    said = "error: win32 cannot fork local ranks; run in WSL2, which is Linux"
    assert process.stderr.splitlines() == [said]
