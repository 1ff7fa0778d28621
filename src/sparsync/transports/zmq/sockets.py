"""The sockets of a rank: one that all others send to, and one link to each peer that it sends to."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, fields
from typing import Any, Final, final

import zmq
from torch import Tensor
from zmq.utils.monitor import recv_monitor_message

from sparsync.errors import ConfigurationError
from sparsync.transports.zmq.curve import CurveKeys, Doorkeeper

__all__ = ["LINGER", "TICK", "Incoming", "Link", "Parcel", "ZmqSettings"]

LINGER: Final = 5.0  # seconds that ``close`` gives the last messages to leave
TICK: Final = 0.05  # seconds between looks at connections while a wait is on
# seconds of silence of a connection, asked for a sign of life, after which its other end is dead; a
# death that the operating system reports is noticed at once
HEARTBEAT: Final = 20.0
NOT_LAST: Final = zmq.NOBLOCK | zmq.SNDMORE  # of a message's frames


@dataclass(frozen=True)
class ZmqSettings:
    """Limits and buffers of the transport.

    Attributes:
        high_water: messages per link that ZeroMQ queues on either side; above, the sender waits.
        max_message: bytes of one payload; a peer that announces more is cut off.
        max_unclaimed: bytes of messages that arrived before anybody asked for them.
        inline: payloads up to this many bytes travel in the header's frame: one copy more, but a frame
            less to pass to ZeroMQ's thread and back (``benchmarks/transports.py``: of 57 kB to each of
            7 ranks, a second frame took 13 us of the caller and 7 us of that thread; the copy 10 us).
        zero_copy: payloads from this many bytes on are sent from the tensor's own memory, which costs
            a thread's wake-up (a memcpy of 1 MiB takes as long).

    Raises:
        ConfigurationError: a number that is not above zero.
    """

    high_water: int = 64
    max_message: int = 2**31
    max_unclaimed: int = 2**31
    inline: int = 2**17
    zero_copy: int = 2**20

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int | float) or not 0 < value < 2**62:
                raise ConfigurationError(f"{field.name} is {value!r}; give a number above zero")


@final
class Parcel:
    """A message to be sent: one frame with a short payload after its header, or two frames.

    Attributes:
        tracker: while it is not done, ZeroMQ reads the payload's memory.
        accepted: ZeroMQ has taken the message.
    """

    def __init__(self, header: bytes, payload: Tensor, settings: ZmqSettings) -> None:
        length, payload = payload.numel(), payload.contiguous()
        self.apart = payload if length > settings.inline else None
        self.frame = header + payload.numpy().data if length and self.apart is None else header
        self.zero_copy = length >= settings.zero_copy
        self.tracker: zmq.MessageTracker | None = None
        self.accepted = False

    @property
    def done(self) -> bool:
        """Whether the payload may change."""
        return self.accepted and (self.tracker is None or self.tracker.done)

    def send(self, socket: zmq.Socket[Any]) -> bool:
        """Give it to ZeroMQ without waiting; False: the queue is full."""
        try:
            if self.apart is None:
                socket.send(self.frame, zmq.NOBLOCK)
            else:
                # once the header is accepted the payload is too: the limit counts whole messages
                socket.send(self.frame, NOT_LAST)
                view = self.apart.numpy().data
                if self.zero_copy:
                    self.tracker = socket.send(view, zmq.NOBLOCK, copy=False, track=True)
                else:
                    socket.send(view, zmq.NOBLOCK)
        except zmq.Again:
            return False
        self.accepted = True
        return True


@final
class Incoming:
    """The socket that all other ranks send to, bound to one interface, and who is connected to it."""

    def __init__(
        self,
        context: zmq.Context[Any],
        interface: str,
        settings: ZmqSettings,
        keys: CurveKeys | None,
    ) -> None:
        self.doorkeeper = None if keys is None else Doorkeeper(context, keys)
        address = f"tcp://[{interface}]:*" if ":" in interface else f"tcp://{interface}:*"
        self.socket = context.socket(zmq.PULL)
        _set_up(self.socket, settings, address)
        if keys is not None:  # accept encrypted connections only
            self.socket.curve_server = True
            self.socket.curve_secretkey = keys.secret
        self.socket.rcvtimeo = round(TICK * 1000)
        self.watcher = _Watcher(self.socket, "incoming")
        self.connected: set[int] = set()  # file descriptors
        self.ranks: dict[int, int] = {}  # file descriptor -> rank, once it has said who it is
        try:
            self.socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigurationError(
                f"cannot listen on interface '{interface}' ({error}); give the IP address or the "
                "name of an interface of this machine"
            ) from error
        self.endpoint = str(self.socket.get_string(zmq.LAST_ENDPOINT))

    def look(self) -> list[int]:
        """Return the ranks whose connection has ended since the last call."""
        ended = []
        for event, descriptor in self.watcher.read():
            if event == zmq.EVENT_ACCEPTED:
                self.connected.add(descriptor)
            elif event == zmq.EVENT_DISCONNECTED:
                self.connected.discard(descriptor)
                if descriptor in self.ranks:
                    ended.append(self.ranks.pop(descriptor))
        return ended

    def close(self) -> None:
        """Close."""
        self.watcher.close()
        self.socket.close(linger=0)


@final
class Link:
    """The outgoing socket to one peer.

    Attributes:
        lost: why nothing can be sent any more; "" while the link is good.
        lost_at: when that was seen, on the monotonic clock.
        queue: parcels that ZeroMQ did not take yet, in order.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        peer: int,
        endpoint: str,
        settings: ZmqSettings,
        keys: CurveKeys | None,
    ) -> None:
        self.peer = peer
        self.socket = context.socket(zmq.PUSH)
        _set_up(self.socket, settings, endpoint)
        if keys is not None:  # prove that this is this rank, and accept nobody but the peer
            self.socket.curve_serverkey = keys.publics[peer]
            self.socket.curve_publickey = keys.publics[keys.rank]
            self.socket.curve_secretkey = keys.secret
        self.watcher = _Watcher(self.socket, f"link-{peer}")
        self.queue: deque[Parcel] = deque()
        self.sequences: dict[int, int] = {}
        self.lost, self.lost_at = "", 0.0
        self.socket.connect(endpoint)

    def next_sequence(self, tag: int) -> int:
        """Return the number of the next message of a channel, and count it."""
        number = self.sequences.get(tag, 0)
        self.sequences[tag] = number + 1
        return number

    def send(self, parcel: Parcel) -> None:
        """Send now, or queue after what waits."""
        if self.queue or not parcel.send(self.socket):
            self.queue.append(parcel)

    def flush(self) -> None:
        """Send what waits, as far as there is room."""
        while self.queue and self.queue[0].send(self.socket):
            self.queue.popleft()

    def look(self) -> None:
        """Notice the end of the connection."""
        for event, value in self.watcher.read():
            if self.lost or event == zmq.EVENT_ACCEPTED:
                continue
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self.lost = f"rank {self.peer} refused this rank's key (status {value})"
            elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self.lost = (
                    f"what listens for rank {self.peer} does not speak this rank's protocol; "
                    "give all ranks the same curve_keys"
                )
            else:
                self.lost = f"rank {self.peer} is gone (its connection ended)"
            self.lost_at = time.monotonic()

    def close(self, linger: float) -> None:
        """Close; what ZeroMQ has taken leaves within ``linger`` seconds in the background."""
        self.watcher.close()
        self.socket.close(linger=0 if self.lost else round(linger * 1000))


