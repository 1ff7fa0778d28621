"""The simulated network: virtual ranks as coroutines on one event queue, under a virtual clock.

A message of L bytes from s to d leaves when the sending port of s is free, and occupies it for ``beta
L``.  It reaches d ``alpha`` later.  When the receiving port of d is free, the message enters, and
occupies that port for ``beta L``.  Ports serve messages in order of arrival.  A send is done when the
whole message has entered.  Runs are deterministic: events at equal times are served in the order in
which they were scheduled.

A rank has one processor.  Work charged to a rank begins immediately, and the rank continues when the
work is done.  In the meantime, arriving messages still use its ports.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

from sparsync.errors import ConfigurationError, DeadlockError
from sparsync.transports.driver import Operation, Task
from sparsync.transports.sim.topology import PortName, Topology

__all__ = [
    "Fault",
    "Message",
    "Network",
    "Port",
    "RankTask",
    "SimOperation",
    "Usage",
    "Weight",
]

T = TypeVar("T")
Link = tuple[int, int, int]  # source, dest, tag


class Weight(NamedTuple):
    """The size of a message: on the network, and for the work of packing it."""

    nbytes: float  # on the ports: the payload's length, unless the payload stands for more
    entries: float = 0.0  # packed before sending and unpacked after receiving


class SimOperation(Operation):
    """An operation completed by the event queue."""

    def __init__(self, verb: str, peer: int | None = None, phase: str = "") -> None:
        self.verb, self.peer, self.phase = verb, peer, phase
        self.waiter: RankTask | None = None  # the coroutine to resume when this is done
        self.entries = 0.0
        self.error: Exception | None = None

    def end(self, result: Any) -> None:
        """Mark as done, with a result."""
        self.done, self.result = True, result

    def poll(self, seconds: float) -> bool:
        """Check without waiting, because virtual time passes only while no coroutine runs."""
        if self.error is not None:
            raise self.error
        return self.done

    @property
    def what(self) -> str:
        """A description of the operation, for the error raised on a deadlock."""
        return (
            self.verb if self.peer is None else f"{self.verb} {self.peer} in phase '{self.phase}'"
        )

    def wait(self) -> None:
        """Refuse: in the simulator, coroutines await, and nothing may block."""
        raise ConfigurationError(
            "a simulated communicator cannot block: write an async function and pass it to "
            "sparsync.simulate(function, world_size=...)"
        )


@dataclass(slots=True, eq=False)
class Message:
    """A message in flight."""

    link: Link
    payload: Tensor
    phase: str
    weight: Weight
    sent: SimOperation
    into: PortName = 0
    seconds: float = 0.0


class RankTask(Task[Any]):
    """A coroutine of a rank; the operation ``end`` is done once the coroutine has ended."""

    waits_for: SimOperation

    def __init__(
        self, rank: int, program: Coroutine[Operation, None, Any], *, main: bool = False
    ) -> None:
        super().__init__(program)
        self.rank, self.main, self.result = rank, main, None
        self.end = SimOperation("the end of a coroutine of rank", rank, "start")
        self.waits_for = SimOperation("its start")


@dataclass
class Usage:
    """The traffic of one phase through one port."""

    messages: int = 0
    nbytes: float = 0.0
    seconds: float = 0.0  # how long the port was occupied


@dataclass
class Port:
    """One direction of a rank's or a node's link, and its traffic by phase."""

    free: float = 0.0  # virtual time from which it is free
    phases: defaultdict[str, Usage] = field(default_factory=lambda: defaultdict(Usage))

    def occupy(self, since: float, seconds: float, phase: str, nbytes: float) -> None:
        """Mark the port as occupied by one message, and count the message."""
        self.free = since + seconds
        usage = self.phases[phase]
        usage.messages += 1
        usage.nbytes += nbytes
        usage.seconds += seconds

    @property
    def nbytes(self) -> float:
        """The number of bytes in all phases."""
        return sum(usage.nbytes for usage in self.phases.values())

    @property
    def seconds(self) -> float:
        """The number of seconds for which the messages of all phases occupied the port."""
        return sum(usage.seconds for usage in self.phases.values())


@dataclass(frozen=True)
class Fault:
    """A stall of a rank: the rank neither computes nor answers, and messages sent to it wait.

    If ``end``, in virtual seconds, is infinite, the rank is dead: messages sent to it are lost, and its
    result is None.
    """

    rank: int
    start: float
    end: float = math.inf


class Network(Generic[T]):
    """The event queue, the ports and the mailboxes of one simulated group."""

    def __init__(self, world_size: int, links: Topology, faults: Sequence[Fault] = ()) -> None:
        self.world_size, self.links, self.faults = world_size, links, list(faults)
        self.now = 0.0
        ranks = range(world_size)
        self.sending = defaultdict[PortName, Port](Port, {rank: Port() for rank in ranks})
        self.receiving = defaultdict[PortName, Port](Port, {rank: Port() for rank in ranks})
        self.worked = [0.0] * world_size  # seconds of work charged to each rank
        self._busy_until = [0.0] * world_size
        self._queued = links.ports == "single"
        self._events: list[tuple[float, int, Callable[[Any], object], Any]] = []
        self._sequence = self._open = 0
        self._tasks: dict[int, RankTask] = {}  # tasks that have not ended, by identity
        self._ready: deque[RankTask] = deque()
        self._last_in: dict[Link, float] = {}
        self._mail: dict[Link, deque[Message]] = {}
        self._posts: dict[Link, deque[tuple[SimOperation, int]]] = {}
        self._served: dict[tuple[int, int], Callable[[int, Tensor], None]] = {}

    # ---- the calls of a SimCommunicator ----------------------------------------------------------

    def now_of(self, rank: int) -> float:
        """Return the time at which a rank has finished the work charged to it."""
        return max(self.now, self._busy_until[rank])

    def charge(self, rank: int, seconds: float) -> None:
        """Charge a rank for work, which delays everything that the rank does next."""
        self._busy_until[rank] = self.now_of(rank) + seconds
        self.worked[rank] += seconds

    def send(
        self,
        source: int,
        dest: int,
        payload: Tensor,
        phase: str,
        tag: int = 0,
        weight: Weight | None = None,
    ) -> SimOperation:
        """Send a copy of ``payload`` once the source's work is done."""
        operation = SimOperation("send to rank", dest, phase)
        weight = weight or Weight(payload.numel())
        # copy the payload, because the sender may change its buffer once the operation is done
        message = Message((source, dest, tag), payload.clone(), phase, weight, operation)
        ready = self._busy_until[source]
        if ready > self.now:
            self._at(ready, self._leave, message)
        else:
            self._leave(message)
        return operation

    def receive(self, operation: SimOperation, link: Link, capacity: int) -> None:
        """Post a receive; messages between two ranks on one channel match in the order sent."""
        self._posts.setdefault(link, deque()).append((operation, capacity))
        if link in self._mail:
            self._match(link)

    def until(self, time: float, what: str) -> SimOperation:
        """Return an operation that completes at a virtual time."""
        operation = SimOperation(what)
        self._at(time, self.complete, operation)
        return operation

    def serve(self, rank: int, tag: int, callback: Callable[[int, Tensor], None]) -> None:
        """Register ``callback(source, payload)`` for all messages to a rank on a channel."""
        self._served[rank, tag] = callback

    def at(self, rank: int, time: float, event: Callable[[], None]) -> None:
        """Run a callback on a rank at a given time or, if the rank is stalled then, after the stall."""
        self._at(time, self._happen, (rank, event))

    # ---- the event loop --------------------------------------------------------------------------

    def run(self, programs: Sequence[Coroutine[Operation, None, T]]) -> list[T]:
        """Run one coroutine per rank to its end; return the results in rank order."""
        mains = [self.start(rank, program, main=True) for rank, program in enumerate(programs)]
        self._open = len(mains)
        for fault in self.faults:
            if fault.end == math.inf:
                self._at(fault.start, self._kill, fault.rank)
        ready, events = self._ready, self._events
        try:
            while self._open:
                # the clock stands still until all coroutines wait, and then advances to the next event
                while ready:
                    self._resume(ready.popleft())
                if not self._open:
                    break
                if not events:
                    raise DeadlockError(_who_waits(self._tasks.values()))
                self.now, _, event, argument = heapq.heappop(events)
                event(argument)
        finally:
            # close the tasks even after an error; otherwise the ``finally`` blocks of open coroutines
            # would run at some later time, when garbage is collected
            for task in self._tasks.values():
                task.program.close()
        return [task.result for task in mains]

    def start(
        self, rank: int, program: Coroutine[Operation, None, Any], *, main: bool = False
    ) -> RankTask:
        """Run another coroutine of a rank concurrently; return its task, whose ``end`` can be awaited."""
        task = RankTask(rank, program, main=main)
        self._tasks[id(task)] = task
        self._ready.append(task)
        return task

    def _resume(self, task: RankTask) -> None:
        """Run a coroutine to its next wait, or to its end."""
        if id(task) not in self._tasks:  # its rank was killed while the task was queued
            return
        rank = task.rank
        later = self._frozen_until(rank) or self._busy_until[rank]
        if later == math.inf:
            self._kill(rank)
            return
        if later > self.now:
            self._at(later, self._ready.append, task)
            return
        task.resume(task.waits_for.error)
        if task.ended:
            # the rank's last work also takes time: other ranks may see that it has ended only afterwards
            if self._busy_until[rank] > self.now:
                self._at(self._busy_until[rank], self._end, task)
            else:
                self._end(task)
            return
        operation = task.waits_for
        if not isinstance(operation, SimOperation):
            raise ConfigurationError(
                f"rank {rank} awaits {type(operation).__name__}; a simulated program "
                "awaits nothing but calls of its communicator"
            )
        operation.waiter = task
        # if the operation has already failed, no task was waiting for it at that time, so queue this one
        if operation.error is not None:
            self._ready.append(task)

    def _end(self, task: RankTask) -> None:
        if self._tasks.pop(id(task), None) is not None:
            self._open -= task.main
            self.complete(task.end)

    def _kill(self, rank: int) -> None:
        """End a rank's coroutines without a result."""
        for task in [task for task in self._tasks.values() if task.rank == rank]:
            task.program.close()
            task.result = None
            self._end(task)

    def _frozen_until(self, rank: int) -> float | None:
        for fault in self.faults:
            if fault.rank == rank and fault.start <= self.now < fault.end:
                return fault.end
        return None

    def _happen(self, what: tuple[int, Callable[[], None]]) -> None:
        rank, event = what
        until = self._frozen_until(rank)
        if until is None:
            event()
        elif until < math.inf:
            self._at(until, self._happen, what)

    def _at(self, time: float, event: Callable[[Any], object], argument: Any) -> None:
        # The sequence number orders events that happen at the same time.  It makes runs repeat
        # exactly, and spares the heap from comparing callables, which have no order.
        self._sequence += 1
        heapq.heappush(self._events, (time, self._sequence, event, argument))

    # ---- a message's way -------------------------------------------------------------------------

    def _leave(self, message: Message) -> None:
        source, dest, _ = message.link
        alpha, beta, out, message.into = self.links.route(source, dest)
        message.seconds = seconds = beta * message.weight.nbytes
        # with unlimited ports, messages do not wait, and ports only count traffic
        port = self.sending[out]
        leave = max(self.now, port.free) if self._queued else self.now
        port.occupy(leave, seconds, message.phase, message.weight.nbytes)
        # Cut-through: the receiving port starts to receive alpha seconds after the first byte has left,
        # while the sending port is still sending.  If both ports are idle, a message of L bytes thus
        # takes alpha + beta L, not alpha + 2 beta L.
        self._at(leave + alpha, self._arrive, message)

    def _arrive(self, message: Message) -> None:
        port = self.receiving[message.into]
        enter = max(self.now, port.free) if self._queued else self.now
        port.occupy(enter, message.seconds, message.phase, message.weight.nbytes)
        done = enter + message.seconds
        if not self._queued:  # a short message must not overtake a long one on its channel
            done = max(done, self._last_in.get(message.link, 0.0))
            self._last_in[message.link] = done
        self._at(done, self._deliver, message)

    def _deliver(self, message: Message) -> None:
        link = source, dest, tag = message.link
        until = self._frozen_until(dest) if self.faults else None
        if until is not None and until < math.inf:
            self._at(until, self._deliver, message)
            return
        # a send completes even if the receiver is dead, because its sender does not notice the death
        self.complete(message.sent)
        if until is not None:
            return
        served = self._served.get((dest, tag)) if self._served else None
        if served is not None:
            served(source, message.payload)
            return
        self._mail.setdefault(link, deque()).append(message)
        self._match(link)

    def _match(self, link: Link) -> None:
        mail, posts = self._mail[link], self._posts.get(link)
        while mail and posts:
            message, (operation, capacity) = mail.popleft(), posts.popleft()
            # as with sockets, this error is the receiver's, raised where it awaits the message
            if message.payload.numel() > capacity:
                operation.error = ConfigurationError(
                    f"rank {link[1]} posted {capacity} bytes for a {operation.what}, "
                    f"which has {message.payload.numel()} bytes"
                )
                self._wake(operation)
                continue
            operation.entries = message.weight.entries
            self.complete(operation, message.payload)
        if not mail:
            del self._mail[link]

    def complete(self, operation: SimOperation, result: Any = None) -> None:
        """End an operation, and resume the coroutine that awaits it."""
        operation.end(result)
        self._wake(operation)

    def _wake(self, operation: SimOperation) -> None:
        if operation.waiter is not None:
            self._ready.append(operation.waiter)


def _who_waits(tasks: Iterable[RankTask]) -> str:
    """List which rank waits for which operation, for at most eight waits."""
    waiting = sorted(((t.rank, t.waits_for.what) for t in tasks), key=lambda w: w[0])
    lines = [f"rank {rank} waits for {what}" for rank, what in waiting[:8]]
    more = len(waiting) - len(lines)
    return "; ".join(lines) + (f"; and {more} more" if more else "")
