"""Actors answer messages whatever their rank computes; a host runs one and carries its messages.

An actor is a state machine without threads, sockets and clocks of its own: it is told what arrives
and what time it is, and says what to send.  So the same actor runs on a thread next to a training
(``ThreadHost``) and in the simulator, where every interleaving can be replayed.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, final

from torch import Tensor

from sparsync.errors import CommunicationError, DeadlineError, DeadlockError
from sparsync.transports.driver import Finished, Operation

__all__ = [
    "Actor",
    "Host",
    "Reply",
    "SoloHost",
    "ThreadHost",
]

Reply = Callable[[Any], None]  # ends what a rank awaits of its actor; called once

_NAP = 0.5  # seconds between looks at deaths while nothing comes and nothing is due
_NAMED = 4  # ranks in a message, those first that have been silent for longest


class Actor(ABC):
    """A state machine that a host runs: one call at a time, none of which may wait.

    Attributes:
        host: set by the host before the first call.
        due: when ``tick`` is to be called, by the host's clock; None: not at all.
    """

    host: Host
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


class Host(ABC):
    """Runs one actor on one rank.

    Attributes:
        rank: this rank.
        world_size: number of ranks.
        survives: when a peer dies, the others can still be reached.
    """

    rank: int
    world_size: int
    survives: bool = True

    @property
    def now(self) -> float:
        """Seconds, by a clock that never goes back."""
        return time.monotonic()

    @abstractmethod
    def send(self, dest: int, payload: Tensor) -> None:
        """Send a message of the actor's and return at once; the payload must not change any more."""

    @abstractmethod
    def call(self, function: Callable[[], None]) -> None:
        """Run ``function`` between the actor's calls, soon; returns at once."""

    @abstractmethod
    def ask(self, function: Callable[[Reply], None], where: Callable[[], str]) -> Operation:
        """Run ``function(reply)`` as ``call`` does; await the result for what ``reply`` is given.

        Args:
            function: may call ``reply`` at once, or keep it for a later call of the actor.
            where: says what the wait is for, in errors.
        """

    @abstractmethod
    def close(self) -> None:
        """End the actor."""


@final
class SoloHost(Host):
    """Calls the actor of a world of one at once; nobody writes to it."""

    rank, world_size = 0, 1

    def __init__(self, actor: Actor) -> None:
        actor.host = self

    def send(self, dest: int, payload: Tensor) -> None:
        """Never reached."""
        raise AssertionError("a world of one sends nothing")

    def call(self, function: Callable[[], None]) -> None:
        """Call at once."""
        function()

    def ask(self, function: Callable[[Reply], None], where: Callable[[], str]) -> Operation:
        """Call at once; nothing that comes later could answer."""
        answers: list[Any] = []
        function(answers.append)
        if not answers:
            raise DeadlockError(f"{where()} waits for itself")
        return Finished(answers[0])

    def close(self) -> None:
        """Nothing runs."""


class ThreadHost(Host):
    """Runs an actor on a daemon thread; a transport's own host adds how messages travel.

    The rank hands work over through a queue and waits on an event: it never holds a lock that the
    actor needs, nor the other way round.  All methods but ``call``, ``ask``, ``wake`` and ``close``
    are called on the thread.

    Args:
        actor: to run.
        rank: this rank.
        world_size: number of ranks.
        timeout: seconds that a rank waits for an answer.
    """

    def __init__(self, actor: Actor, rank: int, world_size: int, timeout: float) -> None:
        self.rank, self.world_size = rank, world_size
        self._actor, self._timeout = actor, timeout
        self._calls: deque[Callable[[], None]] = deque()
        self._asked: list[_Asked] = []
        self._error: BaseException | None = None
        self._closing = False
        self._gone: dict[int, str] = {}
        self._heard = {peer: self.now for peer in range(world_size) if peer != rank}
        actor.host = self
        self._thread = threading.Thread(target=self._work, name="sparsync-actor", daemon=True)

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
    def leave(self) -> None:
        """Let the last messages leave, and close what carries them."""

    def call(self, function: Callable[[], None]) -> None:
        """Queue a function, and wake the thread."""
        self._calls.append(function)
        self.wake()

    def ask(self, function: Callable[[Reply], None], where: Callable[[], str]) -> Operation:
        """Queue a function; the wait ends in an error if the actor fails or the timeout passes."""
        asked = _Asked(where, self._timeout, self._silent)
        # known to the thread before its error is looked at: a failure in between ends the wait, too
        self._asked = [*(one for one in self._asked if not one.done), asked]
        if self._error is not None:
            asked.fail(self._error)
        self.call(partial(function, asked.answer))
        return asked

    def close(self) -> None:
        """End the thread."""
        self._closing = True
        if self._thread.is_alive():
            self.wake()
            self._thread.join()

    def _work(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except BaseException as error:
            self._error = error
            for asked in self._asked:
                asked.fail(error)
        finally:
            self.leave()

    def _turn(self) -> None:
        """Do what is there, then wait for the next message, at most until a tick is due."""
        while self._calls:
            self._calls.popleft()()
        due = self._actor.due
        message = self.take(_NAP if due is None else min(max(due - self.now, 0.0), _NAP))
        if message is not None:
            self._receive(*message)
        deaths = self.deaths()
        while deaths and (message := self.take(0.0)) is not None:
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
class _Asked(Operation):
    """A wait for an actor on its thread; ``silent`` says who has not been heard of."""

    def __init__(self, where: Callable[[], str], timeout: float, silent: Callable[[], str]) -> None:
        self.where, self.timeout, self.silent = where, timeout, silent
        self.error: BaseException | None = None
        self._over = threading.Event()

    def answer(self, value: Any) -> None:
        self.result = value
        self._over.set()

    def fail(self, error: BaseException) -> None:
        self.error = error
        self._over.set()

    def wait(self) -> None:
        if not self._over.wait(self.timeout):
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
        if not self.done and self._over.wait(seconds):
            self.wait()
        return self.done
