"""The ZeroMQ transport between threads: contracts, order, channels, sizes, any source."""

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsync import ConfigurationError, testing
from sparsync.transports.driver import run
from sparsync.transports.zmq import ZmqCommunicator, mesh
from sparsync.transports.zmq.communicator import _staged

from .zmq_group import RAW, UP_TO, meet, message, together


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_the_contract_of_a_communicator_holds(world_size):
    together(lambda comm: run(testing.exercise_communicator(comm)), world_size)


@settings(max_examples=20)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40_000)), min_size=1, max_size=12),
    st.sampled_from([1, 64, 8192]),
    st.sampled_from([100, 10_000, 10**9]),
)
def test_messages_of_any_size_and_channel_arrive_whole_and_in_order(plan, inline, zero_copy):
    """Whatever way a payload travels: in the header's frame, apart, or from the tensor's memory."""

    def content(place, size):
        return torch.arange(place, place + size).to(torch.uint8)

    def program(comm):
        if comm.rank == 0:
            operations = [
                comm.channel(tag).isend(content(place, size), 1, "p", UP_TO)
                for place, (tag, size) in enumerate(plan)
            ]
            for operation in operations:
                operation.wait()
            return True
        receives = [comm.channel(tag).irecv(0, size, "p", UP_TO) for tag, size in plan]
        for operation in reversed(receives):
            operation.wait()
        results = [operation.result for operation in receives]
        return all(
            torch.equal(result, content(place, size)) and result.data_ptr() % 8 == 0
            for place, ((_, size), result) in enumerate(zip(plan, results, strict=True))
        )

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(mesh, "INLINE", inline)
        patched.setattr(mesh, "ZERO_COPY", zero_copy)
        assert together(program, 2) == [True, True]


def test_a_channel_beyond_32_bits_is_refused():
    def program(comm):
        with pytest.raises(ConfigurationError, match="channel 4294967296 does not exist"):
            comm.channel(2**32)

    together(program, 1)


def test_polling_never_waits_and_makes_everything_advance():
    def program(comm):
        if comm.rank == 1:
            meet(comm)
            comm.isend(message(1), 0, "p", RAW)
            comm.channel(5).isend(message(2), 0, "p", RAW)
            return meet(comm)
        first, second = comm.irecv(1, 1, "p", RAW), comm.channel(5).irecv(1, 1, "p", RAW)
        started = time.monotonic()
        assert not any(first.poll(0) for _ in range(100))
        assert not first.poll(0.02)
        assert time.monotonic() - started >= 0.02
        meet(comm)
        while not first.poll(0):
            time.sleep(0.001)
        deadline = time.monotonic() + 5
        while second.claims[0].payload is None and time.monotonic() < deadline:
            first.mesh.drain()  # what a poll of any other operation does
        assert second.poll(0) and second.result.tolist() == [2]
        return meet(comm)

    together(program, 2)


def test_a_poll_ends_early_when_another_receive_got_its_message():
    def program(comm):
        if comm.rank == 1:
            meet(comm)
            comm.channel(5).isend(message(2), 0, "p", RAW)
            meet(comm)
            comm.isend(message(1), 0, "p", RAW)
            return meet(comm)
        first, second = comm.irecv(1, 1, "p", RAW), comm.channel(5).irecv(1, 1, "p", RAW)
        meet(comm)
        assert not first.poll(30)  # and yet it returns
        assert second.poll(0)
        meet(comm)
        first.wait()
        return meet(comm)

    together(program, 2)


def test_any_source_takes_what_is_first_of_any_step_and_says_whose():
    def program(comm):
        votes = comm.channel(9)
        if comm.rank:
            comm.ledger.begin_step(10 + comm.rank)
            votes.isend(message(comm.rank), 0, "vote", RAW).wait()
            return meet(comm)
        operations = [votes.irecv_any(1, "vote", RAW) for _ in range(3)]
        for operation in operations:
            operation.wait()
        meet(comm)
        return sorted((o.source, o.result.item()) for o in operations)

    assert together(program, 4)[0] == [(1, 1), (2, 2), (3, 3)]


def test_any_source_takes_the_earliest_of_those_that_wait_already():
    def program(comm):
        if comm.rank:
            if comm.rank == 2:
                meet(comm)
            comm.isend(message(comm.rank), 0, "vote", RAW)
            comm.isend(message(comm.rank + 10), 0, "vote", RAW)
            if comm.rank == 1:
                meet(comm)
            return meet(comm)
        last = comm.channel(1).irecv_any(1, "never", RAW)
        while comm.mesh.mailboxes.unclaimed < 2:
            last.poll(0.01)
        meet(comm)
        while comm.mesh.mailboxes.unclaimed < 4:
            last.poll(0.01)
        meet(comm)
        operations = [comm.irecv_any(1, "vote", RAW) for _ in range(4)]
        return [o.result.item() for o in operations]

    assert together(program, 3)[0] == [1, 11, 2, 12]


def test_one_built_over_another_communicator_is_the_same_group():
    def program(comm):
        with ZmqCommunicator(comm.rank, comm.world_size, store=comm, timeout=5) as second:
            run(testing.exercise_communicator(second))
            assert second.mesh.job != comm.mesh.job
            return second.rank, second.world_size

    assert together(program, 3) == [(0, 3), (1, 3), (2, 3)]


def test_a_payload_beyond_the_limit_is_refused_by_the_sender(monkeypatch):
    def program(comm):
        with pytest.raises(ConfigurationError, match="101 bytes exceeds 100, the most"):
            comm.isend(torch.zeros(101, dtype=torch.uint8), 1 - comm.rank, "p", RAW)

    monkeypatch.setattr(mesh, "MAX_MESSAGE", 100)
    together(program, 2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_payloads_are_staged_through_pinned_memory():
    payload = torch.arange(100, dtype=torch.uint8, device="cuda")
    host = _staged(payload)
    assert host.is_pinned() and torch.equal(host, payload.cpu())
