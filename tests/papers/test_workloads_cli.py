"""``sparsync train --data``: real processes on a small data set, and what is said before they start."""

import json
import subprocess
import sys

import pytest

from sparsync.cli import app

from .data_files import write_cifar10


def run(*arguments):
    process = subprocess.run(
        [sys.executable, "-m", "sparsync", "train", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return process.returncode, process.stdout, process.stderr


@pytest.mark.gloo
@pytest.mark.slow
def test_a_papers_workload_trains_on_its_data(tmp_path):
    write_cifar10(tmp_path / "data")
    options = ("--workload", "resnet20-cifar10", "--data", tmp_path / "data", "--width", 4)
    size = ("--ranks", 2, "--steps", 2, "--batch-size", 2, "--algorithm", "budgeted")
    code, out, err = run(*options, *size, "--json", tmp_path / "run.json")
    assert code == 0, err
    assert "resnet20-cifar10" in out and "loss in nats per image" in out
    result = json.loads((tmp_path / "run.json").read_text())
    assert result["replicas_equal"] and result["steps"] == 2 and 0 <= result["accuracy"] <= 1
    assert result["weight_decay"] == 1e-4 and result["optimizer"] == "sgd"


def test_data_that_is_missing_is_told_before_anything_starts(tmp_path, monkeypatch, capsys):
    arguments = ["sparsync", "train", "--workload", "vgg16-cifar10", "--data", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as stopped:
        app.main()
    out, err = capsys.readouterr()
    assert (stopped.value.code, out) == (2, "") and err.count("\n") == 1
    assert err.startswith("error: the images of CIFAR-10: there is no ")
    assert err.endswith("unpack CIFAR-10's python or binary archive there\n")
