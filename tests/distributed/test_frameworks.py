"""Accelerate, Lightning and the Hugging Face Trainer on two ranks over gloo; and the examples."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sparsync.cli.launch import launch

from . import framework_programs as programs
from . import trainer_programs

pytestmark = pytest.mark.gloo

EXAMPLES = Path(__file__).parents[2] / "examples"


def check(result, **messages):
    """Check that all is true, but for messages, which say what they should."""
    for name, words in messages.items():
        said = result.pop(name)
        assert all(word in said for word in words), said
        assert "\n" not in said
    assert all(result.values()), result


TORN = ["ConfigurationError", "was saved with other weights", "from another checkpoint"]


def test_accelerate(tmp_path):
    result = launch(programs.with_accelerate, 2, str(tmp_path), timeout=60.0)
    check(
        result,
        unprepared=["ConfigurationError", "Sequential is none of", "accelerator.prepare"],
        torn=TORN,
    )


@pytest.mark.slow
def test_lightning(tmp_path):
    result = launch(programs.with_lightning, 2, str(tmp_path), timeout=60.0)
    check(
        result,
        torn=TORN,
        remote=["ConfigurationError", "memory://bucket", "dirpath"],
    )


@pytest.mark.slow
def test_lightning_with_two_optimizers(tmp_path):
    check(launch(programs.with_two_optimizers, 2, str(tmp_path), timeout=60.0))


@pytest.mark.slow
def test_transformers(tmp_path):
    check(launch(trainer_programs.with_transformers, 2, str(tmp_path), timeout=60.0), torn=TORN)


def start(name, folder, *more):
    """Run an example on two ranks; return its last line."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += [EXAMPLES / f"train_{name}.py", "--folder", folder, *more]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert process.returncode == 0, process.stderr
    assert "sparsync" not in process.stderr, process.stderr  # no warning of ours
    return process.stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["accelerate", "lightning", "transformers"])
def test_the_example_learns_and_resumes_in_new_processes(name, tmp_path):
    through, again = start(name, tmp_path), start(name, tmp_path, "--resume")
    before, after = re.search(r"loss ([\d.]+) -> ([\d.]+)", through).groups()
    assert float(after) < 0.9 * float(before)
    weights = [
        re.search(r"2 ranks, 40 steps.*weights (\w{16})$", line) for line in (through, again)
    ]
    assert weights[0][1] == weights[1][1]


@pytest.mark.parametrize("name", ["lightning", "transformers"])
def test_a_missing_framework_is_named(name):
    code = f"import sys; sys.modules['{name}'] = None; import sparsync.integrations.{name}"
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert f"ConfigurationError: sparsync.integrations.{name} needs {name}" in process.stderr
    assert f"pip install {name}" in process.stderr


@pytest.mark.parametrize("name", ["accelerate", "lightning", "transformers"])
def test_sparsync_imports_no_framework(name):
    code = f"import sys, sparsync; sys.exit('{name}' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
