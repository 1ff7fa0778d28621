"""Train for three minutes with a kill per minute; little is lost besides the time of absent ranks."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("torchft")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_kill_a_minute_costs_little(tmp_path):
    """Other load slows both runs down alike, because they train at once and their ranks mostly wait."""
    options = "--workload bytes --width 32 --batch-size 2 --optimizer sgd --ranks 8 --steps 300"
    options += " --delay random:8:0.5 --kill random:60"
    command = [sys.executable, "-m", "sparsync", "train", "--elastic", *options.split()]
    out = tmp_path / "elastic.json"
    subprocess.run([*command, "--json", str(out)], check=True, stdout=subprocess.DEVNULL)
    found = json.loads(out.read_text())
    assert found["recovered"] == found["kills"] >= 2
    assert found["replicas_equal"] and found["steps"] == 300
    assert found["throughput_of_fault_free"] > 0.94
    assert found["throughput_of_present"] > 0.96
    assert found["eval_loss"] == pytest.approx(found["eval_loss_fault_free"], rel=0.05)
