"""Test groups that change over ZeroMQ while sockets persist: ranks join, leave and return."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from torch.distributed import HashStore

from sparsync import testing
from sparsync.errors import DeadlineError, PeerError
from sparsync.transports.driver import run
from sparsync.transports.ledger import Raw
from sparsync.transports.zmq import ZmqCommunicator, mesh, peers

RAW = Raw("value", variable=True)


@pytest.fixture
def members():
    """Return four members without a group, and a function to run a program in a group of some."""
    with ExitStack() as stack, ThreadPoolExecutor(4) as pool:
        every = [
            stack.enter_context(
                ZmqCommunicator(0, 1, store=HashStore(), timeout=5.0, changing=True)
            )
            for _ in range(4)
        ]

        def group(job, chosen, program, late=()):
            ends = [every[m].mesh.endpoint for m in chosen]

            def play(rank, member):
                if member in late:
                    time.sleep(0.2)
                every[member].regroup(rank, job, ends)
                return program(every[member])

            futures = [pool.submit(play, rank, member) for rank, member in enumerate(chosen)]
            return [future.result() for future in futures]

        yield every, group


def total(comm):
    """Sum the ranks' numbers."""
    return run(comm.allreduce(torch.tensor([comm.rank + 1.0]), "sum")).item()


def test_every_group_fulfils_the_contract(members):
    _, group = members
    for job, chosen in enumerate([[0], [0, 1], [1, 0, 3], [3, 2, 1, 0], [2, 3]], start=1):
        group(job, chosen, lambda comm: run(testing.exercise_communicator(comm)))
        assert group(job + 100, chosen, total) == [sum(range(1, 1 + len(chosen)))] * len(chosen)


def test_messages_that_come_early_wait_for_the_group_they_are_of(members):
    every, group = members
    for job in range(1, 4):
        assert group(job, [0, 1, 2, 3], total, late=[job]) == [10.0] * 4
    assert all(one.dropped["of another job"] == 0 for one in every)


def test_links_that_stay_are_not_opened_again(members):
    every, group = members
    group(1, [0, 1, 2], total)
    before = {peer: link.socket for peer, link in every[0].mesh.links.items()}
    group(2, [0, 2, 1], total)
    links = every[0].mesh.links
    assert links[1].socket is before[2] and links[2].socket is before[1]
    group(3, [0, 1], total)
    assert before[2].closed and not before[1].closed


def test_what_the_former_group_sent_is_dropped(members):
    every, group = members

    def send(comm):
        if comm.rank == 1:
            comm.channel(7).isend(torch.ones(5, dtype=torch.uint8), 0, "old", RAW).wait()
        return total(comm)

    group(1, [0, 1], send)
    assert group(2, [0, 1], total) == [3.0] * 2
    operation = every[0].channel(7).irecv(1, 5, "old", RAW)
    assert not operation.poll(0.1)


def test_waits_for_a_rank_that_the_new_group_lacks_end_with_an_error(members, monkeypatch):
    every, group = members
    group(1, [0, 1, 2], total)
    receiving = every[0].irecv(2, 5, "p", RAW)
    former = every[0].channel(3)
    with monkeypatch.context() as full:
        full.setattr(peers.Parcel, "send", lambda parcel, socket: False)
        sending = every[0].isend(torch.ones(5, dtype=torch.uint8), 2, "p", RAW)
    assert not receiving.done and not sending.done
    group(2, [0, 1], total)
    with pytest.raises(
        PeerError, match=r"message from rank 2 .* this rank is in another group now"
    ):
        receiving.wait()
    with pytest.raises(PeerError, match="rank 2 is not in this rank's group any more"):
        sending.wait()
    former.timeout = 0.2
    with pytest.raises(DeadlineError, match=r"rank 2 .* 0.2 s; this group of 2 has no such rank"):
        former.irecv(2, 5, "p", RAW).wait()
    assert group(3, [0, 1, 2], total) == [6.0] * 3


def test_too_many_early_messages_are_dropped_and_counted(members, monkeypatch):
    every, group = members
    monkeypatch.setattr(mesh, "MAX_EARLY", 10_000)
    every[1].regroup(1, 5, [every[0].mesh.endpoint, every[1].mesh.endpoint])
    for _ in range(30):
        every[1].isend(torch.ones(1000, dtype=torch.uint8), 0, "early", RAW).wait()
    deadline = time.monotonic() + 5
    while not every[0].dropped and time.monotonic() < deadline:
        every[0].mesh.advance(0.05)
    assert every[0].dropped["of a group that did not come"] > 0
    assert group(6, [0, 1], total) == [3.0] * 2


def test_who_gives_up_lets_nobody_wait(members):
    """No rank waits for a rank that gave up, or for live ranks that may be waiting for it."""
    _, group = members
    failed = threading.Barrier(3, timeout=5)

    def program(comm):
        if comm.rank == 2:
            time.sleep(0.1)
            comm.give_up()
        else:
            began = time.monotonic()
            with pytest.raises(PeerError, match="rank 2 has given this step up"):
                comm.irecv(1 - comm.rank, 5, "p", RAW).wait()
            assert time.monotonic() - began < 2
            with pytest.raises(PeerError, match="given this step up"):
                comm.irecv(1 - comm.rank, 5, "p", RAW).wait()
        failed.wait()

    group(1, [0, 1, 2], program)
    assert group(2, [0, 1, 2], total) == [6.0] * 3


def test_a_rank_that_is_gone_is_replaced(members):
    every, group = members
    group(1, [0, 1, 2, 3], total)
    every[3].close()
    assert group(2, [0, 1, 2], total) == [6.0] * 3
    with ZmqCommunicator(0, 1, store=HashStore(), timeout=5.0, changing=True) as fresh:
        every[3] = fresh
        assert group(3, [3, 0, 1, 2], total) == [10.0] * 4
