"""One way to one peer: an outgoing socket, its queue when the peer is slow, its end when it dies."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, final

import zmq
from zmq.utils.monitor import recv_monitor_message

from sparsync.transports.zmq.curve import CurveKeys
from sparsync.transports.zmq.parcel import Parcel
from sparsync.transports.zmq.settings import ZmqSettings

__all__ = ["Link", "Watcher", "set_up"]


def set_up(socket: zmq.Socket[Any], settings: ZmqSettings, address: str) -> None:
    """Set what both ends of a connection share.

    No reconnection: a new connection after a death would hide it, and the loss of what was queued.
    """
    socket.ipv6 = ":" in address.removeprefix("tcp://").rpartition(":")[0]  # colons before the port
    socket.sndhwm = socket.rcvhwm = settings.high_water
    socket.maxmsgsize = settings.max_message
    socket.reconnect_ivl = -1
    socket.linger = 0
    milliseconds = round(settings.heartbeat * 1000)
    socket.heartbeat_ivl = max(milliseconds // 4, 1)
    socket.heartbeat_timeout = milliseconds
    socket.heartbeat_ttl = min(milliseconds, 6_553_500)  # 16 bits of tenths of a second


@final
class Watcher:
    """What happened to the connections of a socket, in order (ZeroMQ's socket monitor)."""

    def __init__(self, socket: zmq.Socket[Any], name: str) -> None:
        self.socket = socket
        failed = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        ended = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        socket.monitor(f"inproc://{name}", zmq.EVENT_ACCEPTED | ended | failed)
        self.events = socket.context.socket(zmq.PAIR)
        self.events.rcvhwm = (
            0  # unbounded: a full queue would block the thread that moves the bytes
        )
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
        self.peer, self.settings = peer, settings
        self.socket = context.socket(zmq.PUSH)
        set_up(self.socket, settings, endpoint)
        if keys is not None:
            keys.join(self.socket, peer)
        self.watcher = Watcher(self.socket, f"link-{peer}")
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
        """Send now, or queue behind what waits."""
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
