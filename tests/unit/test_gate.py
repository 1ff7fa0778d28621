"""Test that the gate compares ratios of medians with the noise between runs of one commit."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gate.py"
SPEC = importlib.util.spec_from_file_location("gate", SCRIPT)
gate = importlib.util.module_from_spec(SPEC)
sys.modules["gate"] = gate  # its dataclass looks itself up
SPEC.loader.exec_module(gate)

RELEASE = [
    {"steady": 1.00, "noisy": 1.0, "gone": 1.0},
    {"steady": 1.02, "noisy": 2.0, "gone": 1.0},
    {"steady": 1.04, "noisy": 1.5, "gone": 1.0},
]


def head(factor):
    rows = [{name: factor * seconds for name, seconds in run.items()} for run in RELEASE]
    return [{"steady": run["steady"], "noisy": run["noisy"], "new": 9.0} for run in rows]


def test_a_row_is_slower_above_its_noise_and_the_floor():
    steady, noisy = gate.judge(RELEASE, head(1.5), floor=1.15)
    assert (steady.name, steady.ratio, steady.noise, steady.slower) == ("steady", 1.5, 1.04, True)
    assert (noisy.name, noisy.ratio, noisy.noise, noisy.slower) == ("noisy", 1.5, 2.0, False)


def test_below_the_floor_nothing_is_slower():
    assert not any(row.slower for row in gate.judge(RELEASE, head(1.1), floor=1.15))
    assert gate.judge(RELEASE, head(1.1), floor=1.05)[0].slower


def test_the_slowest_row_comes_first_and_is_marked():
    lines = gate.table(gate.judge(RELEASE, head(3.0), floor=1.15)).splitlines()
    assert lines[2] == "| steady | 3.00 | 1.04 | **slower** |"
    assert lines[3] == "| noisy | 3.00 | 2.00 | **slower** |"


@pytest.mark.slow
def test_seconds_are_those_of_real_runs():
    exchanges = (
        "--transport torch --ranks 2 --size 1000 --steps 1 --warmup 1 --collectives budgeted"
    )
    seconds = gate.measure(sys.executable, "--kernels --size 10000", exchanges)
    assert "budgeted over torch" in seconds and "accumulate_" in seconds
    assert all(value > 0 for value in seconds.values())
