"""Contract checks for a communicator."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from sparsync.errors import CommunicationError
from sparsync.sparse import SparseVector
from sparsync.testing.cases import WORLD_SIZES
from sparsync.transports.communicator import Communicator
from sparsync.transports.driver import run
from sparsync.transports.groups import Subgroup
from sparsync.transports.ledger import Raw
from sparsync.transports.sim import simulate
from sparsync.wire.codec import MessageFraming
from sparsync.wire.coo import Coo

__all__ = ["check_communicator", "check_deadline", "exercise_communicator"]

_LATEST = 10.0  # longest wait in seconds; it is generous, because a busy machine wakes threads late


def check_communicator(
    world_sizes: Sequence[int] = WORLD_SIZES,
    *,
    connect: Callable[[int], Sequence[Communicator]] | None = None,
) -> None:
    """Check every call of a transport whose ranks are all in this process.

    ``connect`` returns the communicators of a group with the given number of ranks.  Each of them runs in
    its own thread, and is closed at the end.  With None, this checks the simulator.  For a transport
    between processes, run ``exercise_communicator`` on every rank.

    Raises:
        AssertionError: a call returned a wrong result.
        CommunicationError: the transport's own error, from the first rank that raised one.

    Example:
        >>> from sparsync.transports.groups import SoloCommunicator
        >>> check_communicator([1], connect=lambda world_size: [SoloCommunicator()])
    """
    for world_size in world_sizes:
        if connect is None:
            simulate(exercise_communicator, world_size)
            continue
        comms = connect(world_size)
        try:
            with ThreadPoolExecutor(world_size) as pool:
                ending = [pool.submit(run, exercise_communicator(comm)) for comm in comms]
            for future in ending:
                future.result()
        finally:
            for comm in comms:
                comm.close()


def check_deadline(connect: Callable[[], Sequence[Communicator]]) -> None:
    """Check that waiting for a silent rank ends with an error that names rank, step and phase.

    ``connect`` returns the communicators of two ranks.  Their deadline should be short, because this
    check waits for it.

    Raises:
        AssertionError: there is no error, or it is late or does not name rank, step and phase.
    """
    waiting, silent = connect()
    started = time.monotonic()
    try:
        waiting.irecv(silent.rank, 1, "check", Raw("control")).wait()
    except CommunicationError as error:
        missing = [word for word in ("rank 0", "step 0", "check") if word not in str(error)]
        assert not missing, f"the error does not name {', '.join(missing)}: {error}"
    else:
        raise AssertionError("a message arrived that nobody sent")
    finally:
        waiting.close()
        silent.close()
    seconds = time.monotonic() - started
    assert seconds < _LATEST, f"the wait ended after {seconds:.1f} s"


async def exercise_communicator(comm: Communicator) -> None:
    """Check every call of a ``Communicator`` on this rank; all ranks must run it together."""
    rank, world_size = comm.rank, comm.world_size
    ones = torch.arange(7, dtype=torch.float32, device="cpu") + rank
    expected = world_size * torch.arange(7.0, device="cpu") + sum(range(world_size))
    assert torch.equal(await comm.allreduce(ones, "check"), expected), "allreduce sum"
    assert await comm.allreduce(ones, "check", in_place=True) is ones, "allreduce in place"
    assert torch.equal(ones, expected), "allreduce in place"
    for dtype in (torch.int32, torch.int64, torch.float64):
        value = torch.tensor([rank, -rank], dtype=dtype, device="cpu")
        highest = await comm.allreduce(value, "check", "max")
        assert highest.tolist() == [world_size - 1, 0], f"allreduce max of {dtype}"
        lowest = await comm.allreduce(value, "check", "min")
        assert lowest.tolist() == [0, 1 - world_size], f"allreduce min of {dtype}"
    empty = await comm.allreduce(torch.zeros(0, device="cpu"), "check")
    assert empty.numel() == 0, "allreduce of nothing"
    gathered = await comm.allgather(torch.tensor([[rank, 5]], device="cpu"), "check")
    assert [g.tolist() for g in gathered] == [[[r, 5]] for r in range(world_size)], "allgather"
    lengths = [r % 3 for r in range(world_size)]
    mine = torch.full((lengths[rank],), rank, dtype=torch.uint8, device="cpu")
    for ring in (False, True):
        blocks = await comm.allgatherv(mine, lengths, "check", Raw("control"), ring=ring)
        for r, block in enumerate(blocks):
            assert block.tolist() == [r] * lengths[r], f"allgatherv, ring {ring}: block {r}"
    await _check_alltoallv(comm)
    await _check_order(comm)
    # list members in descending order, so that ranks in the group are ordered differently than globally
    members = [r for r in range(world_size) if r % 2 == rank % 2][::-1]
    shared = await Subgroup(comm, members).allgather(torch.tensor([rank], device="cpu"), "check")
    assert [int(t) for t in shared] == members, "a group inside is in the order given"
    await comm.barrier()


async def _check_alltoallv(comm: Communicator) -> None:
    """Check messages of known lengths, and messages that state their own lengths."""
    rank, ranks = comm.rank, range(comm.world_size)
    outgoing = [
        torch.full((rank + 1,), (10 * rank + r) % 256, dtype=torch.uint8, device="cpu")
        for r in ranks
    ]
    received = await comm.alltoallv(outgoing, [r + 1 for r in ranks], "check", Raw("control"))
    expected = [[(10 * r + rank) % 256] * (r + 1) for r in ranks]
    assert [m.tolist() for m in received] == expected, "alltoallv"
    codec = Coo()
    vectors = [SparseVector.from_dense(torch.arange(float(rank + r), device="cpu")) for r in ranks]
    payloads = [codec.encode(v).payload for v in vectors]
    capacities = [codec.nbytes(r + comm.world_size, 1) for r in ranks]
    messages = await comm.alltoallv(payloads, capacities, "check", MessageFraming(codec))
    for r, message in enumerate(messages):
        decoded = codec.decode(message, max(rank + r, 1))
        assert decoded.values.tolist() == list(range(1, rank + r)), "alltoallv of messages"


async def _check_order(comm: Communicator) -> None:
    """Check that messages between two ranks arrive in order."""
    if comm.world_size == 1:
        return
    raw = Raw("control")
    dest, source = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    # post all receives before any send, because no operation may depend on the end of a different one
    receiving = [comm.irecv(source, 1, "check", raw) for _ in range(5)]
    sending = [
        comm.isend(torch.tensor([i], dtype=torch.uint8, device="cpu"), dest, "check", raw)
        for i in range(5)
    ]
    assert [int(await r) for r in receiving] == list(range(5)), "messages overtook each other"
    for operation in sending:
        await operation
