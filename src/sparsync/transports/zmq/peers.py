"""The outgoing side of a mesh: the socket to each peer, its state, and messages in flight."""

from __future__ import annotations

import socket as network
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final, final

import zmq
from torch import Tensor
from zmq.utils.monitor import recv_monitor_message

from sparsync.transports.zmq.curve import CurveKeys, Password

__all__ = ["Link", "Parcel", "happened", "host_and_port", "longest_silence", "resolved", "watched"]

# If the other end of a connection does not answer ZeroMQ's heartbeats for this many seconds, it counts
# as dead.  The limit is never shorter, because ZeroMQ's thread may have to wait for a core.
HEARTBEAT: Final = 20.0
# The limit is this multiple of ``timeout``, if that is longer.  When a rank stalls, the wait for it must
# reach its own deadline first, although the last sign of life came before that wait began.
PATIENCE: Final = 2.0
# Seconds between signs of life, because routers and firewalls drop connections that are idle for
# minutes.
BEAT: Final = 5.0
MOST_SECONDS: Final = 2e6  # libzmq stores milliseconds in a 32-bit int
# messages that ZeroMQ queues on each side of a link; when both are full, the sender waits
HIGH_WATER: Final = 64
# Payloads up to this many bytes are sent in the header's frame.  This costs a copy, but saves a second
# frame, which would have to pass to ZeroMQ's thread and back.  For 57 kB to each of 7 ranks, a second
# frame took 13 us of the caller's time and 7 us of ZeroMQ's thread, but the copy took only 10 us
# (``benchmarks/transports.py``).
INLINE: Final = 2**17
# Payloads of at least this many bytes are sent directly from the tensor.  To do so,
# ZeroMQ wakes a thread, which takes as long as copying 1 MiB, so shorter payloads are copied.
ZERO_COPY: Final = 2**20
# Longer payloads are sent in frames of this size.  Every frame is a sign of life, so a payload that takes
# longer than a heartbeat over a slow link does not look like a death.
PIECE: Final = 2**20
# limit on the bytes of one payload; for comparison, half a vector of 2^31 float32 takes 4 GiB.  A peer
# that sends more is disconnected.
MAX_MESSAGE: Final = 2**33
OVERHEAD: Final = 2**10  # limit on a frame's bytes besides its piece: the header, and encryption
# Seconds for a second attempt to connect, which is made only to get the error that ZeroMQ does not
# report.
PROBE: Final = 0.5
# if a peer has refused the bytes that it received, ZeroMQ may report only the end of the connection
TAMPERED: Final = ", or bytes were changed on the way, which ends a connection with keys"
WATCHED: Final = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_CONNECTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)
ADVICE: Final = (
    "let that port in through the firewalls between them (port_range= fixes the ports), or give that "
    "rank the interface= or advertise= at which the others find it"
)


@final
class Parcel:
    """A message to send: a frame with the header and a short payload, or a header and further frames."""

    def __init__(self, header: bytes, payload: Tensor) -> None:
        length, view = payload.numel(), payload.contiguous().numpy().data
        self.length = length
        self.frames: list[Any] = [header, view]
        if length <= INLINE:
            self.frames = [header + view if length else header]
        elif length > PIECE:
            self.frames = [header, *(view[at : at + PIECE] for at in range(0, length, PIECE))]
        self.zero_copy = length >= ZERO_COPY
        # ZeroMQ reads the payload until this is done
        self.tracker: zmq.MessageTracker | None = None
        self.accepted = False  # whether ZeroMQ has accepted the message

    @property
    def done(self) -> bool:
        """Whether the payload may change."""
        return self.accepted and (self.tracker is None or self.tracker.done)

    def send(self, socket: zmq.Socket[Any]) -> bool:
        """Pass the message to ZeroMQ without waiting; return False if ZeroMQ's queue is full.

        Once ZeroMQ has accepted the header, it also accepts the payload's frames, because its limit
        counts messages, not frames.
        """
        try:
            if len(self.frames) == 1:
                socket.send(self.frames[0], zmq.NOBLOCK)
            else:
                self.tracker = socket.send_multipart(
                    self.frames, zmq.NOBLOCK, copy=not self.zero_copy, track=self.zero_copy
                )
        except zmq.Again:
            return False
        self.accepted = True
        return True


