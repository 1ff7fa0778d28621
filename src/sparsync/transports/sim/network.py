"""The simulated network: virtual ranks as coroutines on one event queue, under a virtual clock.

A message of L bytes from s to d:  leaves when the port of s is free and occupies it for ``beta L``;
reaches d ``alpha`` later;  enters when the receiving port of d is free and occupies it for
``beta L``.  Ports serve in order of arrival.  The send is done when the message is in.  Everything
is deterministic: equal times are served in the order of scheduling.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, final

from torch import Tensor

from sparsync.errors import ConfigurationError, DeadlockError
from sparsync.transports.base import Operation

__all__ = ["Links", "Network", "SimOperation"]

T = TypeVar("T")


@dataclass(frozen=True)
class Links:
    """What the network costs.

    Attributes:
        alpha: latency in seconds per message.
        beta: seconds per byte, on each port.
        gamma: seconds per byte reduced.
    """

    alpha: float = 50e-6  # ours: a switched Ethernet hop with the kernel's network stack
    beta: float = 8e-9  # 1 Gbit/s
    gamma: float = 0.0

    def __post_init__(self) -> None:
        for name in ("alpha", "beta", "gamma"):
            if not getattr(self, name) >= 0:
                raise ConfigurationError(
                    f"Links: {name} is {getattr(self, name)}; give seconds >= 0"
                )


@final
class SimOperation(Operation):
    """An operation that the event queue completes."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.waiter: int | None = None

    def wait(self) -> None:
        """Blocking is impossible inside the simulator: its coroutines await."""
        raise ConfigurationError(
            "a simulated communicator cannot block: write an async function and pass it to "
            "sparsync.simulate(function, world_size=...)"
        )


_Link = tuple[int, int, int]  # source, dest, tag


@dataclass
class _Post:
    """A receive that has been posted."""

    operation: SimOperation
    capacity: int


class Network(Generic[T]):
    """The event queue, the ports and the mailboxes of one simulated group."""

    def __init__(self, world_size: int, links: Links) -> None:
        self.world_size, self.links = world_size, links
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self._ready: deque[int] = deque()
        self._send_port_free = [0.0] * world_size
        self._receive_port_free = [0.0] * world_size
        self._mail: dict[_Link, deque[Tensor]] = {}
        self._posts: dict[_Link, deque[_Post]] = {}

    # ---- the calls of a SimCommunicator ----------------------------------------------------------

    def send(
        self, source: int, dest: int, payload: Tensor, phase: str, tag: int = 0
    ) -> SimOperation:
        """Put a copy of ``payload`` on its way."""
        operation = SimOperation(f"send to rank {dest} in phase '{phase}'")
        occupied = self.links.beta * payload.numel()
        leave = max(self.now, self._send_port_free[source])
        self._send_port_free[source] = leave + occupied
        link = source, dest, tag
        copy = payload.clone()  # the sender may change its buffer once the operation is done

        def arrive() -> None:
            enter = max(self.now, self._receive_port_free[dest])
            self._receive_port_free[dest] = enter + occupied
            self._at(enter + occupied, lambda: self._deliver(link, copy, operation))

        self._at(leave + self.links.alpha, arrive)
        return operation

    def receive(
        self, source: int, dest: int, capacity: int, phase: str, tag: int = 0
    ) -> SimOperation:
        """Post a receive; messages between two ranks on one channel match in the order sent."""
        operation = SimOperation(f"message from rank {source} in phase '{phase}'")
        link = source, dest, tag
        self._posts.setdefault(link, deque()).append(_Post(operation, capacity))
        self._match(link)
        return operation

    def delay(self, seconds: float, what: str) -> SimOperation:
        """Complete after ``seconds`` of virtual time."""
        operation = SimOperation(what)
        self._at(self.now + seconds, lambda: self._complete(operation, None))
        return operation

    # ---- the event loop --------------------------------------------------------------------------

    def run(self, programs: Sequence[Coroutine[Operation, None, T]]) -> list[T]:
        """Run one coroutine per rank to its end; return their results in rank order."""
        results: dict[int, T] = {}
        waiting: dict[int, SimOperation] = {}
        self._ready.extend(range(len(programs)))
        try:
            while len(results) < len(programs):
                while self._ready:
                    rank = self._ready.popleft()
                    waiting.pop(rank, None)
                    try:
                        operation: Any = programs[rank].send(None)
                    except StopIteration as stop:
                        results[rank] = stop.value
                        continue
                    if not isinstance(operation, SimOperation):
                        raise ConfigurationError(
                            f"rank {rank} awaits {type(operation).__name__}; a simulated program "
                            "awaits nothing but calls of its communicator"
                        )
                    operation.waiter = rank
                    waiting[rank] = operation
                if len(results) == len(programs):
                    break
                if not self._events:
                    raise DeadlockError(_who_waits(waiting))
                self.now, _, event = heapq.heappop(self._events)
                event()
        finally:
            for program in programs:
                program.close()
        return [results[rank] for rank in range(len(programs))]

    def _at(self, time: float, event: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._events, (time, self._sequence, event))

    def _deliver(self, link: _Link, payload: Tensor, sent: SimOperation) -> None:
        self._complete(sent, None)
        self._mail.setdefault(link, deque()).append(payload)
        self._match(link)

    def _match(self, link: _Link) -> None:
        mail = self._mail.get(link)
        posts = self._posts.get(link)
        while mail and posts:
            payload, post = mail.popleft(), posts.popleft()
            if payload.numel() > post.capacity:
                raise ConfigurationError(
                    f"rank {link[1]} posted {post.capacity} bytes for a {post.operation.what}, "
                    f"which has {payload.numel()} bytes"
                )
            self._complete(post.operation, payload)

    def _complete(self, operation: SimOperation, result: Tensor | None) -> None:
        operation.done, operation.result = True, result
        if operation.waiter is not None:
            self._ready.append(operation.waiter)


def _who_waits(waiting: dict[int, SimOperation]) -> str:
    """Say which rank waits for what (at most eight of them)."""
    lines = [f"rank {rank} waits for {waiting[rank].what}" for rank in sorted(waiting)[:8]]
    more = len(waiting) - len(lines)
    return "; ".join(lines) + (f"; and {more} more" if more else "")
