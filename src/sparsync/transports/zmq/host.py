"""Run an actor on a separate thread, over a separate mesh."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

import zmq
from torch import Tensor

from sparsync.errors import CommunicationError, DeadlineError
from sparsync.transports.actors import Actor, Host, Reply
from sparsync.transports.driver import Operation, close_at_exit
from sparsync.transports.ledger import Raw
from sparsync.transports.zmq.peers import MAX_MESSAGE

__all__ = ["ZmqHost"]

_WAKE: Final = "inproc://wake"  # private to an actor's context, so all actors may use the same name
_NAP: Final = 0.5  # seconds between checks for dead peers while nothing arrives and nothing is due
_NAMED: Final = 4  # number of ranks named in an error, those with the longest silence first
_CLOSED: Final = (
    "this averager was closed, or another one took over its communicator; give each averager a "
    "connect() of its own, and make a new one after close()"
)
_WHOLE: Final = Raw("value", variable=True)


class ZmqHost(Host):
    """Runs an actor on a daemon thread.

    The rank passes work to the thread through a queue and waits for replies with an event, so neither
    side holds a lock that the other needs.  A peer counts as dead when its connection ends, but not when
    it is silent.  ``comm`` is private to the host, which closes it at the end.
    """

    def __init__(self, actor: Actor, comm: Any) -> None:  # a ``ZmqCommunicator``
        self.rank, self.world_size = comm.rank, comm.world_size
        self._actor, self._comm, self._mesh = actor, comm, comm.mesh
        self._calls: deque[Callable[[], None]] = deque()
        self._asked: list[_Asked] = []
        self._error: BaseException | None = None
        self._closing = False
        self._gone: dict[int, str] = {}
        self._heard = {r: self.now for r in range(comm.world_size) if r != comm.rank}
        self._receive: Any = None  # the receive in flight
        self._mesh.incoming.bind(_WAKE)
        self._waker = self._mesh.context.socket(zmq.PUSH)
        self._waker.connect(_WAKE)
        self._lock = threading.Lock()  # for the waker: a ZeroMQ socket allows one thread at a time
        actor.meet(self)
        self._thread = threading.Thread(target=self._work, name="sparsync-actor", daemon=True)
        self._thread.start()
        close_at_exit(self)

    # ---- called by the rank

    def call(self, function: Callable[[], None]) -> None:
        """Queue a function, and wake the thread."""
        self._calls.append(function)
        # The call is queued first, because the thread may wake up immediately.  If the pipe is full,
        # there are already enough wake-ups in flight; if it is closed, no thread is left to wake.
        with self._lock, suppress(zmq.ZMQError):
            self._waker.send(self._mesh.wake_word, zmq.NOBLOCK)

    def ask(self, function: Callable[[Reply], None], where: Callable[[], str]) -> Operation:
        """Queue a function; the operation raises an error if the actor fails or the timeout expires."""
        asked = _Asked(where, self._comm.timeout, self._silent)
        # let the thread see the wait before checking for an error, so that a failure in between also
        # ends the wait
        self._asked = [*(one for one in self._asked if not one.done), asked]
        if self._error is not None:
            asked.end(error=self._error)
        elif self._closing:
            asked.end(error=CommunicationError(f"{where()}: {_CLOSED}"))
        self.call(partial(function, asked.end))
        return asked

    def close(self) -> None:
        """End the thread."""
        self._closing = True
        if self._thread.is_alive():
            self.call(lambda: None)
            self._thread.join()

    def _silent(self) -> str:
        """Return a text that says which ranks are dead, or how long each has been silent."""
        gone = [f"rank {peer} is gone ({reason})" for peer, reason in list(self._gone.items())]
        since = sorted((heard, peer) for peer, heard in list(self._heard.items()))
        ages = [f"rank {peer} for {self.now - heard:.1f} s" for heard, peer in since]
        return ", ".join(gone[:_NAMED]) + "." if gone else f"silent: {', '.join(ages[:_NAMED])}."

    # ---- the thread

    def send(self, dest: int, payload: Tensor) -> None:
        """Send a message, unless the peer is dead."""
        if dest not in self._gone:
            self._comm.isend(payload, dest, "actor", _WHOLE)

    def _work(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except BaseException as error:
            # The error is set before the list is read.  ``ask`` extends the list before it reads the
            # error, so at least one of the two threads sees the other's change.
            self._error = error
            for asked in self._asked:
                asked.end(error=error)
        finally:
            with self._lock:
                self._waker.close()
            self._comm.close()

    def _turn(self) -> None:
        """Run the queued calls, then wait for a message, but no longer than until a tick is due."""
        while self._calls:
            self._calls.popleft()()
        due = self._actor.due
        self._take(_NAP if due is None else min(max(due - self.now, 0.0), _NAP))
        deaths = self._deaths()
        self._gone.update(deaths)
        # the actor gets a dead peer's last messages before it is informed of the death
        while deaths and self._take(0.0):
            pass
        for peer, reason in deaths.items():
            self._actor.lose(peer, reason)
        due = self._actor.due
        if due is not None and self.now >= due:
            self._actor.tick()

    def _take(self, seconds: float) -> bool:
        """Give the actor the next message, if one arrives within ``seconds`` and before the next call."""
        mesh = self._mesh
        try:
            if self._receive is None:
                self._receive = self._comm.irecv_any(MAX_MESSAGE, "actor", _WHOLE)
            # The receive is only polled: a wait would have a deadline, but peers may be silent forever.
            # The waiting is done in ``advance``, which ends early if a function is queued.
            receive = self._receive
            if not receive.poll(0.0):
                mesh.advance(seconds)
                if not receive.poll(0.0):
                    return False
        except CommunicationError:  # all other ranks are dead
            self._receive = None
            mesh.advance(seconds)
            return False
        self._receive, source = None, receive.source
        self._heard[source] = self.now
        self._actor.receive(source, receive.result)
        return True

    def _deaths(self) -> dict[int, str]:
        """Return the peers whose connections have ended since the last call, and the reasons."""
        mesh = self._mesh
        ended = {peer: link.lost for peer, link in mesh.links.items() if link.lost}
        return {p: why for p, why in {**ended, **mesh.lost}.items() if p not in self._gone}


class _Asked(Operation):
    """A wait for an actor on its thread; ``silent`` reports which ranks are dead or silent."""

    def __init__(self, where: Callable[[], str], timeout: float, silent: Callable[[], str]) -> None:
        self.where, self.timeout, self.silent = where, timeout, silent
        self.error: BaseException | None = None
        self._over = threading.Event()

    def end(self, value: Any = None, error: BaseException | None = None) -> None:
        self.result, self.error = value, error
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
