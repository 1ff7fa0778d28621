"""What users may rely on is listed; a change of it is seen, and is a choice."""

import json
import subprocess
import sys
from pathlib import Path

import sparsync
from tests.packaging import interface

HEAVY = ("matplotlib", "mpi4py", "pandas", "rich", "scipy", "sklearn", "triton", "typer", "zmq")
LIMIT = 0.3  # of torch's own import, in CPU time: machines are busy, and not equally fast

MEASURE = """
import json, sys, time
start = time.process_time()
import torch
middle = time.process_time()
import sparsync
share = (time.process_time() - middle) / (middle - start)
print(json.dumps({"share": share, "modules": sorted(sys.modules)}))
"""


def test_the_interface_is_what_is_listed():
    """After a deliberate change: python -m tests.packaging.interface > tests/packaging/interface.txt."""
    assert interface.lines() == interface.FILE.read_text("utf-8").splitlines()


def test_the_import_is_light():
    """What only some users need is loaded when they need it; the best of three, as machines are busy."""
    runs = []
    for _ in range(3):
        run = [sys.executable, "-c", MEASURE]
        runs.append(json.loads(subprocess.run(run, capture_output=True, check=True).stdout))
    roots = {name.partition(".")[0] for name in runs[0]["modules"]}
    assert not roots & set(HEAVY)
    assert min(run["share"] for run in runs) < LIMIT


def test_types_are_for_users_too():
    assert (Path(sparsync.__file__).parent / "py.typed").exists()
