"""Ranks on networks of their own: with IPv6 alone, and on hosts whose own name is 127.0.1.1."""

import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sparsync.cli.lab import Lab, _run_command

from .test_lab import IN_THE_LAB

pytestmark = [pytest.mark.gloo, IN_THE_LAB]

ROOT = Path(__file__).parents[2]
PORT = 29_500
SCRIPT = """
import hashlib, json, os, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import sparsync
from sparsync.errors import SparsyncError
from sparsync.transports.interfaces import own_interfaces
from sparsync.transports.launchers import init_process_group

def train(transport, exchange):
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(1_000, 10))
    kind = {"gradients": torch.optim.SGD, "updates": torch.optim.AdamW}[exchange]
    optimizer = kind(model.parameters(), lr=1e-3)
    sync = sparsync.attach(model, optimizer, transport=sparsync.Transport(transport))
    torch.manual_seed(dist.get_rank())
    for _ in range(4):
        inputs = torch.randn(8, 1_000)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), inputs[:, :10]).backward()
        optimizer.step()
    assert sync.stats()["exchange"] == exchange
    sync.finish()
    return hashlib.sha256(model.module.weight.detach().numpy().tobytes()).hexdigest()

started = time.monotonic()
addresses = [text for one in own_interfaces() for text in one.addresses]
try:
    init_process_group("gloo", timeout=100.0)
    kinds = [(a, b) for a in ("torch", "zmq") for b in ("gradients", "updates")]
    told = {"weights": [train(*kind) for kind in kinds]}
    dist.barrier()
    dist.destroy_process_group()
except SparsyncError as error:
    told = {"error": str(error)}
print(json.dumps({**told, "addresses": addresses, "seconds": time.monotonic() - started}))
"""


