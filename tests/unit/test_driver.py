import inspect
import threading

import pytest
import torch

from sparsync.errors import ConfigurationError, PeerError
from sparsync.transports import driver
from sparsync.transports.driver import Engine, Failure, Finished, Flight, Operation, run, together
from sparsync.transports.ledger import Raw
from sparsync.transports.sim import Links, simulate

RAW = Raw("control")
SECONDS = 10.0  # far more than any of these takes: a hang fails instead of hanging


class Manual(Operation):
    """An operation that a test ends, and that counts the waits for it."""

    def __init__(self):
        self.waits = 0

    def wait(self):
        self.waits += 1
        self.done = True


class Failing(Operation):
    def wait(self):
        raise PeerError("gone")


async def handles(operation):
    """Continue after the operation has failed."""
    try:
        await operation
    except (PeerError, ConfigurationError) as error:
        return f"handled {error}"
    return "no error"


def on_engine(program):
    engine = Engine("test")
    try:
        return engine.submit(program).result(timeout=SECONDS)
    finally:
        engine.close()


def with_another(program):
    return run(together([awaits(Manual()), program]))[1]


def nested_on_engine(program):
    return on_engine(together([awaits(Manual(), Manual()), together([program])]))[1][0]


@pytest.mark.parametrize("drive", [run, on_engine, with_another, nested_on_engine])
def test_a_failure_is_raised_where_it_is_awaited(drive):
    assert drive(handles(Failing())) == "handled gone"


@pytest.mark.parametrize("drive", [run, on_engine, with_another])
def test_a_failure_that_nobody_handles_comes_out(drive):
    with pytest.raises(PeerError, match="gone"):
        drive(awaits(Failing()))


@pytest.mark.parametrize("side_by_side", [False, True])
def test_a_failure_in_the_simulator_is_raised_where_it_is_awaited(side_by_side):
    async def program(comm):
        if comm.rank == 0:
            for tag in range(2):
                payload = torch.zeros(1 + tag, dtype=torch.uint8)
                await comm.channel(tag).isend(payload, 1, "ring", RAW)
            return None
        receives = [handles(comm.channel(tag).irecv(0, 1, "ring", RAW)) for tag in range(2)]
        if side_by_side:
            return await together(receives)
        return [await receive for receive in receives]

    fine, failed = simulate(program, 2).results[1]
    assert fine == "no error" and "posted 1 bytes" in failed


async def awaits(*operations):
    for operation in operations:
        await operation
    return len(operations)


def test_only_the_oldest_is_waited_for():
    first, second, seen = Manual(), Manual(), []
    flight = Flight()
    flight.start(awaits(first), seen.append)
    flight.start(awaits(second), seen.append)
    flight.advance(1.0)
    assert (first.waits, second.waits, len(flight)) == (1, 0, 1)
    flight.advance(1.0)
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
        flight.advance(1.0)
    assert closed == [True] and len(flight) == 0


def test_together_returns_in_the_order_given():
    assert run(together([value(1, Manual(), Manual()), value(2), value(3, Manual())])) == [1, 2, 3]
    assert run(together([])) == []


@pytest.mark.filterwarnings("error")
def test_what_together_did_not_start_is_closed():
    """Otherwise, Python would warn on collection that the coroutine was never awaited."""

    async def failing():
        raise PeerError("gone")

    never = failing()
    with pytest.raises(PeerError):
        run(together([failing(), never]))
    assert inspect.getcoroutinestate(never) == inspect.CORO_CLOSED


async def ring(comm, rounds):
    """Pass a token around; return the last value that arrived."""
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


def test_a_strided_view_of_one_element_is_gathered():
    """Torch considers such a view contiguous, so ``contiguous()`` would keep its stride."""

    async def program(comm):
        return await comm.allgather(torch.full((6, 6), float(comm.rank))[:1, 0], "values")

    assert simulate(program, 3).results == [[torch.tensor([float(r)]) for r in range(3)]] * 3


def test_channels_in_flight_share_the_latency():
    links = Links(alpha=1.0, beta=0.0)

    async def side_by_side(comm):
        await together([ring(comm.channel(tag), 3) for tag in range(4)])

    async def one_by_one(comm):
        for tag in range(4):
            await ring(comm.channel(tag), 3)

    fast, slow = (simulate(p, 3, links=links).seconds for p in (side_by_side, one_by_one))
    assert slow == pytest.approx(12.0) and fast <= slow / 2


@pytest.fixture
def engine():
    engine = Engine("test")
    yield engine
    engine.close()


async def value(x, *operations):
    """Return a value after these operations."""
    await awaits(*operations)
    return x


def test_the_engine_flies_coroutines_and_fences_with_callables(engine):
    seen = []

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


# ---- jobs of the engine ---------------------------------------------------------------------------


