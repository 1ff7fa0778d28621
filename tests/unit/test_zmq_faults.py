"""Test that ranks that disagree, stop, die or lag cause errors that name rank, phase and step."""

import gc
import threading
import time

import pytest
import torch
from torch.distributed import HashStore

from sparsync import ConfigurationError
from sparsync.errors import DeadlineError, PeerError
from sparsync.transports.driver import Engine, run
from sparsync.transports.zmq import ZmqCommunicator, mesh, peers
from tests.tables import cases

from .zmq_group import RAW, UP_TO, fails, meet, message, together


@cases(
    (8, "split", 4, "rank 1 sent one of step 8, phase 'split'"),
    (7, "gather", 4, "rank 1 sent one of step 7, phase 'gather'"),
    (7, "split", 5, "rank 1 sent 5 bytes where exactly 4 can be"),
    (7, "split", 3, "rank 1 sent 3 bytes where exactly 4 can be"),
)
def test_a_message_that_does_not_fit_names_rank_phase_and_step(step, phase, size, words):
    def program(comm):
        comm.ledger.begin_step(step if comm.rank else 7)
        comm.mesh.mailboxes.phase_number("gather")
        if comm.rank:
            comm.isend(torch.zeros(size, dtype=torch.uint8), 0, phase, RAW).wait()
            return meet(comm)
        text = fails(PeerError, comm.irecv(1, 4, "split", RAW))
        assert text.startswith("rank 0, step 7: message from rank 1 in phase 'split': ")
        assert words in text
        return meet(comm)

    together(program, 2)


def test_a_message_longer_than_the_capacity_is_refused_and_a_shorter_one_taken():
    def program(comm):
        if comm.rank:
            for size in (9, 7):
                comm.isend(torch.zeros(size, dtype=torch.uint8), 0, "p", UP_TO).wait()
            return meet(comm)
        assert "9 bytes where at most 8 can be" in fails(PeerError, comm.irecv(1, 8, "p", UP_TO))
        short = comm.irecv(1, 8, "p", UP_TO)
        short.wait()
        return meet(comm), short.result.numel()

    assert together(program, 2)[0][1] == 7


def test_a_silent_rank_runs_into_the_deadline_and_a_later_wait_may_succeed():
    def program(comm):
        if comm.rank:
            meet(comm)
            comm.isend(message(5), 0, "p", RAW).wait()
            return meet(comm)
        late = comm.channel(0)
        late.timeout = 0.3
        operation = late.irecv(1, 1, "p", RAW)
        started = time.monotonic()
        text = fails(DeadlineError, operation)
        assert time.monotonic() - started >= 0.3
        assert text.startswith("rank 0, step 0: message from rank 1 in phase 'p' did not complete")
        assert "within 0.3 s" in text
        meet(comm)
        assert operation.poll(5) and operation.result.tolist() == [5]
        return meet(comm)

    together(program, 2)


@pytest.mark.parametrize("spoke_before", [True, False])
def test_a_rank_that_is_gone_is_noticed_within_about_a_second(spoke_before):
    def program(comm):
        if comm.rank == 1:
            if spoke_before:
                comm.isend(message(1), 0, "p", RAW).wait()
            meet(comm)
            return comm.close()
        first = comm.irecv(1, 1, "p", RAW)
        second = comm.irecv(1, 1, "q", RAW)
        anyone = comm.channel(2).irecv_any(1, "vote", RAW)
        meet(comm)
        started = time.monotonic()
        if spoke_before:
            first.wait()  # what was sent before the end still arrives
        assert "message from rank 1 in phase 'q' will not come" in fails(PeerError, second)
        assert "all other ranks are gone" in fails(PeerError, anyone)
        assert time.monotonic() - started < 8
        assert list(comm.lost) == [1]
        with pytest.raises(PeerError, match="rank 0, step 0: send to rank 1 in phase 'r' failed"):
            for _ in range(100):
                comm.isend(message(1), 1, "r", RAW).wait()
                time.sleep(0.02)
                comm.mesh.advance(0.06)
        fails(PeerError, comm.irecv(1, 1, "later", RAW))
        return None

    together(program, 2)


def test_survivors_go_on():
    def program(comm):
        if comm.rank == 2:
            return comm.close()
        other = 1 - comm.rank
        fails(PeerError, comm.irecv(2, 1, "p", RAW))
        receiving = comm.irecv(other, 1, "q", RAW)
        comm.isend(message(comm.rank), other, "q", RAW).wait()
        receiving.wait()
        return meet_two.wait(5) >= 0

    meet_two = threading.Barrier(2)
    assert together(program, 3)[:2] == [True, True]


@pytest.mark.parametrize("on_engine", [False, True])
def test_an_algorithm_may_handle_the_loss_of_a_peer(on_engine):
    async def program(comm):
        try:
            await comm.irecv(1, 1, "p", RAW)
        except PeerError as error:
            return str(error)
        return "no error"

    def rank(comm):
        meet(comm)
        if comm.rank == 1:
            return comm.close()
        if not on_engine:
            return run(program(comm))
        engine = Engine("test")
        try:
            return engine.submit(program(comm)).result(timeout=30)
        finally:
            engine.close()

    assert "message from rank 1 in phase 'p' will not come" in together(rank, 2)[0]


