"""The incoming socket of a rank: bound to one interface, any source, and who is connected to it."""

from __future__ import annotations

from typing import Any, final

import zmq

from sparsync.errors import ConfigurationError
from sparsync.transports.zmq.curve import CurveKeys, Doorkeeper
from sparsync.transports.zmq.link import Watcher, set_up
from sparsync.transports.zmq.settings import ZmqSettings

__all__ = ["Incoming"]


@final
class Incoming:
    """The incoming socket of a rank, bound to one interface, and who is connected to it."""

    def __init__(
        self,
        context: zmq.Context[Any],
        interface: str,
        settings: ZmqSettings,
        keys: CurveKeys | None,
    ) -> None:
        self.doorkeeper = None if keys is None else Doorkeeper(context, keys.ranks)
        address = f"tcp://[{interface}]:*" if ":" in interface else f"tcp://{interface}:*"
        self.socket = context.socket(zmq.PULL)
        set_up(self.socket, settings, address)
        if keys is not None:
            keys.serve(self.socket)
        self.socket.rcvtimeo = max(round(settings.tick * 1000), 1)
        self.watcher = Watcher(self.socket, "incoming")
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