def test_callables_run_one_at_a_time_in_the_order_given(engine):
    running, seen = threading.Lock(), []

    def job(number):
        with_nobody_else = running.acquire(blocking=False)
        seen.append(number)
        running.release()
        return with_nobody_else, threading.current_thread().name

    futures = [engine.submit(lambda number=number: job(number)) for number in range(20)]
    assert {f.result(timeout=SECONDS) for f in futures} == {(True, "sparsync-test")}
    assert seen == list(range(20))


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()])
def test_an_error_reaches_its_future_and_the_next_job_runs(engine, error):
    def fail():
        raise error

    failed, fine = engine.submit(fail), engine.submit(lambda: 1)
    assert failed.exception(timeout=SECONDS) is error
    assert fine.result(timeout=SECONDS) == 1


def test_a_coroutine_that_returns_a_failure_fails_alone(engine):
    error = ValueError("broken")
    futures = [engine.submit(value(x, Manual())) for x in (0, Failure(error), 2)]
    assert [f.exception(timeout=SECONDS) for f in futures] == [None, error, None]
    assert [futures[0].result(), futures[2].result()] == [0, 2]


def test_a_queued_job_cannot_be_withdrawn(engine):
    go = threading.Event()
    engine.submit(lambda: go.wait(SECONDS))
    flying = [engine.submit(value(x, Manual())) for x in range(2)]
    jobs = [*flying, engine.submit(lambda: 2)]
    assert [job.cancel() for job in jobs] == [False] * 3
    go.set()
    assert [job.result(timeout=SECONDS) for job in jobs] == [0, 1, 2]


def test_an_engine_looks_at_few_coroutines_at_a_time(engine, monkeypatch):
    monkeypatch.setattr(driver, "_MOST", 3)
    queued, flying, most = threading.Event(), 0, []

    async def program():
        nonlocal flying
        flying += 1
        most.append(flying)
        await Manual()
        flying -= 1

    engine.submit(lambda: queued.wait(SECONDS))
    futures = [engine.submit(program()) for _ in range(10)]
    queued.set()
    for future in futures:
        future.result(timeout=SECONDS)
    assert max(most) == 3


def test_close_finishes_what_is_queued(engine):
    release = threading.Event()
    engine.submit(release.wait)
    last = engine.submit(lambda: "done")
    release.set()
    engine.close()
    assert last.done() and last.result() == "done"
    assert not engine._thread.is_alive()


def test_a_closed_engine_refuses_jobs(engine):
    engine.close()
    with pytest.raises(ConfigurationError, match="closed"):
        engine.submit(lambda: None)


class Waits:
    """A communicator in which a job waits until it is aborted."""

    def __init__(self):
        self.released, self.said = threading.Event(), []

    def abort(self):
        self.said.append("abort")
        self.released.set()

    def close(self):
        self.said.append("close")


def test_an_engine_that_is_dropped_aborts_what_its_job_waits_in_then_joins_then_closes():
    comm, begun = Waits(), threading.Event()
    engine = Engine("test", [comm])

    def job():
        begun.set()
        assert comm.released.wait(SECONDS)
        comm.said.append("left")

    engine.submit(job)
    later, thread = engine.submit(lambda: "never"), engine._thread
    assert begun.wait(SECONDS)
    del engine
    assert comm.said == ["abort", "left", "close"]
    assert not thread.is_alive()
    with pytest.raises(ConfigurationError, match="was ended"):
        later.result(timeout=SECONDS)


def test_an_engine_without_work_that_is_dropped_aborts_nothing():
    comm = Waits()
    engine = Engine("test", [comm])
    engine.submit(lambda: None).result(timeout=SECONDS)
    thread = engine._thread
    del engine
    assert not thread.is_alive() and not comm.said


def test_an_engine_that_a_job_drops_last_is_not_busy_there():
    """The job's resources can therefore be closed on the same thread."""
    engine, seen = Engine("test"), []
    assert engine.busy

    def job(engine=engine):
        engine.end()
        seen.extend([engine.busy, engine.running])

    future, thread = engine.submit(job), engine._thread
    future.result(timeout=SECONDS)
    thread.join(SECONDS)
    assert seen == [False, True] and not thread.is_alive() and not engine.busy


def test_close_ends_what_lasts_longer_than_its_patience():
    comm = Waits()
    engine = Engine("test", [comm])
    future = engine.submit(lambda: comm.released.wait(SECONDS))
    engine.close(patience=0.05)
    assert future.result(timeout=SECONDS) and comm.said == ["abort", "close"]


def test_coroutines_in_flight_end_with_their_engine(engine):
    begun = threading.Event()

    class Never(Manual):
        def poll(self, seconds):
            return False

    async def program():
        begun.set()
        await Never()

    future = engine.submit(program())
    assert begun.wait(SECONDS)
    engine.end()
    with pytest.raises(ConfigurationError, match="was ended"):
        future.result(timeout=SECONDS)
