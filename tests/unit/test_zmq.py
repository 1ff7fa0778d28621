"""Test ZeroMQ between threads: contracts, order, channels, sizes, any source, all-to-all."""

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from sparsync import ConfigurationError, testing
from sparsync.errors import DeadlineError, PeerError
from sparsync.transports.communicator import Communicator
from sparsync.transports.driver import run
from sparsync.transports.ledger import Raw
from sparsync.transports.zmq import ZmqCommunicator, peers
from sparsync.transports.zmq.communicator import _staged

from .zmq_group import RAW, UP_TO, meet, message, together


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_the_contract_of_a_communicator_holds(world_size):
    together(lambda comm: run(testing.exercise_communicator(comm)), world_size)


PLANS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40_000)), min_size=1, max_size=12)


@settings(max_examples=20)
@given(PLANS, *map(st.sampled_from, ([1, 64, 8192], [100, 10_000, 10**9], [1000, 10_000, 10**9])))
def test_messages_of_any_size_and_channel_arrive_whole_and_in_order(plan, inline, zero_copy, piece):
    """A payload may be sent with the header, separately, in pieces, or straight from the tensor."""

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
        patched.setattr(peers, "INLINE", inline)
        patched.setattr(peers, "ZERO_COPY", zero_copy)
        patched.setattr(peers, "PIECE", piece)
        assert together(program, 2) == [True, True]


@pytest.mark.parametrize("seconds", [True, "5", None, 0, -1.0, float("nan"), 1.1e6])
def test_a_timeout_is_a_number_of_seconds_that_pass(seconds):
    with pytest.raises(ConfigurationError, match=f"timeout is {seconds!r}; give seconds > 0"):
        ZmqCommunicator(0, 1, store=HashStore(), timeout=seconds)


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
            first.mesh.drain()  # as a poll of any other operation would do
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


@pytest.mark.parametrize("at", ["127.0.0.1", "*", None])
def test_ranks_that_meet_over_a_communicator_take_part_in_the_same_collectives(
    at, tmp_path, monkeypatch
):
    """Some ranks are given their interface, and some cannot take part."""
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)

    def program(comm):
        only = {"interface": at} if at else {"curve_keys": tmp_path / "none"}
        options = only if comm.rank == 1 else {}
        try:
            ZmqCommunicator(comm.rank, comm.world_size, store=comm, timeout=5, **options).close()
        except (ConfigurationError, PeerError) as error:
            return str(error)
        return "met"

    said = together(program, 3)
    if at == "127.0.0.1":
        assert said == ["met"] * 3
    else:
        assert all(": rank 1 cannot take part: " in said[rank] for rank in (0, 2))
        assert ("which means all of them" if at else "is missing") in said[1]


def test_a_payload_beyond_the_limit_is_refused_by_the_sender(monkeypatch):
    def program(comm):
        with pytest.raises(ConfigurationError, match="101 bytes exceeds 100, the most"):
            comm.isend(torch.zeros(101, dtype=torch.uint8), 1 - comm.rank, "p", RAW)

    monkeypatch.setattr(peers, "MAX_MESSAGE", 100)
    together(program, 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_payloads_are_staged_through_pinned_memory():
    payload = torch.arange(100, dtype=torch.uint8, device="cuda")
    host = _staged(payload)
    assert host.is_pinned() and torch.equal(host, payload.cpu())


def payload(source, dest):
    return torch.full((10_000 * source + dest,), 10 * source + dest, dtype=torch.uint8)


@pytest.mark.parametrize("framing", [UP_TO, RAW])
@pytest.mark.parametrize("inline", [1, 2**17])
def test_it_exchanges_messages_with_the_point_to_point_one_and_counts_the_same(
    framing, inline, monkeypatch
):
    def program(comm):
        rank, everyone = comm.rank, range(comm.world_size)
        calls = [comm.alltoallv, lambda *a: Communicator.alltoallv(comm, *a)]
        counted = []
        for call in calls if rank % 2 else reversed(calls):
            # rank 0 has 0 bytes for every rank; with a fixed length, no message is sent
            payloads = [payload(rank, 0) for _ in everyone]
            capacities = [10_000 * source for source in everyone]
            received = run(call(payloads, capacities, "p", framing))
            for source in everyone:
                assert torch.equal(received[source], payload(source, 0))
            comm.ledger.begin_step(comm.ledger.step + 1)
            counted.append(comm.ledger.last_step)
        assert counted[0] == counted[1] and counted[0].sent == 30_000 * rank
        return True

    monkeypatch.setattr(peers, "INLINE", inline)
    assert together(program, 4) == [True] * 4


@pytest.mark.parametrize("size", [9, 300, 20_000])
def test_the_same_payload_for_all_reaches_ranks_that_got_other_messages_before(size, monkeypatch):
    """A frame is reused only if the headers, with their sequence numbers, are equal."""

    def program(comm):
        rank = comm.rank
        first = None
        if rank == 0:
            comm.isend(message(7), 2, "p", RAW).wait()
        if rank == 2:
            first = comm.irecv(0, 1, "p", RAW)
        mine = torch.full((size,), rank, dtype=torch.uint8)
        received = run(comm.alltoallv([mine] * 4, [size] * 4, "q", RAW))
        if first is not None:
            first.wait()
            assert first.result.tolist() == [7]
        return [int(r.unique()) for r in received]

    monkeypatch.setattr(peers, "INLINE", 10_000)
    assert together(program, 4) == [[0, 1, 2, 3]] * 4


def test_a_missing_message_runs_into_the_deadline_and_names_its_rank():
    def program(comm):
        if comm.rank == 2:
            return meet(comm)
        late = ZmqCommunicator.channel(comm, 0)
        late.timeout = 0.3
        started = time.monotonic()
        with pytest.raises(DeadlineError, match="step 0: message from rank 2 in phase 'p' did not"):
            run(late.alltoallv([message(1)] * 3, [1] * 3, "p", RAW))
        assert time.monotonic() - started >= 0.3
        return meet(comm)

    together(program, 3)


def test_a_death_is_noticed_although_others_keep_sending():
    def program(comm):
        if comm.rank == 2:
            comm.isend(message(1), 0, "p", RAW).wait()
            meet(comm)
            return comm.close()
        if comm.rank == 1:
            meet(comm)
            until = time.monotonic() + 15
            while time.monotonic() < until and not over:
                comm.channel(5).isend(message(1), 0, "q", RAW).wait()
                time.sleep(0.005)
            return None
        comm.irecv(2, 1, "p", RAW).wait()
        meet(comm)
        started = time.monotonic()
        with pytest.raises(PeerError, match="message from rank 2 in phase 'p' will not come"):
            run(comm.alltoallv([message(1)] * 3, [1] * 3, "p", Raw("control")))
        over.append(True)
        assert time.monotonic() - started < 10
        return None

    over = []
    together(program, 3)