@final
class Link:
    """The outgoing socket to one peer, which accepts only that peer's process at the other end.

    Args:
        peer: the rank of the peer.
        endpoint: the peer's address; without keys, followed by a blank and the peer's password.
        keys: this rank's keys, with the peer's public key; None for no encryption.
        timeout: seconds that a wait may take.
        connect_timeout: seconds that opening the connection may take.

    Attributes:
        opened: whether the other end has accepted this rank; if the connection ends after that, the peer
            has died or left.
        lost: the reason why no more messages can be sent; empty while sending is possible.
        lost_at: the time on the monotonic clock at which the loss was detected.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        peer: int,
        endpoint: str,
        keys: CurveKeys | None,
        timeout: float,
        connect_timeout: float,
    ) -> None:
        self.peer, self.endpoint, self._patience = peer, endpoint, connect_timeout
        self.address, _, word = endpoint.partition(" ")
        self.opened, self.lost, self.lost_at = False, "", 0.0
        self._reached = False  # whether anything has accepted the connection
        self._encrypted = keys is not None
        self.by = time.monotonic() + connect_timeout  # the deadline for opening the connection
        self.queue: deque[Parcel] = deque()  # messages that ZeroMQ has not accepted yet, in order
        self.sequences: Counter[int] = Counter()  # messages sent, by channel
        # resolve the name here, because ZeroMQ does not report an unknown name, and stops all traffic
        # during a lookup
        try:
            address = resolved(self.address)
        except OSError as error:
            address = self.address
            self._lose(f"{self._unreached(error)}")
        self.socket, self.events = watched(context, zmq.PUSH, address, timeout, connect_timeout)
        try:
            if keys is None:
                Password(word.encode()).show(self.socket)
            else:
                keys.show(self.socket, keys.publics[peer])
            if not self.lost:
                self.socket.connect(address)
        except BaseException:
            self.close()  # a context with an open socket never terminates
            raise

    def begin(self, peer: int) -> None:
        """Use this link for rank ``peer`` of a new group; message numbers start at 0 again."""
        self.peer = peer
        self.queue.clear()
        self.sequences.clear()

    def close(self, linger: int = 0) -> None:
        """Close the socket; messages still queued are dropped after ``linger`` milliseconds."""
        self.socket.disable_monitor()
        self.events.close()
        self.socket.close(linger=linger)

    def leave(self) -> None:
        """Close the socket and end senders' waits, because the peer has left the group."""
        if not self.lost:
            self._lose(f"rank {self.peer} is not in this rank's group any more")
        self.close()

    def next_sequence(self, tag: int) -> int:
        """Return the number of the next message on a channel, and count that message."""
        self.sequences[tag] += 1
        return self.sequences[tag] - 1

    def send(self, parcel: Parcel) -> None:
        """Send a message now, or queue it behind waiting messages."""
        if self.queue or not parcel.send(self.socket):
            self.queue.append(parcel)

    def flush(self) -> None:
        """Send queued messages as long as there is room."""
        while self.queue and self.queue[0].send(self.socket):
            self.queue.popleft()

    @property
    def state(self) -> str:
        """The reason why the link is not open, as a text; empty if it is open."""
        if self.lost or self.opened:
            return self.lost
        seen = "the port answers, but lets nobody in" if self._reached else "no answer"
        return f"there is no connection to {self.address} yet ({seen})"

    def look(self) -> None:
        """Check whether the connection has opened, has ended, or is late."""
        for event, value in happened(self.events):
            if self.lost:  # keep the first reason: later events are its consequences
                continue
            if event == zmq.EVENT_CONNECTED:
                self._reached = True
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.opened = True
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                what = "key" if self._encrypted else "password"
                self._lose(
                    f"rank {self.peer} refused this rank's {what} (status {value}) at {self.address}"
                )
            elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and self.opened:
                self._lose(
                    f"bytes from rank {self.peer} were changed on their way, and are refused"
                )
            elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self._lose(
                    f"what listens for rank {self.peer} at {self.address} does not speak this rank's "
                    "protocol; give all ranks the same curve_keys"
                )
            elif self.opened:
                changed = TAMPERED if self._encrypted else ""
                self._lose(f"rank {self.peer} is gone (its connection ended){changed}")
            else:
                self._lose(self._unreached(self._probed()))
        if not self.lost and not self.opened and time.monotonic() > self.by:
            self._lose(self._unreached(None))

    def _lose(self, why: str) -> None:
        self.lost, self.lost_at = why, time.monotonic()

    def _probed(self) -> OSError | None:
        """Try again to connect and return the error, because ZeroMQ does not report its own."""
        if self._reached:
            return None
        try:
            network.create_connection(host_and_port(resolved(self.address)), PROBE).close()
        except OSError as error:
            return error
        return None

    def _unreached(self, error: OSError | None) -> str:
        """Explain why the link was never opened."""
        cure = ADVICE
        if isinstance(error, network.gaierror):
            seen = f"no such name: {error.strerror}"
            cure = "give that rank an advertise= that all ranks can resolve, or an IP address"
        elif isinstance(error, ConnectionRefusedError):
            seen = (
                "connection refused: a firewall rejects it, or that rank has ended, perhaps that of an "
                "earlier job with the same store"
            )
        elif error is not None and not isinstance(error, TimeoutError):
            seen = error.strerror or str(error)
        elif self._reached and time.monotonic() > self.by:
            seen = f"the port answers, but has let nobody in within {self._patience:g} s"
            cure = "is that rank alive? Raise connect_timeout= if it is only slow"
        elif self._reached:
            seen = (
                "it answered, and ended the connection before it was open: that rank has ended, or "
                "something else listens there"
            )
        else:
            waited = time.monotonic() - self.by + self._patience
            seen = f"no answer within {min(self._patience, waited):.4g} s"
        return f"rank {self.peer} cannot be reached at {self.address} ({seen}); {cure}"


