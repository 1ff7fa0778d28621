"""``sparsync bench --transport torch``: the same rows from real processes over gloo."""

import dataclasses
import json
import subprocess
import sys

import pytest

from sparsync.bench.collectives import BenchSettings, bench
from sparsync.presets import PRESETS

pytestmark = pytest.mark.gloo

SETTINGS = BenchSettings(
    tuple(PRESETS), ranks=3, sizes=(6000,), densities=(0.05,), steps=3, warmup=1, transport="torch"
)


def test_processes_and_simulator_agree():
    measured = bench(SETTINGS)
    simulated = bench(dataclasses.replace(SETTINGS, transport="sim"))
    for real, virtual in zip(measured, simulated, strict=True):
        assert real.correct and real.transport == "torch"
        assert 0 < real.seconds_25 <= real.seconds_median <= real.seconds_75
        assert real.entries_min == virtual.entries_min
        # the native allreduce is booked by its formula, without padding
        for volume in ("bytes_sent_max", "bytes_received_max"):
            assert getattr(real, volume) == pytest.approx(getattr(virtual, volume), rel=0.02)


def test_the_command_under_a_launcher(tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    options = ["--transport", "torch", "--collectives", "oktopk", "--size", "5000", "--steps", "2"]
    done = subprocess.run(
        [sys.executable, *launcher, "sparsync", "bench", *options, "--json", f"{tmp_path}/b.json"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("oktopk") == 1  # only rank 0 prints
    (row,) = json.loads((tmp_path / "b.json").read_text())
    assert (row["ranks"], row["transport"], row["wrong"]) == (2, "torch", 0)
