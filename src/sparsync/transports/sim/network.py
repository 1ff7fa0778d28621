"""The simulated network: virtual ranks as coroutines on one event queue, under a virtual clock.

A message of L bytes from s to d:  leaves when the port of s is free and occupies it for ``beta L``;
reaches d ``alpha`` later;  enters when the receiving port of d is free and occupies it for
``beta L``.  Ports serve in order of arrival.  The send is done when the message is in.  Everything
is deterministic: equal times are served in the order of scheduling.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, final

from torch import Tensor

from sparsync.errors import ConfigurationError, DeadlockError
from sparsync.transports.base import Operation

__all__ = ["Fault", "Links", "Network", "SimOperation"]

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


@dataclass(frozen=True)
class Fault:
    """A rank that stands still: it neither computes nor answers; what is sent to it waits.

    Attributes:
        rank: which one.
        start: virtual seconds.
        end: virtual seconds; infinity: it is dead, what is sent to it is lost, its result is None.
    """

    rank: int
    start: float
    end: float = math.inf


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

    def __init__(self, world_size: int, links: Links, faults: Sequence[Fault] = ()) -> None:
        self.world_size, self.links, self.faults = world_size, links, list(faults)
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self._ready: deque[int] = deque()
        self._send_port_free = [0.0] * world_size
        self._receive_port_free = [0.0] * world_size
        self._mail: dict[_Link, deque[Tensor]] = {}
        self._posts: dict[_Link, deque[_Post]] = {}
        self._served: dict[tuple[int, int], Callable[[int, Tensor], None]] = {}

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
        self._at(self.now + seconds, lambda: self.complete(operation))
        return operation

    def serve(self, rank: int, tag: int, callback: Callable[[int, Tensor], None]) -> None:
        """Call back with source and payload for every message to a rank on a channel."""
        self._served[rank, tag] = callback

    def at(self, rank: int, time: float, event: Callable[[], None]) -> None:
        """Do something on a rank at a time, or when the rank can again."""

        def happen() -> None:
            until = self._frozen_until(rank)
            if until is None:
                event()
            elif until < math.inf:
                self._at(until, event)

        self._at(time, happen)

    # ---- the event loop --------------------------------------------------------------------------

    def run(self, programs: Sequence[Coroutine[Operation, None, T]]) -> list[T]:
        """Run one coroutine per rank to its end; return their results in rank order."""
        results: dict[int, T] = {}
        waiting: dict[int, SimOperation] = {}
        self._ready.extend(range(len(programs)))
        for fault in self.faults:
            if fault.end == math.inf:
                self._at(fault.start, lambda rank=fault.rank: self._ready.append(rank))  # type: ignore[misc]
        try:
            while len(results) < len(programs):
                while self._ready:
                    rank = self._ready.popleft()
                    until = self._frozen_until(rank)
                    if until is not None:
                        self._stand_still(rank, until, results)
                        continue
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

    def _frozen_until(self, rank: int) -> float | None:
        for fault in self.faults:
            if fault.rank == rank and fault.start <= self.now < fault.end:
                return fault.end
        return None

    def _stand_still(self, rank: int, until: float, results: dict[int, Any]) -> None:
        if until == math.inf:
            results[rank] = None
        else:
            self._at(until, lambda: self._ready.append(rank))

    def _at(self, time: float, event: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._events, (time, self._sequence, event))

    def _deliver(self, link: _Link, payload: Tensor, sent: SimOperation) -> None:
        source, dest, tag = link
        until = self._frozen_until(dest)
        if until is not None and until < math.inf:
            self._at(until, lambda: self._deliver(link, payload, sent))
            return
        self.complete(sent)
        if until is not None:
            return
        if (dest, tag) in self._served:
            self._served[dest, tag](source, payload)
            return
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
            self.complete(post.operation, payload)

    def complete(self, operation: SimOperation, result: Tensor | None = None) -> None:
        """End an operation; who awaits it goes on."""
        operation.done, operation.result = True, result
        if operation.waiter is not None:
            self._ready.append(operation.waiter)


def _who_waits(waiting: dict[int, SimOperation]) -> str:
    """Say which rank waits for what (at most eight of them)."""
    lines = [f"rank {rank} waits for {waiting[rank].what}" for rank in sorted(waiting)[:8]]
    more = len(waiting) - len(lines)
    return "; ".join(lines) + (f"; and {more} more" if more else "")
