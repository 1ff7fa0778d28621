"""Run an actor over ZeroMQ: a mesh of its own, and a socket that wakes its thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, final

import zmq
from torch import Tensor

from sparsync.errors import CommunicationError
from sparsync.transports.actors import Actor, ThreadHost
from sparsync.transports.communicator import Communicator
from sparsync.transports.ledger import Framing, Parts
from sparsync.transports.zmq.mesh import Mesh

__all__ = ["ZmqHost"]

_WAKE = "inproc://wake"  # of the mesh's own context


@final
class ZmqHost(ThreadHost):
    """Carries an actor's messages; a peer whose connection ends is dead, one that is silent is not.

    Args:
        actor: to run.
        comm: used by nobody else; closed at the end.
        mesh: its sockets.
        receive: its ``irecv_any``.
        timeout: seconds that a rank waits for an answer.
    """

    def __init__(
        self,
        actor: Actor,
        comm: Communicator,
        mesh: Mesh,
        receive: Callable[[int, str, Framing], Any],
        timeout: float,
    ) -> None:
        super().__init__(actor, comm.rank, comm.world_size, timeout)
        self._comm, self._mesh, self._irecv_any = comm, mesh, receive
        mesh.incoming.socket.bind(_WAKE)
        self._waker = mesh.context.socket(zmq.PUSH)
        self._waker.linger = 0
        self._waker.connect(_WAKE)
        self._lock = threading.Lock()  # of the waker: a ZeroMQ socket is for one thread at a time
        self._known: set[int] = set()
        self._pending: Any = None
        self._thread.start()

    def send(self, dest: int, payload: Tensor) -> None:
        """Send, unless the peer is gone."""
        if dest not in self._known:
            self._comm.isend(payload, dest, "actor", _Whole())

    def take(self, seconds: float) -> tuple[int, Tensor] | None:
        """Take the next message."""
        try:
            if self._pending is None:
                limit = self._mesh.settings.max_message
                self._pending = self._irecv_any(limit, "actor", _Whole())
            receive = self._pending
            if not receive.poll(0.0):
                self._mesh.advance(seconds)
                if not receive.poll(0.0):
                    return None
        except CommunicationError:  # all others are gone
            self._pending = None
            self._mesh.advance(seconds)
            return None
        self._pending = None
        return receive.source, receive.result

    def deaths(self) -> list[tuple[int, str]]:
        """Return the peers whose connection has ended."""
        mesh = self._mesh
        ended = {peer: link.lost for peer, link in mesh.links.items() if link.lost}
        found = [(p, why) for p, why in {**ended, **mesh.lost}.items() if p not in self._known]
        self._known.update(peer for peer, _ in found)
        return found

    def wake(self) -> None:
        """Send a word to this rank's own socket."""
        # refused: it has been woken often enough, or the line is closed
        with self._lock, suppress(zmq.ZMQError):
            self._waker.send(self._mesh.wake_word, zmq.NOBLOCK)

    def leave(self) -> None:
        """Deliver what is left, and close."""
        with self._lock:
            self._waker.close()
        self._comm.close()


@final
class _Whole(Framing):
    """Framing for messages whose length only the transport knows."""

    variable = True

    def length(self, buffer: Tensor) -> int:
        return buffer.numel()

    def parts(self, payload: Tensor) -> Parts:
        return Parts(value=payload.numel())
