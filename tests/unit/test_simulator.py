"""Compare the simulator's clock, networks, ports, work, primitives and groups with its docs."""

import pytest
import torch

from sparsync import ConfigurationError, simulate
from sparsync.errors import DeadlockError
from sparsync.transports import communicator
from sparsync.transports.driver import run
from sparsync.transports.groups import Subgroup
from sparsync.transports.ledger import Raw
from sparsync.transports.sim import Links, Prices, Route, Topology, TwoLevel, Weight
from tests.tables import refuses

LINKS = Links(alpha=1.0, beta=0.5, gamma=0.25)
BYTES = Raw("value")


def payload(nbytes: int, fill: int = 0) -> torch.Tensor:
    return torch.full((nbytes,), fill, dtype=torch.uint8)


# ---- the clock: what is documented in sim/network.py ------------------------------------------------


def test_one_message_takes_alpha_plus_beta_per_byte():
    async def program(comm):
        if comm.rank == 0:
            await comm.isend(payload(10), 1, "p", BYTES)
        else:
            await comm.irecv(0, 10, "p", BYTES)
        return comm.now

    simulation = simulate(program, 2, links=LINKS)
    assert simulation.results == [1.0 + 5.0, 1.0 + 5.0]
    assert simulation.seconds == 6.0


def test_a_receiver_takes_one_message_after_the_other():
    async def program(comm):
        if comm.rank:
            await comm.isend(payload(10), 0, "p", BYTES)
        else:
            for source in (1, 2, 3):
                await comm.irecv(source, 10, "p", BYTES)
        return comm.now

    assert simulate(program, 4, links=LINKS).results == [16.0, 6.0, 11.0, 16.0]


def test_computation_and_reduction_take_their_time():
    async def program(comm):
        await comm.compute(2.0)
        await comm.work(8)
        return comm.now

    assert simulate(program, 2, links=LINKS).results == [4.0, 4.0]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_a_barrier_ends_after_the_last_rank_has_come(world_size):
    async def program(comm):
        await comm.compute(3.0 * comm.rank)
        await comm.barrier()
        return comm.now

    rounds, links = (world_size - 1).bit_length(), Links(alpha=1.0, beta=0.0)
    ends = simulate(program, world_size, links=links).results
    last = 3.0 * (world_size - 1)
    assert min(ends) >= last and max(ends) == last + rounds


def test_a_buffer_may_be_reused_once_its_send_is_done():
    async def program(comm):
        if comm.rank == 0:
            buffer = payload(2, fill=1)
            await comm.isend(buffer, 1, "p", BYTES)
            buffer.fill_(9)
            return None
        await comm.compute(1000.0)
        return (await comm.irecv(0, 2, "p", BYTES)).tolist()

    assert simulate(program, 2, links=LINKS).results[1] == [1, 1]


# ---- errors are raised at once --------------------------------------------------------


def test_a_deadlock_names_who_waits_for_whom_in_which_phase():
    async def program(comm):
        if comm.rank == 1:
            return
        await comm.irecv((comm.rank + 1) % 3, 8, f"phase {comm.rank}", BYTES)

    with pytest.raises(DeadlockError) as caught:
        simulate(program, 3)
    assert str(caught.value) == (
        "rank 0 waits for message from rank 1 in phase 'phase 0'; "
        "rank 2 waits for message from rank 0 in phase 'phase 2'"
    )


def test_a_deadlock_of_many_is_told_in_short():
    async def program(comm):
        await comm.irecv((comm.rank + 1) % comm.world_size, 8, "p", BYTES)

    with pytest.raises(DeadlockError, match=r"rank 7 waits .* and 2 more$"):
        simulate(program, 10)


def test_an_error_in_one_rank_ends_the_run():
    async def program(comm):
        if comm.rank == 1:
            raise KeyError("mine")
        await comm.barrier()

    with pytest.raises(KeyError, match="mine"):
        simulate(program, 3)