def _set_up(socket: zmq.Socket[Any], settings: ZmqSettings, address: str) -> None:
    """Set what both ends of a connection share.

    No reconnection: a new connection after a death would hide it, and the loss of what was queued.
    """
    socket.ipv6 = ":" in address.removeprefix("tcp://").rpartition(":")[0]  # colons before the port
    socket.sndhwm = socket.rcvhwm = settings.high_water
    socket.maxmsgsize = settings.max_message
    socket.reconnect_ivl = -1
    socket.linger = 0
    socket.heartbeat_timeout = socket.heartbeat_ttl = round(HEARTBEAT * 1000)
    socket.heartbeat_ivl = socket.heartbeat_timeout // 4


@final
class _Watcher:
    """Reads what happened to the connections of a socket, in order (ZeroMQ's socket monitor)."""

    def __init__(self, socket: zmq.Socket[Any], name: str) -> None:
        self.socket = socket
        failed = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        ended = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        socket.monitor(f"inproc://{name}", zmq.EVENT_ACCEPTED | ended | failed)
        self.events = socket.context.socket(zmq.PAIR)
        self.events.rcvhwm = 0  # unbounded: a full one would block the thread that moves the bytes
        self.events.linger = 0
        self.events.connect(f"inproc://{name}")

    def read(self) -> list[tuple[int, int]]:
        """Return ``(event, value)`` of all that happened since the last call."""
        happened = []
        while self.events.events & zmq.POLLIN:
            message = recv_monitor_message(self.events)
            happened.append((int(message["event"]), int(message["value"])))
        return happened

    def close(self) -> None:
        """Stop; before its socket is closed."""
        self.socket.disable_monitor()
        self.events.close()
