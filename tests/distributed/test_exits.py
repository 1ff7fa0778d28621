"""Processes end well without closing a handle, and a freed model leaves nothing behind."""

import gc
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import sparsync
from sparsync.updates import OuterStep
from tests.on_ranks import on_ranks, same_everywhere

from .small_model import backward, ddp_model, flat, model

# rank 1's engine pauses for longer than rank 0 lives, so rank 0 ends with an exchange in flight
PROGRAM = """
import sys, time
import torch
import torch.distributed as dist
import sparsync
from sparsync.updates import OuterStep

transport, destroys, end = sys.argv[1:]
dist.init_process_group("gloo")
torch.manual_seed(0)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(300, 300))
optimizer = torch.optim.AdamW(net.parameters())
outer = OuterStep(algorithm="dense", density=1.0, period=2, delay=1)
carried = sparsync.Transport(transport, timeout=60)
sync = sparsync.attach(net, optimizer, outer, transport=carried)
for step in range(4):
    if step == 3 and dist.get_rank() == 1:
        sync._engine.submit(lambda: time.sleep(1.5))
    optimizer.zero_grad()
    net(torch.randn(4, 300)).pow(2).mean().backward()
    optimizer.step()
if destroys == "destroys":
    dist.destroy_process_group()
sys.stdout.write(f"{time.time()}")
sys.stdout.flush()
if end == "exit":
    sys.exit(3)
if end == "raise":
    raise RuntimeError("the end")
"""


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("transport", "destroys", "end", "code"),
    [
        ("zmq", "leaves", "raise", 1),
        ("zmq", "destroys", "end", 0),
        ("torch", "leaves", "exit", 3),
        ("torch", "destroys", "raise", 1),
    ],
)
def test_a_process_ends_as_it_should_while_an_exchange_is_under_way(transport, destroys, end, code):
    """``benchmarks/exits.py`` tries many more ways to end, and measures how long they take."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    command = [sys.executable, "-c", PROGRAM, transport, destroys, end]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [
        subprocess.Popen(command, env=shared | {"RANK": str(rank), "OMP_NUM_THREADS": "1"}, **pipes)
        for rank in range(2)
    ]
    try:
        for rank, process in enumerate(ranks):
            said, words = process.communicate(timeout=120)
            assert process.returncode == code, words
            lines = words.replace(f"[rank{rank}]: ", "").strip().splitlines()
            lines = [line for line in lines if not line.startswith("sparsync: exchanges ")]
            assert said and lines[:1] == ["Traceback (most recent call last):"] * (end == "raise")
            assert lines[-1:] == ["RuntimeError: the end"] * (end == "raise")
    finally:
        for process in ranks:
            process.kill()


# ---- models that go ----------------------------------------------------------------------------------


def counts():
    """Return this process's numbers of threads and descriptors, once those that are ending are gone."""
    gc.collect()
    time.sleep(0.2)
    return len(list(Path("/proc/self/task").iterdir())), len(list(Path("/proc/self/fd").iterdir()))


def trained(net, optimizer, **options):
    """Attach without keeping the handle, and take two steps."""
    sparsync.attach(net, optimizer, transport=sparsync.Transport(timeout=60), **options)
    for step in range(2):
        optimizer.zero_grad()
        backward(net, step)
        optimizer.step()
    return net


def dense(**options):
    return OuterStep(algorithm="dense", density=1.0, period=1, **options)


KINDS = {
    "updates of DDP": lambda: trained(net := ddp_model(), torch.optim.AdamW(net.parameters())),
    "updates of a plain module": lambda: trained(
        net := model(), torch.optim.AdamW(net.parameters()), algorithm=dense()
    ),
    "an exchange under way": lambda: trained(
        net := model(),
        torch.optim.AdamW(net.parameters()),
        algorithm=OuterStep(algorithm="dense", density=1.0, period=2, delay=1),
    ),
    "gradients of DDP": lambda: trained(net := ddp_model(), torch.optim.SGD(net.parameters(), 0.1)),
    "gradients of a plain module": lambda: trained(
        net := model(), torch.optim.SGD(net.parameters(), 0.1), replicate=dist.group.WORLD
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_handle_that_nobody_keeps_goes_with_its_model(kind):
    net = KINDS[kind]()
    assert any(thread.name.startswith("sparsync-") for thread in threading.enumerate()), kind
    del net
    before = counts()
    assert not any(thread.name.startswith("sparsync-") for thread in threading.enumerate()), kind
    for _ in range(2):
        KINDS[kind]()
    dist.barrier()
    threads, descriptors = counts()
    assert threads <= before[0] and descriptors <= before[1], (before, threads, descriptors)


@on_ranks(2)
@pytest.mark.parametrize("wrapped", [True, False])
def test_a_handle_that_nobody_keeps_exchanges(wrapped):
    net = ddp_model() if wrapped else model()
    trained(net, torch.optim.AdamW(net.parameters()), algorithm=dense())
    assert same_everywhere(flat(net))
