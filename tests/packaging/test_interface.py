"""What users may rely on is listed; a change of it is seen, and is a choice."""

import json
import os
import subprocess
import sys
from pathlib import Path

import sparsync
from tests.packaging import interface

HEAVY = ("matplotlib", "mpi4py", "pandas", "rich", "scipy", "sklearn", "triton", "typer", "zmq")
LIMIT = 0.3  # CPU seconds, over torch's own import

MEASURE = """
import json, sys, time
import torch
middle = time.process_time()
import sparsync
seconds = time.process_time() - middle
print(json.dumps({"seconds": seconds, "modules": sorted(sys.modules)}))
"""


def test_the_interface_is_what_is_listed():
    """After a deliberate change: python -m tests.packaging.interface > tests/packaging/interface.txt."""
    assert interface.lines() == interface.FILE.read_text("utf-8").splitlines()


def test_the_import_is_light(tmp_path):
    """What only some users need is loaded when they need it.

    As from a wheel, whose modules pip compiles: the first run does that.  The best of three others, as
    machines are busy.
    """
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    runs = []
    for _ in range(4):
        run = [sys.executable, "-c", MEASURE]
        done = subprocess.run(run, capture_output=True, check=True, env=environment)
        runs.append(json.loads(done.stdout))
    roots = {name.partition(".")[0] for name in runs[0]["modules"]}
    assert not roots & set(HEAVY)
    assert min(run["seconds"] for run in runs[1:]) < LIMIT


def test_types_are_for_users_too():
    assert (Path(sparsync.__file__).parent / "py.typed").exists()
