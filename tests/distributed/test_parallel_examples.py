"""The examples of divided models run as they are, under torchrun."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gloo

ROOT = Path(__file__).parents[2]
EXAMPLES = [
    ("train_fsdp.py", [], "2 replicas x 2 shards"),
    ("train_fsdp.py", ["--ddp"], "2 replicas x 2 shards"),
    ("train_pipeline.py", ["--schedule", "1f1b"], "2 replicas x 2 stages"),
    ("train_tensor_parallel.py", [], "2 replicas x 2 tensor-parallel ranks"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options", "shape"), EXAMPLES)
def test_the_example_learns(name, options, shape):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    program = [ROOT / "examples" / name, "--steps", "25", "--timeout", "60", *options]
    process = subprocess.run(
        [*torchrun, *program], capture_output=True, text=True, timeout=120, check=False
    )
    assert process.returncode == 0, process.stderr[-3000:]
    said = process.stdout.splitlines()[-1]
    before, after = map(float, re.search(r"loss ([\d.]+) -> ([\d.]+)", said).groups())
    assert said.startswith(f"{shape}, 25 steps") and after < 0.8 * before, said
    assert said.endswith("replicas equal: True"), said
