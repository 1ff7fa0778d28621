"""Start ``sparsync lab`` as users do, on two real links: a script alone, and dense against attached."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from . import lab_programs as programs
from .commands import end, run, start
from .test_lab import IN_THE_LAB

pytestmark = [pytest.mark.gloo, IN_THE_LAB]

ELEMENTS, STEPS = 300_000, 6
SCRIPT = f"""
import os, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import sparsync

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear({ELEMENTS}, 1, bias=False))
optimizer = torch.optim.AdamW(model.parameters())
sync = sparsync.attach(model, optimizer)
for step in range({STEPS}):
    optimizer.zero_grad()
    model(torch.randn(1, {ELEMENTS})).sum().backward()
    optimizer.step()
with sync.shared():
    print("steps", sync.steps, sync.stats()["exchange"], flush=True)
sync.finish()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_a_script_is_compared_with_plain_ddp(script, tmp_path):
    options = ["--ranks", "2", "--compare", "--json", tmp_path / "lab.json"]
    code, out, err = run("-m", "sparsync", "lab", "500mbit", *options, "--", "python", script)
    assert code == 0, err
    lines = out.splitlines()
    for rank in range(2):
        assert [line for line in lines if line.startswith(f"[{rank}] steps")] == [
            f"[{rank}] steps {STEPS} none",
            f"[{rank}] steps {STEPS} updates",
        ]
    said = [line for line in err.splitlines() if "SPARSYNC_DISABLE=1: attaches nothing" in line]
    assert len(said) == 1 and said[0].startswith("[0] sparsync: ")
    dense, attached = json.loads((tmp_path / "lab.json").read_text())
    assert [dense["run"], attached["run"]] == ["dense", "attached"]
    assert dense["exit_codes"] == attached["exit_codes"] == [0, 0]
    # each of two ranks sends half of its elements twice; DDP first sends rank 0's weights
    payload = 4 * ELEMENTS * STEPS
    for sent, received in zip(dense["bytes_sent"], dense["bytes_received"], strict=True):
        assert payload <= sent < 1.3 * payload and payload <= received < 1.3 * payload
    # every step sends few bits per element, and the end sends the rest once
    assert 4 * ELEMENTS < max(attached["bytes_sent"]) < payload / 2
    assert dense["seconds"] > 8 * payload / 500e6 and dense["seconds_start"] > 0
    assert dense["sampled_bytes_sent"][-1] == max(dense["bytes_sent"])
    assert "attached" in out and "2 ranks on links of 500mbit" in out


