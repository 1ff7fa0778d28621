"""Averaging between real processes, one of which is killed."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gloo


@pytest.mark.parametrize("transport", ["torch", "zmq"])
def test_the_others_train_on_when_a_rank_is_killed(tmp_path, transport):
    ranks, dies = 4, 2
    program = [sys.executable, "-m", "tests.distributed.averaging_programs"]
    common = [str(ranks), str(tmp_path / "store"), transport, str(dies)]
    processes = [
        subprocess.Popen(
            [*program, str(rank), *common],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "MASTER_ADDR": "127.0.0.1"},
        )
        for rank in range(ranks)
    ]
    try:
        ends = [process.communicate(timeout=90) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert processes[dies].returncode == -9
    said = {ends[rank][0] for rank in range(ranks) if rank != dies}
    assert len(said) == 1, ends  # equal models, and all left out the same
    assert said.pop().startswith(f"30 [{dies}] "), ends
