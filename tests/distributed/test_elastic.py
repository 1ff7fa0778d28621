"""When a rank dies, torchrun continues with the others from the last checkpoint."""

import os
import re
import signal
import time

import pytest
import torch
from torch.distributed import TCPStore

from .commands import ROOT, start

pytestmark = pytest.mark.gloo

SECONDS = 240.0  # a restart waits for heartbeats that have stopped, and four ranks share two cores


def agent(number, port, folder, log):
    """Start torchrun as on one of four machines; the test hosts the store, so any of them may die."""
    rendezvous = [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        "--rdzv-id=elastic",
        "--rdzv-conf=is_host=false,last_call_timeout=10,keep_alive_interval=2,keep_alive_max_attempt=5",
    ]
    command = [
        *("-m", "torch.distributed.run", "--nnodes=3:4", "--nproc-per-node=1", "--max-restarts=3"),
        *("--monitor-interval=0.1", "--local-addr=127.0.0.1", *rendezvous),
        *(ROOT / "examples" / "elastic.py", f"--folder={folder}"),
        *("--steps=50", "--save-every=10", "--crash=25", "--timeout=60"),
    ]
    with (log / f"agent-{number}.txt").open("w") as output:
        # each round gets a new store, because the host of a shared one may have died
        apart = ["env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"]
        return start(*command, before=apart, stdout=output)


def finish(agents):
    """Wait for all agents, and leave none of their processes behind."""
    deadline = time.monotonic() + SECONDS
    try:
        return [agent.wait(max(deadline - time.monotonic(), 0.1)) for agent in agents]
    finally:
        for each in agents:
            try:
                os.killpg(each.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_three_of_four_ranks_go_on_from_the_checkpoint(tmp_path):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    folder = tmp_path / "checkpoints"
    codes = finish([agent(number, store.port, folder, tmp_path) for number in range(4)])
    text = "".join(log.read_text() for log in sorted(tmp_path.glob("agent-*.txt")))
    assert sorted(codes) == [-signal.SIGKILL, 0, 0, 0], text
    assert "4 ranks begin" in text
    (waiting,) = re.findall(r"step 20: loss [\d.]+, (\S+) waits", text)
    (restarted,) = re.findall(r"3 ranks go on at step 20, (\S+) waits", text)
    assert float(waiting) == pytest.approx(float(restarted), rel=1e-5, abs=1e-6)
    assert float(waiting) != 0
    assert "3 ranks are done after 50 steps" in text
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", text)]
    assert losses[-1] < losses[0]
    names = {path.name for path in folder.rglob("sparsync-rank-*")}
    assert names == {f"sparsync-rank-{rank}-of-3.pt" for rank in range(3)}
    state = torch.load(next(folder.rglob("*-of-3.pt")), weights_only=True)
    assert state["content"]["reducer"]["world_size"] == 3