def train(lab, rank_0, variables, before=((), ())):
    """Train on two ranks without the lab's own variables; return what each has printed."""
    processes = []
    try:
        for rank in range(2):
            environ = {k: v for k, v in os.environ.items() if not k.startswith("GLOO_")}
            environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", **variables[rank]}
            environ |= {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": rank_0, "MASTER_PORT": str(PORT)}
            environ |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
            command = [*before[rank], sys.executable, "-c", SCRIPT]
            options = {"cwd": ROOT, "env": environ, "text": True, "start_new_session": True}
            options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            begin = functools.partial(subprocess.Popen, command, **options)
            processes.append(lab.seat(rank).run(begin))
        found = [process.communicate(timeout=200) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert [process.returncode for process in processes] == [0, 0], found
    return [json.loads(out.splitlines()[-1]) for out, _ in found]


def without_ipv4(lab, *commands):
    """Give the ranks IPv6 addresses alone; then run these commands, one list per rank."""
    for rank in range(2):
        flush = [f"ip -4 address flush dev {name}" for name in ("eth0", "lo")]
        address = f"ip -6 address add fd77::{rank + 1}/64 dev eth0 nodad"
        more = commands[rank] if commands else []

        def set_up(todo=(*flush, address, *more)):
            for command in todo:
                _run_command(command)

        lab.seat(rank).run(set_up)


def equal_replicas(told):
    return len(told[0]["weights"]) == 4 and told[0]["weights"] == told[1]["weights"]


@pytest.mark.slow
def test_ranks_train_over_ipv6_alone():
    with Lab(2, "1gbit") as lab:
        without_ipv4(lab)
        told = train(lab, "fd77::1", [{"GLOO_SOCKET_IFNAME": "eth0"}] * 2)
    assert [one["addresses"] for one in told] == [["::1", "fd77::1"], ["::1", "fd77::2"]]
    assert equal_replicas(told), told


DOCKER = [
    "ip link add docker0 type veth peer name docker1",
    "ip address add 172.17.0.1/16 dev docker0",
    "ip link set docker0 up",
]
BARE = ["ip link add bare0 type veth peer name bare1", "ip link set bare0 addrgenmode none up"]


@pytest.mark.parametrize(
    ("names", "commands", "first", "cards"),
    [
        pytest.param(
            ["eth0", "docker0"],
            [[], DOCKER],
            "rank 0 would listen at fd77::1 (IPv6), rank 1 at 172.17.0.1 (IPv4), and gloo connects",
            [
                "lo (::1), eth0 (fd77::2), docker0 (172.17.0.1), or for rank 0 to one of lo (::1), eth0"
            ]
            * 2,
            id="no IPv6",
        ),
        pytest.param(
            ["docker0", "docker0"],
            [DOCKER, DOCKER],
            "ranks 0 and 1 would both listen at 172.17.0.1, each on a network of its own",
            ["lo (::1), eth0 (fd77::2), docker0 (172.17.0.1)"] * 2,
            marks=pytest.mark.slow,
            id="one address twice",
        ),
        pytest.param(
            ["bare0", "bare0"],
            [BARE, BARE],
            "GLOO_SOCKET_IFNAME is 'bare0', and bare0 has no address; give one of",
            [f"lo (::1), eth0 (fd77::{rank}), bare0 (no address)" for rank in (1, 2)],
            marks=pytest.mark.slow,
            id="no address",
        ),
        pytest.param(
            ["eth0", "10.77.0.2"],
            [[], []],
            "",
            ["lo (::1), eth0 (fd77::2)"] * 2,
            marks=pytest.mark.slow,
            id="IPv4 address",
        ),
    ],
)
def test_an_interface_without_the_others_family_is_one_line(names, commands, first, cards):
    with Lab(2, "1gbit") as lab:
        without_ipv4(lab, *commands)
        told = train(lab, "fd77::1", [{"GLOO_SOCKET_IFNAME": name} for name in names])
    for one, present in zip(told, cards, strict=True):
        said = one["error"]
        assert said.startswith(first) and present in said and "\n" not in said, said
        assert "GLOO_SOCKET_IFNAME" in said
    if not first:
        wrong = "GLOO_SOCKET_IFNAME is '10.77.0.2', and '10.77.0.2' is not an interface of "
        assert told[1]["error"].startswith(wrong)
        assert f"rank 1 cannot take part: {wrong}" in told[0]["error"]
    # of the rank that came last, which waits for no other
    assert min(one["seconds"] for one in told) < 5


def as_debian(folder, rank):
    """Return the start of a command that has its own host name and Debian's hosts file."""
    hosts = folder / f"hosts{rank}"
    others = "".join(f"10.77.0.{r + 1} node{r}\n" for r in range(2) if r != rank)
    hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 node{rank}\n{others}")
    set_up = f'hostname node{rank} && mount --bind {hosts} /etc/hosts && exec "$0" "$@"'
    return ["unshare", "--mount", "--uts", "sh", "-c", set_up]


@pytest.mark.slow
def test_hosts_train_whose_own_name_is_loopback(tmp_path):
    before = [as_debian(tmp_path, rank) for rank in range(2)]
    with Lab(2, "1gbit") as lab:
        quiet = sum(link.sent for link in lab.traffic())
        told = train(lab, "node0", [{}, {}], before)
        crossed = sum(link.sent for link in lab.traffic()) - quiet
    assert equal_replicas(told), told
    # twice the updates alone: a byte per weight and step
    assert crossed > 2 * 4 * 10_000


@pytest.mark.slow
def test_a_rank_on_loopback_is_refused_by_hosts_that_cannot_reach_it(tmp_path):
    before = [as_debian(tmp_path, rank) for rank in range(2)]
    with Lab(2, "1gbit") as lab:
        told = train(lab, "node0", [{}, {"GLOO_SOCKET_IFNAME": "lo"}], before)
    for one in told:
        said = one["error"]
        assert "rank 1 would listen at lo of node1, where ranks of other machines cannot" in said
        assert (
            "set GLOO_SOCKET_IFNAME there to one of lo (127.0.0.1, ::1), eth0 (10.77.0.2)" in said
        )
    assert min(one["seconds"] for one in told) < 5
