import pytest
import torch

from sparsync import ConfigurationError, simulate
from sparsync.errors import DeadlockError
from sparsync.transports.driver import run
from sparsync.transports.ledger import Raw
from sparsync.transports.sim import Links

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


# ---- what goes wrong is said, not waited for --------------------------------------------------------


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