def test_a_slow_receiver_makes_the_sender_wait_and_nothing_is_lost(monkeypatch):
    count, size = 60, 1 << 20

    def program(comm):
        if comm.rank == 1:
            meet(comm)  # meanwhile this rank receives nothing
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

    monkeypatch.setattr(peers, "HIGH_WATER", 2)
    monkeypatch.setattr(peers, "ZERO_COPY", 2**30)
    assert together(program, 2)[0] > count // 2


@pytest.mark.parametrize(("count", "size"), [(1, 3 << 20), (40, 200_000), (40, 50_000)])
def test_a_payload_may_change_when_its_send_is_done(count, size, monkeypatch):
    """Even if it had to wait for room, or ZeroMQ reads it in place."""
    monkeypatch.setattr(peers, "HIGH_WATER", 2)

    def program(comm):
        payload = torch.zeros(size, dtype=torch.uint8)
        if comm.rank == 0:
            for place in range(count):
                operation = comm.isend(payload.fill_(place + 1), 1, "p", RAW)
                if place == 0:
                    meet(comm)
                operation.wait()
            return payload.zero_()
        meet(comm)
        time.sleep(0.1)  # until the queues are full
        for place in range(count):
            operation = comm.irecv(0, size, "p", RAW)
            operation.wait()
            assert operation.result.min() == operation.result.max() == place + 1
        return payload

    together(program, 2)


def post_many(comm):
    """Send fifty messages to rank 1, more than queues hold."""
    for place in range(50):
        comm.isend(torch.full((200_000,), place, dtype=torch.uint8), 1, "p", RAW)


def take_many(comm):
    receives = [comm.irecv(0, 200_000, "p", RAW) for _ in range(50)]
    for operation in receives:
        operation.wait()
    return [int(r.result[-1]) for r in receives]


@pytest.fixture
def short_queues(monkeypatch):
    monkeypatch.setattr(peers, "HIGH_WATER", 4)


def test_the_last_messages_are_delivered_after_close(short_queues):
    def program(comm):
        if comm.rank == 0:
            post_many(comm)
            return comm.close()
        time.sleep(0.3)
        return take_many(comm)

    assert together(program, 2)[1] == list(range(50))


@pytest.mark.parametrize("held", [0.0, 2.0])
def test_the_last_messages_are_delivered_after_abort_to_a_peer_that_stood_still(held, short_queues):
    """Closing waits longer for messages than for the aborted thread, but no longer than needed."""

    def program(comm):
        if comm.rank == 0:
            post_many(comm)
            begin = time.monotonic()
            comm.abort()
            comm.close()
            return time.monotonic() - begin
        time.sleep(held)
        return take_many(comm)

    seconds, received = together(program, 2)
    assert received == list(range(50)) and held <= seconds + 0.5 < held + 2.0


def test_an_aborted_communicator_drops_what_does_not_leave_in_time(short_queues):
    def program(comm):
        if comm.rank == 1:
            return meet(comm)  # without taking anything in
        post_many(comm)
        begin = time.monotonic()
        comm.abort()
        time.sleep(1.0)  # like a thread that takes time to end
        comm.close()
        seconds = time.monotonic() - begin
        meet(comm)
        return seconds

    assert mesh.LINGER_ABORTED - 0.1 < together(program, 2)[0] < 5.0


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
    connect = peers.Link.__init__

    def slowly(link, context, peer, *others):
        connect(link, context, peer, *others)
        if peer == 1:
            time.sleep(0.3)  # rank 1 has closed by now: the greeting of rank 0 has nowhere to go

    monkeypatch.setattr(peers.Link, "__init__", slowly)

    def program(comm):
        if comm.rank == 0:
            with pytest.raises(PeerError, match=r"rank 1: .*(is gone|it died|has ended)"):
                comm.irecv(1, 1, "p", RAW).wait()

    together(program, 2)


def test_a_forgotten_communicator_closes_its_sockets():
    comm = ZmqCommunicator(0, 1, store=HashStore())
    context = comm.mesh.context
    del comm
    gc.collect()
    assert context.closed


def test_too_many_messages_that_nobody_receives_end_with_a_named_error(monkeypatch):
    def program(comm):
        if comm.rank == 1:
            for _ in range(3):
                comm.isend(torch.zeros(600, dtype=torch.uint8), 0, "p", RAW).wait()
            return meet(comm)
        waiting = comm.channel(7).irecv(1, 1, "q", RAW)
        with pytest.raises(PeerError, match="would take more than 1000 bytes"):
            waiting.wait()
        return meet(comm)

    monkeypatch.setattr(mesh, "MAX_UNCLAIMED", 1000)
    together(program, 2)
