"""``alltoallv`` over ZeroMQ: one operation, and yet the messages of the point-to-point one."""

import time

import pytest
import torch

from sparsync.errors import DeadlineError, PeerError
from sparsync.transports.communicator import Communicator
from sparsync.transports.driver import run
from sparsync.transports.ledger import Raw
from sparsync.transports.zmq import ZmqCommunicator, mesh

from .zmq_group import RAW, UP_TO, meet, message, together


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
            # 0 bytes from rank 0 to all: of a fixed length, nothing travels
            payloads = [payload(rank, 0) for _ in everyone]
            capacities = [10_000 * source for source in everyone]
            received = run(call(payloads, capacities, "p", framing))
            for source in everyone:
                assert torch.equal(received[source], payload(source, 0))
            comm.ledger.begin_step(comm.ledger.step + 1)
            counted.append(comm.ledger.last_step)
        assert counted[0] == counted[1] and counted[0].sent == 30_000 * rank
        return True

    monkeypatch.setattr(mesh, "INLINE", inline)
    assert together(program, 4) == [True] * 4


@pytest.mark.parametrize("size", [9, 300, 20_000])
def test_the_same_payload_for_all_reaches_ranks_that_got_other_messages_before(size, monkeypatch):
    """Its frame is reused where the header is the same, sequence number included."""

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

    monkeypatch.setattr(mesh, "INLINE", 10_000)
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
