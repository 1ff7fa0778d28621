"""``sparsync train`` as a user starts it: real processes, exit codes, files.  Few runs: they are slow."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from sparsync.bench.train import train
from sparsync.bench.train_rank import dense_bytes_per_step
from sparsync.bench.train_settings import TrainSettings
from sparsync.cli import exit_code

pytestmark = pytest.mark.gloo


def run(*command):
    """Run a command in a process group of its own; nothing of it may be left when it returns."""
    process = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=60)
        assert_ended(process.pid)
    finally:
        if group_is_alive(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out, err


def group_is_alive(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def assert_ended(group, seconds=5.0):
    deadline = time.monotonic() + seconds
    while group_is_alive(group) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not group_is_alive(group), "processes were left running"


def test_two_algorithms_are_compared(tmp_path):
    pytest.importorskip("matplotlib")
    options = ["--algorithm", "dense,oktopk", "--ranks", "2", "--steps", "3"]
    files = ["--json", f"{tmp_path}/new/t.json", "--plot", f"{tmp_path}/new/loss.png"]
    code, out, err = run("-m", "sparsync", "train", *options, *files)
    assert code == 0, err
    assert "dense" in out and "oktopk" in out and "bit-identical" in out

    dense, sparse = json.loads((tmp_path / "new" / "t.json").read_text())
    assert [dense["algorithm"], sparse["algorithm"]] == ["dense", "oktopk"]
    assert dense["loss"][0] == sparse["loss"][0]  # same weights, same data
    assert dense["loss"][2] != sparse["loss"][2]
    assert dense["bytes_sent_per_step_max"] == dense_bytes_per_step(dense["parameters"], 2)
    assert 0 < sparse["bytes_sent_per_step_max"] < dense["bytes_sent_per_step_max"] / 10
    for result in (dense, sparse):
        assert result["replicas_equal"] is True
        assert (result["ranks"], result["steps"], len(result["loss"])) == (2, 3, 3)
        assert result["eval_loss"] < result["loss"][0]
        assert result["seconds_total"] >= result["seconds_per_step_median"] > 0
    assert (tmp_path / "new" / "loss.png").stat().st_size > 10_000


def test_the_same_command_under_a_launcher(tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    options = ["--algorithm", "oktopk", "--steps", "2", "--json", f"{tmp_path}/t.json"]
    code, out, err = run(*launcher, "sparsync", "train", *options)
    assert code == 0, err
    assert out.count("bit-identical") == 1  # only rank 0 prints
    result = json.loads((tmp_path / "t.json").read_text())
    assert (result["ranks"], result["algorithm"]) == (2, "oktopk")


def die(rank, step):
    if (rank, step) == (1, 1):
        os._exit(7)


def interrupt(rank, step):
    if (rank, step) == (0, 1):
        os.killpg(os.getpgrp(), signal.SIGINT)  # what a terminal does on Ctrl-C


@pytest.mark.parametrize("algorithm", ["dense", "oktopk"])
def test_a_rank_that_dies_ends_all_with_a_named_error(algorithm):
    code, _, err = run("-m", __name__, "die", algorithm)
    assert code == 1
    assert "rank 1: died with exit code 7" in err
    for survivor in (0, 2):
        assert f"rank {survivor}: PeerError: rank {survivor}, step 1: " in err
    assert "Traceback" not in err


def test_an_interrupt_ends_all():
    code, _, err = run("-m", __name__, "interrupt", "oktopk")
    assert code == 130
    assert "Traceback" not in err


if __name__ == "__main__":
    happening = {"die": die, "interrupt": interrupt}[sys.argv[1]]
    settings = TrainSettings(ranks=3, steps=3, timeout=30.0)
    sys.exit(exit_code(lambda: train(settings, [sys.argv[2]], happening)))
