"""The numbers of the ZeroMQ transport, each with its unit and where it comes from."""

from __future__ import annotations

from dataclasses import dataclass, fields

from sparsync.errors import ConfigurationError

__all__ = ["ZmqSettings"]


@dataclass(frozen=True)
class ZmqSettings:
    """How the transport buffers, waits and notices deaths.

    Attributes:
        high_water: messages per link that ZeroMQ queues on either side; above, the sender waits.
        max_message: bytes of one payload; a peer that announces more is cut off.
        max_unclaimed: bytes of messages that arrived before anybody asked for them.
        inline: payloads up to so many bytes travel in the header's frame: one copy more, but a frame
            less to pass to ZeroMQ's thread and back (ours: of 57 kB to each of 7 ranks, a second
            frame took 13 us of the caller and 7 us of that thread, cold; the copy 10 us).
        zero_copy: payloads from so many bytes on are sent from the tensor's own memory, which costs
            a thread's wake-up (ours: a memcpy of 1 MiB takes as long).
        heartbeat: seconds of silence of a connection, asked for a sign of life, after which its
            other end is dead; a death that the operating system reports is noticed at once.
        linger: seconds that ``close`` gives the last messages to leave.
        tick: seconds between looks at connections while a wait is on (ten times as many while messages
            come).
        watch_after: seconds of waiting for a rank, never heard of, before a link to it is opened,
            just to see whether it lives.
        grace: seconds between the loss of a link to a rank, never heard of, and giving up on it:
            its first message may be under way.

    Raises:
        ConfigurationError: a number that is not above zero.
    """

    high_water: int = 64
    max_message: int = 2**31
    max_unclaimed: int = 2**31
    inline: int = 2**17
    zero_copy: int = 2**20
    heartbeat: float = 20.0
    linger: float = 5.0
    tick: float = 0.05
    watch_after: float = 0.2
    grace: float = 0.5

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int | float) or not 0 < value < 2**62:
                raise ConfigurationError(f"{field.name} is {value!r}; give a number above zero")
