"""What answers messages whatever its rank computes: an ``Actor``, and the ``Host`` that runs it.

An actor is a state machine without threads, sockets and clocks of its own: it is told what arrives
and what time it is, and says what to send.  So the same actor runs on a thread beside a training
(``ThreadHost`` over a transport's ``Line``) and in the simulator, where every interleaving can be
replayed.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, final

from torch import Tensor

from sparsync.errors import CommunicationError, DeadlineError
from sparsync.transports.base import Operation

__all__ = ["Actor", "Host", "Line", "Port", "Signal", "ThreadHost"]

_NAP = 0.5  # seconds between looks at deaths while nothing comes and nothing is due
_NAMED = 4  # ranks in a message, those first that have been silent for longest


class Port(ABC):
    """What an actor may do.

    Attributes:
        rank: this rank.
        world_size: number of ranks.
        survives: when a peer dies, the others can still be reached.
    """

    rank: int
    world_size: int
    survives: bool = True

    @property
    @abstractmethod
    def now(self) -> float:
        """Seconds, by a clock that never goes back."""

    @abstractmethod
    def send(self, dest: int, payload: Tensor) -> None:
        """Send a message and return at once; the payload must not change any more."""


class Actor(ABC):
    """What a host runs: one call at a time, none of which may wait.

    Attributes:
        port: set by the host before the first call.
        due: when ``tick`` is to be called, by the port's clock; None: not at all.
    """

    port: Port
    due: float | None = None

    @abstractmethod
    def receive(self, source: int, payload: Tensor) -> None:
        """Take a message; those of one source come in the order sent."""

    @abstractmethod
    def tick(self) -> None:
        """Do what was due."""

    @abstractmethod
    def lose(self, peer: int, reason: str) -> None:
        """Learn that a peer is gone for ever."""


class Signal(Operation):
    """What a rank awaits of its actor, which sets it once."""

    value: Any = None

    @abstractmethod
    def set(self, value: Any) -> None:
        """End the wait; called by the actor."""


class Host(Port):
    """Runs one actor on one rank."""

    @abstractmethod
    def call(self, function: Callable[[], None]) -> None:
        """Run ``function`` between the actor's calls, soon; returns at once."""

    @abstractmethod
    def signal(self, where: Callable[[], str]) -> Signal:
        """Return a signal to await; ``where`` says, for errors, what the wait is for."""

    @abstractmethod
    def close(self) -> None:
        """End the actor."""


class Line(ABC):
    """A transport's way to carry an actor's messages; all but ``wake`` are called on its thread."""

    survives: bool = True

    @abstractmethod
    def send(self, dest: int, payload: Tensor) -> None:
        """Send and return at once; to a dead peer: do nothing."""

    @abstractmethod
    def take(self, seconds: float) -> tuple[int, Tensor] | None:
        """Return the next message and its source, or None after ``seconds`` or a ``wake``.

        With 0 seconds: None means that nothing has arrived.
        """

    @abstractmethod
    def deaths(self) -> list[tuple[int, str]]:
        """Return the peers that are found dead since the last call, and why."""

    @abstractmethod
    def wake(self) -> None:
        """Let ``take`` return; from any thread."""

    @abstractmethod
    def close(self) -> None:
        """Let the last messages leave, and end."""


@final
class ThreadHost(Host):
    """Runs an actor on a daemon thread over a line.

    The rank hands work over through a queue and waits on an event: it never holds a lock that the
    actor needs, nor the other way round.

    Args:
        actor: to run.
        line: of a communicator of its own.
        rank: this rank.
        world_size: number of ranks.
        timeout: seconds that a rank waits for a signal.
    """

    def __init__(
        self, actor: Actor, line: Line, rank: int, world_size: int, timeout: float
    ) -> None:
        self.rank, self.world_size, self.survives = rank, world_size, line.survives
        self._actor, self._line, self._timeout = actor, line, timeout
        self._calls: deque[Callable[[], None]] = deque()
        self._signals: list[_Event] = []
        self._error: BaseException | None = None
        self._closing = False
        self._gone: dict[int, str] = {}
        self._heard = {peer: self.now for peer in range(world_size) if peer != rank}
        actor.port = self
        self._thread = threading.Thread(target=self._work, name="sparsync-actor", daemon=True)
        self._thread.start()

    @property
    def now(self) -> float:
        """Read the monotonic clock."""
        return time.monotonic()

    def send(self, dest: int, payload: Tensor) -> None:
        """Send on the line."""
        self._line.send(dest, payload)

    def call(self, function: Callable[[], None]) -> None:
        """Queue a function, and wake the thread."""
        self._calls.append(function)
        self._line.wake()

    def signal(self, where: Callable[[], str]) -> Signal:
        """Return an event; it ends in an error if the actor fails or the timeout passes."""
        event = _Event(where, self._timeout, self._silent)
        if self._error is not None:
            event.fail(self._error)
        self._signals = [one for one in self._signals if not one.done]
        self._signals.append(event)
        return event

    def close(self) -> None:
        """End the thread."""
        self._closing = True
        if self._thread.is_alive():
            self._line.wake()
            self._thread.join()

    def _work(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except BaseException as error:
            self._error = error
            for event in self._signals:
                event.fail(error)
        finally:
            self._line.close()

    def _turn(self) -> None:
        """Do what is there, then wait for the next message, at most until a tick is due."""
        while self._calls:
            self._calls.popleft()()
        due = self._actor.due
        seconds = _NAP if due is None else min(max(due - self.now, 0.0), _NAP)
        message = self._line.take(seconds)
        if message is not None:
            self._receive(*message)
        deaths = self._line.deaths()
        while deaths and (message := self._line.take(0.0)) is not None:
            self._receive(*message)  # its last words come first
        for peer, reason in deaths:
            self._gone[peer] = reason
            self._actor.lose(peer, reason)
        due = self._actor.due
        if due is not None and self.now >= due:
            self._actor.tick()

    def _receive(self, source: int, payload: Tensor) -> None:
        self._heard[source] = self.now
        self._actor.receive(source, payload)

    def _silent(self) -> str:
        """Say which ranks are gone, or how long each has been silent."""
        gone = [f"rank {peer} is gone ({reason})" for peer, reason in list(self._gone.items())]
        since = sorted((heard, peer) for peer, heard in list(self._heard.items()))
        ages = [f"rank {peer} for {self.now - heard:.1f} s" for heard, peer in since]
        return ", ".join(gone[:_NAMED]) + "." if gone else f"silent: {', '.join(ages[:_NAMED])}."


@final
class _Event(Signal):
    """A signal that a thread waits for; ``silent`` says who has not been heard of."""

    def __init__(self, where: Callable[[], str], timeout: float, silent: Callable[[], str]) -> None:
        self.where, self.timeout, self.silent = where, timeout, silent
        self.error: BaseException | None = None
        self._set = threading.Event()

    def set(self, value: Any) -> None:
        self.value = value
        self._set.set()

    def fail(self, error: BaseException) -> None:
        self.error = error
        self._set.set()

    def wait(self) -> None:
        if not self._set.wait(self.timeout):
            raise DeadlineError(
                f"{self.where()} did not complete within {self.timeout:g} s; {self.silent()} "
                "Raise timeout= if it is only slow"
            )
        if isinstance(self.error, CommunicationError):
            raise self.error
        if self.error is not None:
            raise CommunicationError(
                f"{self.where()} failed on its own thread: {self.error!r}"
            ) from self.error
        self.done = True

    def poll(self, seconds: float) -> bool:
        if not self.done and self._set.wait(seconds):
            self.wait()
        return self.done
