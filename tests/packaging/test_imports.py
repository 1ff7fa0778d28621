"""Test that ``import sparsync`` is cheap and loads no engine, and default training no paper."""

import pytest

from tests.fresh import run_python

MOST = 60  # limit on this package's loaded modules, including the compiled kernels

ALONE = """
import sys
import sparsync

loaded = sorted(name for name in sys.modules if name.partition(".")[0] == "sparsync")
print(*loaded, sep="\\n")
"""
TRAINED = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import sparsync

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = DistributedDataParallel(torch.nn.Linear(300, 300))
optimizer = torch.optim.OPTIMIZER(model.parameters(), lr=0.01)
with sparsync.attach(model, optimizer) as sync:
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 300)).square().mean().backward()
        optimizer.step()
    assert sync.stats()["exchanges"] == 3
    sync.state_dict()
dist.destroy_process_group()
print(*sys.modules, sep="\\n")
"""


def modules(script):
    process = run_python(script)
    assert process.returncode == 0, process.stderr
    return process.stdout.split()


def inside(names, *packages):
    return [n for n in names if any(n == p or n.startswith(f"{p}.") for p in packages)]


def test_importing_the_package_brings_no_engine():
    loaded = modules(ALONE)
    assert "sparsync.attach" in loaded
    assert len(loaded) <= MOST, loaded
    engines = ("updates", "gradients.ddp", "elastic", "checkpoint", "published", "presets")
    assert not inside(loaded, *(f"sparsync.{engine}" for engine in engines))


@pytest.mark.parametrize(("optimizer", "engine"), [("SGD", "gradients.ddp"), ("AdamW", "updates")])
def test_training_with_a_default_loads_no_papers_room(optimizer, engine):
    loaded = modules(TRAINED.replace("OPTIMIZER", optimizer))
    assert inside(loaded, f"sparsync.{engine}"), "the default's engine has run"
    assert not inside(loaded, "sparsync.published")
    assert not inside(loaded, "sparsync.elastic", "sparsync.cli")


def test_modules_that_documents_name_are_there_after_the_import_alone():
    for name in ("presets.resolve", "updates.OuterStep", "checkpoint.save"):
        process = run_python(f"import sparsync; sparsync.{name}")
        assert process.returncode == 0, process.stderr