RESTARTED = """
import os, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import sparsync

dist.init_process_group("gloo")
again = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
model = DistributedDataParallel(torch.nn.Linear(1_000, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sync = sparsync.attach(model, optimizer)
for step in range(4):
    optimizer.zero_grad()
    model(torch.randn(1, 1_000)).sum().backward()
    optimizer.step()
    if step == 2 and dist.get_rank() == 1 and not again:
        sys.exit(3)
sync.finish()
words = [f"rank {dist.get_rank()} of {dist.get_world_size()}, worker {os.environ['LOCAL_RANK']}"]
words += ["again" if again else "first", str(sync.steps)]
# a node's workers share a pipe, and unbuffered, print() would write every word on its own
os.write(1, (" ".join(words) + os.linesep).encode())
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_torchrun_has_workers_behind_each_link_and_starts_them_again(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(RESTARTED)
    inside = ["python", "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=3"]
    options = ["--ranks", "2", "--json", tmp_path / "lab.json"]
    code, out, err = run("-m", "sparsync", "lab", "500mbit", *options, "--", *inside, path)
    assert code == 0, err
    ended = sorted(line for line in out.splitlines() if " of 4, worker " in line)
    ranks = [(line[1], line.split()[2]) for line in ended]  # the node and the rank
    assert sorted(rank for _, rank in ranks) == ["0", "1", "2", "3"], out
    assert [line.partition("worker ")[2] for line in ended] == ["0 again 4", "1 again 4"] * 2, out
    assert [node for node, _ in ranks] == ["0", "0", "1", "1"]
    assert "node_rank is only used for static" not in err
    assert json.loads((tmp_path / "lab.json").read_text())["exit_codes"] == [0, 0]


LOST = """
import itertools, os, pathlib, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import sparsync

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(1_000, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sync = sparsync.attach(model, optimizer)
node, ranks = int(os.environ["PET_LOCAL_ADDR"].rpartition(".")[2]) - 1, dist.get_world_size()
folder = pathlib.Path(sys.argv[1])
for step in itertools.count():
    if step == 3:  # a loss in its first steps would end DDP's own set-up, before there is an exchange
        (folder / f"{node} of {ranks}").write_text(f"{os.getppid()} {os.getpid()} ")
    # where the second node came late, the first has begun alone, and waits for it here
    if ranks == 1 and step > 3 and (folder / "lost").exists():
        break
    optimizer.zero_grad()
    model(torch.randn(1, 1_000)).sum().backward()
    optimizer.step()
    time.sleep(0.05)
sync.finish()
print(f"rank {dist.get_rank()} of {ranks} has trained", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("lost", "options", "nodes", "expected", "said"),
    [
        # rank 0's torchrun starts its worker again, and waits in vain for a second node
        (
            1,
            ["--grace", "15"],
            "2",
            137,
            ["PeerError: rank 0, step ", "ranks 0 did not end within 15 s"],
        ),
        # the others' torchruns meet at rank 0, so none goes on without it
        (0, ["--elastic"], "1:2", 137, ["RendezvousConnectionError"]),
        (1, ["--elastic"], "1:2", 0, []),
    ],
)
def test_a_torchrun_that_is_killed_is_a_lost_node(tmp_path, lost, options, nodes, expected, said):
    if "--elastic" in options:
        pytest.importorskip("torchft")
    path = tmp_path / "train.py"
    path.write_text(LOST)
    inside = ["python", "-m", "torch.distributed.run", f"--nnodes={nodes}", "--max-restarts=3"]
    command = ["lab", "500mbit", "--ranks", "2", *options, "--", *inside, path, tmp_path]
    process = start("-m", "sparsync", *command, stderr=subprocess.PIPE)
    try:
        files = [tmp_path / f"{rank} of 2" for rank in range(2)]
        deadline = time.monotonic() + 300
        while not all(file.exists() and file.read_text().endswith(" ") for file in files):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        pids = [[int(pid) for pid in file.read_text().split()] for file in files]
        namespaces = [programs.namespace_of(str(worker)) for _, worker in pids]
        (tmp_path / "lost").touch()
        os.kill(pids[lost][0], signal.SIGKILL)
        out, err = end(process, 500)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == expected, err
    assert f"sparsync: rank {lost} was ended by SIGKILL; 1 of 2 ranks go on" in err
    assert all(words in err for words in said), err
    assert ("[0] rank 0 of 1 has trained" in out) == (expected == 0) and " of 2 has" not in out
    assert not any(programs.runs(str(pid)) for pair in pids for pid in pair)
    assert [programs.holders(namespace) for namespace in namespaces] == [[], []]


FAILS = """
if [ "$RANK" = 1 ]; then echo "$MASTER_ADDR $GLOO_SOCKET_IFNAME $WORLD_SIZE"; exit 7; fi
sleep 600 & echo waiting; wait
"""


def test_the_first_failure_ends_the_others_and_is_the_exit_code():
    started = time.monotonic()
    options = ["--ranks", "2", "--grace", "0.5", "--", "sh", "-c", FAILS]
    code, out, err = run("-m", "sparsync", "lab", "1gbit", *options)
    assert code == 7 and time.monotonic() - started < 60
    assert "[1] 10.77.0.1 eth0 2\n" in out and "[0] waiting\n" in out
    assert (
        "sparsync: rank 1 ended with exit code 7; 1 of 2 ranks go on and have 0.5 s to end\n" in err
    )
    assert "sparsync: ranks 0 did not end within 0.5 s; ended\n" in err
    assert "nothing was sent by rank 0, 1" in " ".join(out.split())


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGKILL, marks=pytest.mark.slow), signal.SIGINT]
)
def test_no_process_of_a_script_is_left(number, tmp_path):
    # in sessions of their own, as torchrun's workers
    body = f"setsid sh -c 'echo $$ > {tmp_path}/$RANK; exec sleep 600' & exec sleep 600"
    options = ["--ranks", "2", "--grace", "5", "--", "sh", "-c", body]
    process = start("-m", "sparsync", "lab", "1gbit", *options)
    try:
        files = [tmp_path / "0", tmp_path / "1"]
        deadline = time.monotonic() + 60
        while not all(file.exists() and file.read_text().strip() for file in files):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        end(process)
        assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)
        left = [int(file.read_text()) for file in files]
        deadline = time.monotonic() + 20
        while any(Path(f"/proc/{pid}").exists() for pid in left):
            assert time.monotonic() < deadline, "processes are left"
            time.sleep(0.05)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