@pytest.mark.parametrize("peer", [-1, 2, 5])
def test_a_rank_talks_to_other_ranks_only(peer):
    async def program(comm):
        if comm.rank == 0:
            with pytest.raises(ConfigurationError, match=rf"rank 0 cannot send to rank {peer}"):
                comm.isend(payload(1), peer, "p", BYTES)
            with pytest.raises(ConfigurationError, match="cannot receive from rank 0"):
                comm.irecv(0, 1, "p", BYTES)

    simulate(program, 2)


def test_blocking_on_a_simulated_rank_says_what_to_do():
    async def program(comm):
        run(comm.barrier())

    with pytest.raises(ConfigurationError, match=r"pass it to sparsync\.simulate"):
        simulate(program, 2)


@pytest.mark.parametrize("name", ["alpha", "beta", "gamma"])
@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_links_cannot_be_negative(name, value):
    with pytest.raises(ConfigurationError, match=f"{name} is {value}"):
        Links(**{name: value})


def test_a_world_needs_a_rank():
    with pytest.raises(ConfigurationError, match="world_size is 0"):
        simulate(lambda comm: None, 0)


def test_time_cannot_go_backwards():
    async def program(comm):
        await comm.compute(-1.0)

    with pytest.raises(ConfigurationError, match="seconds >= 0"):
        simulate(program, 1)


OUTER = Links(alpha=1.0, beta=0.5)
INNER = Links(alpha=0.25, beta=0.125)


async def all_to_one(comm):
    """Send 10 bytes from every rank to rank 0; return the time at which this rank has finished."""
    if comm.rank:
        await comm.isend(payload(10), 0, "p", BYTES)
    else:
        for source in range(1, comm.world_size):
            await comm.irecv(source, 10, "p", BYTES)
    return comm.now


def test_unlimited_ports_let_all_in_at_once():
    links = Links(alpha=1.0, beta=0.5, ports="unlimited")
    assert simulate(all_to_one, 4, links=links).results == [6.0] * 4


def test_unlimited_ports_keep_the_order_of_a_channel():
    async def program(comm):
        if comm.rank == 0:
            for operation in [comm.isend(payload(n), 1, "p", BYTES) for n in (10, 2)]:
                await operation
            return None
        return [(await comm.irecv(0, 10, "p", BYTES)).numel() for _ in range(2)], comm.now

    links = Links(alpha=1.0, beta=0.5, ports="unlimited")
    assert simulate(program, 2, links=links).results[1] == ([10, 2], 6.0)


def test_every_pair_may_have_a_link_of_its_own():
    class Uneven(Topology):
        def route(self, source, dest):
            return Route(*((2.0, 1.0) if source == 2 else (1.0, 0.5)), source, dest)

    assert simulate(all_to_one, 3, links=Uneven()).results == [16.0, 6.0, 16.0]


def test_the_ranks_of_a_node_share_its_card_and_not_their_inner_links():
    async def program(comm):  # ranks 0, 1 | 2, 3
        outward = comm.isend(payload(10), (comm.rank + 2) % 4, "outward", BYTES)
        inward = comm.isend(payload(8), comm.rank ^ 1, "inward", BYTES)
        await comm.irecv(comm.rank ^ 1, 8, "inward", BYTES)
        met = comm.now
        await comm.irecv((comm.rank + 2) % 4, 10, "outward", BYTES)
        await outward, await inward
        return met, comm.now

    simulation = simulate(program, 4, links=TwoLevel(2, INNER, OUTER))
    # the second rank of a node leaves 5 s after the first
    assert simulation.results == [(1.25, 6.0), (1.25, 11.0)] * 2
    card = simulation.sending["node 0"].phases["outward"]
    assert (card.messages, card.nbytes, card.seconds) == (2, 20, 10.0)
    assert simulation.receiving[0].phases["inward"].nbytes == 8
    assert "outward" not in simulation.sending[0].phases


def test_work_delays_what_a_rank_does_next_and_nothing_else():
    async def program(comm):
        if comm.rank == 0:
            comm.charge("select", 4.0)
            await comm.isend(payload(10), 1, "p", BYTES)
        else:
            await comm.irecv(0, 10, "p", BYTES)
        return comm.now, dict(comm.ledger.stages)

    assert simulate(program, 2, links=OUTER).results == [(10.0, {"select": 4.0}), (10.0, {})]