def watched(
    context: zmq.Context[Any], kind: int, address: str, timeout: float, handshake: float
) -> tuple[zmq.Socket[Any], zmq.Socket[Any]]:
    """Return a socket for one end of connections, and the socket that reports their events.

    Connections are never reopened, because reopening one would hide a peer's death and the loss of
    queued messages.

    Args:
        context: the context of both sockets.
        kind: ``zmq.PUSH`` or ``zmq.PULL``.
        address: an address, whose family (IPv4 or IPv6) the socket uses.
        timeout: seconds that a wait may take; a rank may stall for that long.
        handshake: seconds after which a connection is closed if its other end has not identified itself.
    """
    socket = context.socket(kind)
    socket.ipv6 = ":" in address.removeprefix("tcp://").rpartition(":")[0]  # colons before the port
    socket.sndhwm = socket.rcvhwm = HIGH_WATER
    # ZeroMQ checks this limit before it allocates memory, so a frame that claims to be gigabytes long
    # takes no memory
    socket.maxmsgsize = max(PIECE, INLINE) + OVERHEAD
    socket.reconnect_ivl = -1
    socket.handshake_ivl = _milliseconds(handshake)
    # heartbeat_ttl is not set: it would tell the other end when to give up, but each end decides itself
    socket.heartbeat_timeout = _milliseconds(longest_silence(timeout))
    socket.heartbeat_ivl = _milliseconds(BEAT)
    try:
        return socket, socket.get_monitor_socket(WATCHED)
    except BaseException:
        socket.close(linger=0)
        raise


def longest_silence(timeout: float) -> float:
    """Return the seconds without a sign of life after which a connection counts as dead."""
    return max(HEARTBEAT, PATIENCE * timeout)


def _milliseconds(seconds: float) -> int:
    return max(round(1000 * min(seconds, MOST_SECONDS)), 1)


def happened(events: zmq.Socket[Any]) -> Iterator[tuple[int, int]]:
    """Yield ``(event, value)`` for each event since the last call, in order."""
    while events.poll(0):
        message = recv_monitor_message(events)
        yield int(message["event"]), int(message["value"])


def host_and_port(address: str) -> tuple[str, int]:
    """Split a ZeroMQ address into host and port.

    Example:
        >>> host_and_port("tcp://[::1]:29600")
        ('::1', 29600)
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def resolved(address: str) -> str:
    """Return a ZeroMQ address with its host's IP address, preferably IPv4.

    Raises:
        socket.gaierror: the name does not exist.
    """
    host, port = host_and_port(address)
    with suppress(UnicodeError):  # a name that no resolver accepts counts as unknown
        found = network.getaddrinfo(host, port, type=network.SOCK_STREAM)
        family, *_, place = min(found, key=lambda one: one[0] != network.AF_INET)
        return f"tcp://{f'[{place[0]}]' if family == network.AF_INET6 else place[0]}:{port}"
    raise network.gaierror(network.EAI_NONAME, "Name or service not known")
