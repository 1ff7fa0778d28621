import pytest
import torch

from sparsync.errors import PeerError
from sparsync.transports.base import Finished, Operation, run
from sparsync.transports.engine import Engine
from sparsync.transports.flight import Flight, together
from sparsync.transports.framing import Raw
from sparsync.transports.sim import Links, simulate

RAW = Raw("control")
SECONDS = 10.0


class Manual(Operation):
    """Done when a test says so; counts how often it was waited for."""

    def __init__(self):
        self.waits = 0

    def wait(self):
        self.waits += 1
        self.done = True


class Failing(Operation):
    def wait(self):
        raise PeerError("gone")


async def awaits(*operations):
    for operation in operations:
        await operation
    return len(operations)


def test_only_the_oldest_is_waited_for():
    first, second, seen = Manual(), Manual(), []
    flight = Flight()
    flight.start(awaits(first), seen.append)
    flight.start(awaits(second), seen.append)
    flight.wait(1.0)
    assert (first.waits, second.waits, len(flight)) == (1, 0, 1)
    flight.wait(1.0)
    assert (second.waits, seen, len(flight)) == (1, [1, 1], 0)


def test_a_younger_member_goes_on_when_its_operation_is_done():
    first, second, seen = Manual(), Manual(), []
    flight = Flight()
    flight.start(awaits(first), seen.append)
    flight.start(awaits(second, Finished()), seen.append)
    second.done = True
    flight.advance()
    assert seen == [2] and len(flight) == 1
    flight.close()


def test_an_error_closes_the_others():
    closed = []

    async def watched():
        try:
            await Manual()
        finally:
            closed.append(True)

    flight = Flight()
    flight.start(awaits(Failing()), closed.append)
    flight.start(watched(), closed.append)
    with pytest.raises(PeerError):
        flight.wait(1.0)
    assert closed == [True] and len(flight) == 0


def test_together_returns_in_the_order_given():
    async def value(x, *operations):
        await awaits(*operations)
        return x

    assert run(together([value(1, Manual(), Manual()), value(2), value(3, Manual())])) == [1, 2, 3]
    assert run(together([])) == []


def test_together_raises_what_a_member_raises():
    async def broken():
        await Manual()
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        run(together([awaits(Manual()), broken()]))


async def ring(comm, rounds):
    """Pass a token around; returns what arrived last."""
    token = torch.tensor([comm.rank], dtype=torch.uint8)
    for _ in range(rounds):
        receiving = comm.irecv((comm.rank - 1) % comm.world_size, 1, "ring", RAW)
        sending = comm.isend(token, (comm.rank + 1) % comm.world_size, "ring", RAW)
        token = await receiving
        await sending
    return int(token)


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_channels_do_not_mix(world_size):
    async def program(comm):
        return await together([ring(comm.channel(tag), tag + 1) for tag in range(4)])

    for rank, results in enumerate(simulate(program, world_size).results):
        assert results == [(rank - rounds) % world_size for rounds in range(1, 5)]


def test_channels_in_flight_share_the_latency():
    links = Links(alpha=1.0, beta=0.0)

    async def side_by_side(comm):
        await together([ring(comm.channel(tag), 3) for tag in range(4)])

    async def one_by_one(comm):
        for tag in range(4):
            await ring(comm.channel(tag), 3)

    fast, slow = (simulate(p, 3, links=links).seconds for p in (side_by_side, one_by_one))
    assert slow == pytest.approx(12.0) and fast <= slow / 2


def test_the_engine_flies_coroutines_and_fences_with_callables():
    engine, seen = Engine("test"), []

    async def program(x):
        await Manual()
        seen.append(x)
        return x

    flying = [engine.submit(program(x)) for x in range(5)]
    fence = engine.submit(lambda: list(seen))
    late = engine.submit(program(9))
    assert [f.result(timeout=SECONDS) for f in flying] == list(range(5))
    assert fence.result(timeout=SECONDS) == list(range(5))
    assert late.result(timeout=SECONDS) == 9
    engine.close()


def test_an_engine_error_reaches_all_in_flight_and_the_next_flight_is_fine():
    engine = Engine("test")
    engine.submit(lambda: None).result(timeout=SECONDS)

    async def later():
        await Manual()
        return 1

    async def both():
        await Failing()

    failed = engine.submit(both())
    assert isinstance(failed.exception(timeout=SECONDS), PeerError)
    assert engine.submit(later()).result(timeout=SECONDS) == 1
    engine.close()