def test_work_at_the_end_counts():
    async def program(comm):
        comm.charge("select", 3.0)

    assert simulate(program, 2).seconds == 3.0


def test_what_a_coroutine_works_beside_a_computation_prolongs_that():
    async def exchange(comm):
        await comm.irecv(1, 10, "p", BYTES)  # there at 6
        comm.charge("unpack", 3.0)

    async def program(comm):
        if comm.rank:
            await comm.isend(payload(10), 0, "p", BYTES)
            return None
        beside = comm.spawn(exchange(comm))
        await comm.compute(8.0)
        computed = comm.now
        await beside
        return computed

    simulation = simulate(program, 2, links=OUTER)
    assert simulation.results[0] == 11.0 == simulation.seconds


def test_entries_cost_who_packs_them_and_everyone_who_receives_them():
    prices = Prices(lambda message, framing: Weight(message.numel(), 2), encode=10.0, decode=1.0)

    async def program(comm):
        await comm.allgatherv(payload(4), [4] * 4, "p", BYTES)
        return comm.ledger.stages["pack"], comm.ledger.stages["unpack"]

    # each rank packs once, although it forwards others' messages; each of two rounds brings a
    # message
    simulation = simulate(program, 4, links=Links(0.0, 0.0), prices=prices)
    assert simulation.results == [(20.0, 4.0)] * 4
    assert simulation.seconds == 24.0


def test_one_message_to_all_is_packed_once():
    prices = Prices(lambda message, framing: Weight(message.numel(), 1), encode=10.0)

    async def program(comm):
        same = payload(4)
        await comm.alltoallv([same] * 3, [4] * 3, "same", BYTES)
        await comm.alltoallv([payload(4) for _ in range(3)], [4] * 3, "own", BYTES)
        return comm.ledger.stages["pack"]

    assert simulate(program, 3, prices=prices).results == [30.0] * 3


@refuses(
    (lambda: Links(ports="two"), "ports is 'two'; choose single"),
    (lambda: TwoLevel(0), "ranks_per_node is 0; give at least 1"),
)
def test_bad_networks_are_refused(make):
    make()


WORLD_SIZES = range(1, 10)


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


@pytest.mark.parametrize("size", [1, 24, 25, 35])
@pytest.mark.parametrize("world_size", [1, 3, 4, 7])
def test_allreduce_in_pieces_is_that_in_one_bit_for_bit(size, world_size, monkeypatch):
    async def program(comm):
        mine = torch.randn(size, generator=torch.Generator().manual_seed(comm.rank))
        return await comm.allreduce(mine, "p")

    whole = simulate(program, world_size)
    monkeypatch.setattr(communicator, "_PIECE", 2 * 4 * world_size)  # columns of 4 bytes
    pieces = simulate(program, world_size)
    assert all(torch.equal(a, b) for a, b in zip(whole.results, pieces.results, strict=True))
    ends = whole.ledgers[0].total(), pieces.ledgers[0].total()
    assert ends[0].sent == ends[1].sent
    columns = -(-size // world_size)
    assert ends[0].messages_sent * -(-columns // 2) == ends[1].messages_sent


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_no_rank_of_a_ring_sends_more_than_there_is(world_size):
    lengths = [(5 * rank) % 4 for rank in range(world_size)]

    async def program(comm):
        await comm.allgatherv(payload(lengths[comm.rank]), lengths, "p", BYTES, ring=True)

    for rank, ledger in enumerate(simulate(program, world_size).ledgers):
        traffic = ledger.total()
        assert traffic.messages_sent == traffic.messages_received == world_size - 1
        assert traffic.received == sum(lengths) - lengths[rank]
        assert traffic.sent <= sum(lengths)


# ---- groups in a group ------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [[1, 2], [0, 0, 1]])
def test_a_subgroup_holds_its_own_rank_and_nobody_twice(ranks):
    async def program(comm):
        if comm.rank == 0:
            with pytest.raises(ConfigurationError, match="must be distinct and contain rank 0"):
                Subgroup(comm, ranks)

    simulate(program, 3)
