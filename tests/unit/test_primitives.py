"""Every collective of the ``Communicator``, for any world size, and groups in a group."""

import pytest
import torch

from sparsync import ConfigurationError, simulate
from sparsync.transports.communicator import Subgroup
from sparsync.transports.ledger import Raw

WORLD_SIZES = range(1, 10)
BYTES = Raw("value")


def payload(nbytes: int, fill: int = 0) -> torch.Tensor:
    return torch.full((nbytes,), fill, dtype=torch.uint8)


def on_every_rank(program, world_size):
    return simulate(program, world_size).results


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("size", [0, 1, 10])
@pytest.mark.parametrize(
    ("op", "expected"),
    [("sum", lambda p: p * (p + 1) / 2), ("max", lambda p: p), ("min", lambda p: 1)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_allreduce(world_size, size, op, expected, dtype):
    async def program(comm):
        mine = torch.full((size,), comm.rank + 1, dtype=dtype)
        total = await comm.allreduce(mine, "p", op)
        assert mine.tolist() == [comm.rank + 1] * size
        return total

    for total in on_every_rank(program, world_size):
        assert total.dtype == dtype
        assert total.tolist() == [expected(world_size)] * size


@pytest.mark.parametrize("shape", [(), (3, 2), (2, 0, 3), (1, 2, 3)])
def test_allreduce_keeps_the_shape(shape):
    async def program(comm):
        mine = torch.ones(shape) * (comm.rank + 1)
        turned = mine.T if mine.dim() == 2 else mine  # not contiguous
        total = await comm.allreduce(turned, "p")
        return total.shape == turned.shape and bool((total == 6).all())

    assert all(on_every_rank(program, 3))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_allreduce_costs_2_log_p_messages_and_its_share_of_n(world_size):
    size = 12 * world_size

    async def program(comm):
        await comm.allreduce(torch.ones(size), "p")

    for ledger in simulate(program, world_size).ledgers:
        traffic = ledger.total()
        assert traffic.messages_sent == 2 * (world_size - 1).bit_length()
        assert traffic.sent == traffic.received == 2 * 4 * size * (world_size - 1) // world_size
        assert traffic.parts.value == traffic.sent


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float16, torch.uint8])
def test_allgather(world_size, dtype):
    async def program(comm):
        gathered = await comm.allgather(torch.tensor([[comm.rank, 7]], dtype=dtype), "p")
        assert all(t.dtype == dtype and t.shape == (1, 2) for t in gathered)
        return [t.tolist() for t in gathered]

    expected = [[[rank, 7]] for rank in range(world_size)]
    assert on_every_rank(program, world_size) == [expected] * world_size


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("ring", [False, True])
def test_allgatherv(world_size, ring):
    lengths = [(5 * rank) % 4 for rank in range(world_size)]

    async def program(comm):
        gather = comm.ring_allgatherv if ring else comm.allgatherv
        blocks = await gather(payload(lengths[comm.rank], comm.rank), lengths, "p", BYTES)
        return [b.tolist() for b in blocks]

    expected = [[rank] * length for rank, length in enumerate(lengths)]
    simulation = simulate(program, world_size)
    assert simulation.results == [expected] * world_size
    rounds = world_size - 1 if ring else (world_size - 1).bit_length()
    for rank, ledger in enumerate(simulation.ledgers):
        traffic = ledger.total()
        assert traffic.messages_sent == traffic.messages_received == rounds
        assert traffic.received == sum(lengths) - lengths[rank]
        assert not ring or traffic.sent <= sum(lengths)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_alltoallv(world_size):
    async def program(comm):
        outgoing = [payload(dest, comm.rank) for dest in range(world_size)]
        arrived = await comm.alltoallv(outgoing, [comm.rank] * world_size, "p", BYTES)
        return [a.tolist() for a in arrived]

    for rank, arrived in enumerate(on_every_rank(program, world_size)):
        assert arrived == [[source] * rank for source in range(world_size)]


# ---- groups in a group ------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_split_makes_groups_that_work_like_worlds(world_size):
    async def program(comm):
        group = await comm.split(comm.rank % 2, key=-comm.rank)
        assert group.ledger is comm.ledger
        before = comm.ledger.total().sent
        total = await group.allreduce(torch.tensor([float(comm.rank)]), "inside")
        assert group.world_size == 1 or comm.ledger.total().sent > before
        members = await group.allgather(torch.tensor([comm.rank]), "members")
        await group.work(1)
        return group.rank, total.item(), [int(m) for m in members]

    for rank, (inside, total, members) in enumerate(on_every_rank(program, world_size)):
        expected = [r for r in reversed(range(world_size)) if r % 2 == rank % 2]
        assert (members, total, members[inside]) == (expected, sum(expected), rank)


@pytest.mark.parametrize("ranks", [[1, 2], [0, 0, 1]])
def test_a_subgroup_holds_its_own_rank_and_nobody_twice(ranks):
    async def program(comm):
        if comm.rank == 0:
            with pytest.raises(ConfigurationError, match="must be distinct and contain rank 0"):
                Subgroup(comm, ranks)

    simulate(program, 3)
