"""Processes end well without closing a handle, and a freed model leaves nothing behind."""

import contextlib
import copy
import gc
import io
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import sparsync
from sparsync.updates import OuterStep
from tests.on_ranks import on_ranks, refused, same_everywhere

from .small_model import backward, ddp_model, flat, model

# Both ranks of all jobs are forked from one process, because importing torch takes each of them
# seconds, as would a collection of garbage among all that it imports.  Their interpreters end like
# any other: they leave the loop, and run the program.
FORKED = """
import gc, json, os, sys, time
gc.disable()
import torch
import torch._dynamo
import sparsync

gc.freeze()
gc.enable()
torch.set_num_threads(1)
children = []
for number, (words, environment) in enumerate(json.loads(sys.argv[1])):
    child = os.fork()
    if child == 0:
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{number}.{name}", os.O_CREAT | os.O_WRONLY), stream)
        os.environ.update(environment)
        sys.argv[1:] = words
        break
    children.append(child)
else:
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print(json.dumps(codes))
    sys.exit()
"""
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


ENDS = [  # transport, what it leaves or destroys, how it ends, and its exit code
    ("zmq", "leaves", "raise", 1),
    ("zmq", "destroys", "end", 0),
    ("torch", "leaves", "exit", 3),
    ("torch", "destroys", "raise", 1),
]


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Run all jobs at once; return the exit codes, outputs and errors of the ranks of each."""
    jobs, folder = [], tmp_path_factory.mktemp("ended")
    with contextlib.ExitStack() as stack:
        for *words, _code in ENDS:
            free = stack.enter_context(socket.socket())
            free.bind(("127.0.0.1", 0))
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
            for rank in range(2):
                jobs.append((words, place | {"WORLD_SIZE": "2", "RANK": str(rank)}))
    command = [sys.executable, "-c", FORKED + PROGRAM, json.dumps(jobs)]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            codes = json.loads(process.communicate(timeout=240)[0])
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    texts = [
        (folder / f"{n}.{end}").read_text() for n in range(len(jobs)) for end in ("out", "err")
    ]
    ranks = list(zip(codes, texts[::2], texts[1::2], strict=True))
    return dict(zip(ENDS, zip(ranks[::2], ranks[1::2], strict=True), strict=True))


@pytest.mark.gloo
@pytest.mark.parametrize("job", ENDS, ids=lambda job: "-".join(map(str, job)))
def test_a_process_ends_as_it_should_while_an_exchange_is_under_way(job, ended):
    """``benchmarks/exits.py`` tries many more ways to end, and measures how long they take."""
    *_, end, code = job
    for rank, (its_code, said, words) in enumerate(ended[job]):
        assert its_code == code, words
        lines = words.replace(f"[rank{rank}]: ", "").strip().splitlines()
        lines = [line for line in lines if not line.startswith("sparsync: exchanges ")]
        assert said and lines[:1] == ["Traceback (most recent call last):"] * (end == "raise")
        assert lines[-1:] == ["RuntimeError: the end"] * (end == "raise")


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


def with_handle(kind):
    """Return a trained model of a kind, and its handle."""
    made, attach = [], sparsync.attach

    def attached(*args, **settings):
        made.append(attach(*args, **settings))
        return made[-1]

    with mock.patch.object(sparsync, "attach", attached):
        net = KINDS[kind]()
    (sync,) = made
    return net, sync


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
@pytest.mark.parametrize("kind", KINDS)
def test_a_handle_closes_after_the_program_has_destroyed_all_groups(kind):
    """The default group may exist again by then, so ``is_initialized`` does not tell."""
    names = dist.distributed_c10d._world.pg_names
    before = set(names)
    net, sync = with_handle(kind)
    for group in set(names) - before:
        dist.destroy_process_group(group)
    sync.close()
    assert net is not None and sync.closed


@on_ranks(2)
@pytest.mark.parametrize("wrapped", [True, False])
def test_a_closed_handle_says_that_it_was_closed_too_early(wrapped, folder):
    net = ddp_model() if wrapped else model()
    kind = torch.optim.SGD if wrapped else torch.optim.AdamW
    optimizer = kind(net.parameters(), 0.1)
    with sparsync.attach(net, optimizer) as sync:
        backward(net, 0)
        optimizer.step()
    state = sync.state_dict()
    calls = {
        "save()": lambda: sparsync.save(sync, folder, model=net),
        "load()": lambda: sparsync.load(sync, folder, model=net),
        "load_state_dict()": lambda: sync.load_state_dict(state),
    }
    if not wrapped:
        calls |= {"finish()": sync.finish, "step()": sync.step}
    for name, call in calls.items():
        with refused(f"{name} needs the other ranks, and this handle is closed"):
            call()
    assert not list(folder.iterdir())


@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_handle_is_neither_copied_nor_pickled(kind):
    """A shallow copy would close what the handle still uses; the others failed on a lock."""
    net, sync = with_handle(kind)
    for act in (
        copy.copy,
        copy.deepcopy,
        pickle.dumps,
        lambda sync: torch.save(sync, io.BytesIO()),
    ):
        with refused("the handle that attach returned, cannot be copied or pickled"):
            act(sync)
    assert net is not None


@on_ranks(2)
@pytest.mark.parametrize("wrapped", [True, False])
def test_a_handle_that_nobody_keeps_exchanges(wrapped):
    net = ddp_model() if wrapped else model()
    trained(net, torch.optim.AdamW(net.parameters()), algorithm=dense())
    assert same_everywhere(flat(net))


def end_of_child(act):
    """Call ``act`` in a forked child, as a worker of a DataLoader may; return the child's wait status."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            act()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_forked_child_leaves_handles_to_its_parent(kind):
    """Where a child destroyed a group of its parent's, it ended with a segmentation fault."""
    kept = [KINDS[kind]()]
    acts = [
        lambda: (kept.clear(), gc.collect()),  # the garbage collector finds a dropped model
        weakref.finalize._exitfunc,  # an interpreter's regular end
    ]
    assert [end_of_child(act) for act in acts] == [0, 0]


@on_ranks(2)
def test_a_handle_that_a_forked_child_closes_still_exchanges():
    net = ddp_model()
    optimizer = torch.optim.AdamW(net.parameters())
    sync = sparsync.attach(net, optimizer, dense(), transport=sparsync.Transport(timeout=60))
    assert end_of_child(sync.close) == 0
    for step in range(2):
        optimizer.zero_grad()
        backward(net, step)
        optimizer.step()
    assert same_everywhere(flat(net)) and sync.stats()["exchanges"] == 2
    sync.close()
