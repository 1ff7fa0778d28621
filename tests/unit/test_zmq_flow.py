"""How much may be under way on the ZeroMQ transport, and how it ends."""

import gc
import time

import pytest
import torch
from torch.distributed import HashStore

from sparsync import ConfigurationError
from sparsync.errors import DeadlineError, PeerError
from sparsync.transports.zmq import ZmqCommunicator, ZmqSettings, mesh

from .zmq_group import RAW, meet, message, together


def test_a_slow_receiver_makes_the_sender_wait_and_nothing_is_lost():
    count, size = 60, 1 << 20

    def program(comm):
        if comm.rank == 1:
            meet(comm)  # meanwhile nothing is taken in
            for place in range(count):
                operation = comm.irecv(0, size, "p", RAW)
                operation.wait()
                assert operation.result[0] == place and operation.result[-1] == place
            return None
        payloads = [torch.full((size,), place, dtype=torch.uint8) for place in range(count)]
        operations = [comm.isend(p, 1, "p", RAW) for p in payloads]
        late = ZmqCommunicator.channel(comm, 0)
        late.timeout = 0.3
        with pytest.raises(DeadlineError, match="rank 0, step 0: send to rank 1 in phase 'p'"):
            late.isend(payloads[0], 1, "p", RAW).wait()
        waiting = sum(not operation.poll(0) for operation in operations)
        meet(comm)
        for operation in operations:
            operation.wait()
        return waiting

    few = ZmqSettings(high_water=2, zero_copy=2**30)
    assert together(program, 2, settings=few)[0] > count // 2


def test_a_payload_may_change_when_its_send_is_done():
    def program(comm):
        if comm.rank == 1:
            meet(comm)
            operation = comm.irecv(0, 3 << 20, "p", RAW)
            operation.wait()
            return int(operation.result.sum(dtype=torch.int64))
        payload = torch.ones(3 << 20, dtype=torch.uint8)
        operation = comm.isend(payload, 1, "p", RAW)
        meet(comm)
        operation.wait()
        payload.zero_()
        return None

    assert together(program, 2)[1] == 3 << 20


def test_the_last_messages_are_delivered_after_close():
    def program(comm):
        if comm.rank == 0:
            for place in range(50):
                comm.isend(torch.full((200_000,), place, dtype=torch.uint8), 1, "p", RAW)
            return comm.close()
        time.sleep(0.3)
        receives = [comm.irecv(0, 200_000, "p", RAW) for _ in range(50)]
        for operation in receives:
            operation.wait()
        return [int(r.result[-1]) for r in receives]

    assert together(program, 2, settings=ZmqSettings(high_water=4))[1] == list(range(50))


def test_close_twice_and_use_after_close():
    def program(comm):
        waiting = comm.irecv(1 - comm.rank, 1, "p", RAW)
        comm.close()
        comm.close()
        for use in (
            waiting.wait,
            lambda: comm.isend(message(1), 1 - comm.rank, "p", RAW),
            lambda: comm.channel(3).irecv(1 - comm.rank, 1, "p", RAW),
        ):
            with pytest.raises(ConfigurationError, match="this communicator is closed"):
                use()

    together(program, 2)


def test_a_peer_that_leaves_while_this_rank_still_connects(monkeypatch):
    connect = mesh.Link.__init__

    def slowly(link, owner, peer):
        connect(link, owner, peer)
        if owner.rank == 0:
            time.sleep(0.3)  # rank 1 has closed by now: the greeting of rank 0 has nowhere to go

    monkeypatch.setattr(mesh.Link, "__init__", slowly)

    def program(comm):
        if comm.rank == 0:
            with pytest.raises(PeerError, match=r"rank 1: .*(is gone|it died)"):
                comm.irecv(1, 1, "p", RAW).wait()

    together(program, 2)


def test_a_forgotten_communicator_closes_its_sockets():
    comm = ZmqCommunicator(0, 1, store=HashStore())
    context = comm.mesh.context
    del comm
    gc.collect()
    assert context.closed


def test_too_many_messages_that_nobody_receives_end_with_a_named_error():
    def program(comm):
        if comm.rank == 1:
            for _ in range(3):
                comm.isend(torch.zeros(600, dtype=torch.uint8), 0, "p", RAW).wait()
            return meet(comm)
        waiting = comm.channel(7).irecv(1, 1, "q", RAW)
        with pytest.raises(PeerError, match="would take more than 1000 bytes"):
            waiting.wait()
        return meet(comm)

    together(program, 2, settings=ZmqSettings(max_unclaimed=1000))
