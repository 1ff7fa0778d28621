"""Ranks that disagree, stop or die: every fault is an error that names rank, phase and step."""

import threading
import time

import pytest
import torch

from sparsync.errors import DeadlineError, PeerError
from sparsync.transports.driver import Engine, run

from .zmq_group import RAW, UP_TO, fails, meet, message, together


@pytest.mark.parametrize(
    ("step", "phase", "size", "words"),
    [
        (8, "split", 4, "rank 1 sent one of step 8, phase 'split'"),
        (7, "gather", 4, "rank 1 sent one of step 7, phase 'gather'"),
        (7, "split", 5, "rank 1 sent 5 bytes where exactly 4 can be"),
        (7, "split", 3, "rank 1 sent 3 bytes where exactly 4 can be"),
    ],
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
