"""What is sent: a header and a payload, in one frame or in two."""

from __future__ import annotations

from typing import Any, Final, final

import zmq
from torch import Tensor

from sparsync.transports.zmq.settings import ZmqSettings

__all__ = ["Parcel"]

NOT_LAST: Final = zmq.NOBLOCK | zmq.SNDMORE  # of a message's frames


@final
class Parcel:
    """A message to be sent.

    Attributes:
        tracker: while it is not done, ZeroMQ reads the payload's memory.
        accepted: ZeroMQ has taken the message.
    """

    def __init__(self, frame: bytes, apart: Tensor | None = None, zero_copy: bool = False) -> None:
        self.frame, self.apart, self.zero_copy = frame, apart, zero_copy
        self.tracker: zmq.MessageTracker | None = None
        self.accepted = False

    @classmethod
    def wrap(cls, header: bytes, payload: Tensor, settings: ZmqSettings) -> Parcel:
        """Put a short payload behind its header in one frame; a long one is a frame of its own."""
        length, payload = payload.numel(), payload.contiguous()
        if length > settings.inline:
            return cls(header, payload, length >= settings.zero_copy)
        return cls(header + payload.numpy().data if length else header)

    def again(self) -> Parcel:
        """Return another parcel with the same bytes."""
        return Parcel(self.frame, self.apart, self.zero_copy)

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
