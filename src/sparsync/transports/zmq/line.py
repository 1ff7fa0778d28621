"""The messages of an actor over ZeroMQ: a mesh of its own, and a socket that wakes its thread."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, final

import zmq
from torch import Tensor

from sparsync.errors import CommunicationError
from sparsync.transports.actors import Line
from sparsync.transports.framing import Framing
from sparsync.transports.ledger import Parts
from sparsync.transports.zmq.operations import Receive

if TYPE_CHECKING:
    from sparsync.transports.zmq.communicator import ZmqCommunicator

__all__ = ["ZmqLine"]

_WAKE = "inproc://wake"  # of the mesh's own context


@final
class ZmqLine(Line):
    """Carries an actor's messages; a peer whose connection ends is dead, one that is silent is not.

    Args:
        comm: used by nobody else.
    """

    def __init__(self, comm: ZmqCommunicator) -> None:
        self._comm, mesh = comm, comm.mesh
        mesh.incoming.socket.bind(_WAKE)
        self._waker = mesh.context.socket(zmq.PUSH)
        self._waker.linger = 0
        self._waker.connect(_WAKE)
        self._lock = threading.Lock()  # of the waker: a ZeroMQ socket is for one thread at a time
        self._known: set[int] = set()
        self._receive: Receive | None = None

    def send(self, dest: int, payload: Tensor) -> None:
        """Send, unless the peer is gone."""
        if dest not in self._known:
            self._comm.isend(payload, dest, "actor", _Whole())

    def take(self, seconds: float) -> tuple[int, Tensor] | None:
        """Take the next message."""
        try:
            if self._receive is None:
                self._receive = self._comm.irecv_any(
                    self._comm.mesh.settings.max_message, "actor", _Whole()
                )
            receive = self._receive
            if not receive.poll(0.0):
                self._comm.mesh.advance(seconds)
                if not receive.poll(0.0):
                    return None
        except CommunicationError:  # all others are gone
            self._receive = None
            self._comm.mesh.advance(seconds)
            return None
        self._receive = None
        assert receive.result is not None
        return receive.source, receive.result

    def deaths(self) -> list[tuple[int, str]]:
        """Return the peers whose connection has ended."""
        mesh = self._comm.mesh
        ended = {peer: link.lost for peer, link in mesh.links.items() if link.lost}
        found = [(p, why) for p, why in {**ended, **mesh.lost}.items() if p not in self._known]
        self._known.update(peer for peer, _ in found)
        return found

    def wake(self) -> None:
        """Send a word to this rank's own socket."""
        # refused: it has been woken often enough, or the line is closed
        with self._lock, suppress(zmq.ZMQError):
            self._waker.send(self._comm.mesh.wake_word, zmq.NOBLOCK)

    def close(self) -> None:
        """Deliver what is left, and close."""
        with self._lock:
            self._waker.close()
        self._comm.close()


@final
class _Whole(Framing):
    """A message that is as long as it is."""

    variable = True

    def length(self, buffer: Tensor) -> int:
        return buffer.numel()

    def parts(self, payload: Tensor) -> Parts:
        return Parts(value=payload.numel())
