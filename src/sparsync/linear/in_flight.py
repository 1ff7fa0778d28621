"""Exchanges under way: started in order, awaited in order, so many steps late and never later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Protocol, final

from sparsync.collectives.base import Collective, Reduced
from sparsync.errors import ConfigurationError
from sparsync.sparse import Vector
from sparsync.transports.base import Communicator, Operation
from sparsync.transports.flight import Flight

__all__ = ["Background", "InFlight"]


class Background(Protocol):
    """What runs exchanges while the rank computes: ``transports.engine.Engine``."""

    def submit(self, job: Coroutine[Operation, None, Reduced]) -> Future[Reduced]:
        """Queue an exchange; the future has its result."""


@final
class InFlight:
    """The exchanges of one rank, at most ``staleness + 1`` at once, each on a channel of its own.

    Args:
        comm: the group; while exchanges are under way, nobody else may use it.
        make_collective: builds what sums; called once per channel.
        staleness: how many exchanges stay under way when a step ends.
        background: runs them beside the computation; None: they advance only while this rank waits
            for the oldest (always so in the simulator, whose clock charges no computation).

    State: the exchanges, and that of the collectives.

    Example:
        >>> import torch
        >>> from sparsync import simulate
        >>> from sparsync.collectives import Dense
        >>> from sparsync.sparse import DenseVector
        >>> async def program(comm):
        ...     flight = InFlight(comm, Dense, staleness=1)
        ...     for step in range(2):
        ...         flight.start(DenseVector(torch.full((2,), float(step))), step)
        ...     return [(await flight.oldest()).total.values.tolist() for _ in range(2)]
        >>> simulate(program, world_size=3).results[0]
        [[0.0, 0.0], [3.0, 3.0]]
    """

    def __init__(
        self,
        comm: Communicator,
        make_collective: Callable[[], Collective],
        staleness: int = 0,
        background: Background | None = None,
    ) -> None:
        if staleness < 0:
            raise ConfigurationError(f"staleness is {staleness}; give a number of steps >= 0")
        self.staleness, self.background = staleness, background
        self._channels = [comm.channel(comm.tag + i) for i in range(staleness + 1)]
        self._collectives = [make_collective() for _ in self._channels]
        self._flight = Flight()
        self._pending: deque[Future[Reduced]] = deque()

    def __len__(self) -> int:
        return len(self._pending)

    def start(self, vector: Vector, step: int, k: int | None = None) -> None:
        """Send a vector on its way; ``k`` as in ``Collective.reduce``, default: its size."""
        assert len(self) <= self.staleness, "await the oldest first"
        slot = step % (self.staleness + 1)
        k = vector.size if k is None else k
        program: Coroutine[Any, None, Reduced]
        program = self._collectives[slot].reduce(self._channels[slot], vector, k, step)
        if self.background is not None:
            self._pending.append(self.background.submit(program))
            return
        future: Future[Reduced] = Future()
        self._pending.append(future)
        self._flight.start(program, future.set_result)

    async def oldest(self) -> Reduced:
        """Return the oldest exchange's result when it is there."""
        future = self._pending.popleft()
        if self.background is not None:
            await _Arrival(future)
        while not future.done():
            await self._flight.oldest
            self._flight.advance()
        return future.result()


@final
class _Arrival(Operation):
    """The end of an exchange in the background."""

    def __init__(self, future: Future[Reduced]) -> None:
        self.future, self.done = future, future.done()

    def wait(self) -> None:
        """Wait for it; its own waits have deadlines."""
        self.future.exception()
        self.done = True
