"""Every collective of the ``Communicator``, for any world size, and groups in a group."""

import pytest
import torch

from sparsync import ConfigurationError, simulate
from sparsync.transports.groups import Subgroup
from sparsync.transports.ledger import Raw

WORLD_SIZES = range(1, 10)
BYTES = Raw("value")


def payload(nbytes: int, fill: int = 0) -> torch.Tensor:
    return torch.full((nbytes,), fill, dtype=torch.uint8)


def on_every_rank(program, world_size):
    return simulate(program, world_size).results


@pytest.mark.parametrize("shape", [(), (3, 2), (2, 0, 3), (1, 2, 3)])
def test_allreduce_keeps_the_shape(shape):
    async def program(comm):
        mine = torch.ones(shape) * (comm.rank + 1)
        turned = mine.T if mine.dim() == 2 else mine  # not contiguous
        total = await comm.allreduce(turned, "p")
        assert bool((mine == comm.rank + 1).all())
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
        assert traffic.sent_parts.value == traffic.sent


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("ring", [False, True])
def test_allgatherv(world_size, ring):
    lengths = [(5 * rank) % 4 for rank in range(world_size)]

    async def program(comm):
        mine = payload(lengths[comm.rank], comm.rank)
        blocks = await comm.allgatherv(mine, lengths, "p", BYTES, ring=ring)
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


# ---- groups in a group ------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [[1, 2], [0, 0, 1]])
def test_a_subgroup_holds_its_own_rank_and_nobody_twice(ranks):
    async def program(comm):
        if comm.rank == 0:
            with pytest.raises(ConfigurationError, match="must be distinct and contain rank 0"):
                Subgroup(comm, ranks)

    simulate(program, 3)
