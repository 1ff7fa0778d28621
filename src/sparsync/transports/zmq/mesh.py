"""Progress: everything that is under way on the sockets of one rank."""

from __future__ import annotations

import os
import secrets
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, final

import torch
import zmq
from torch import Tensor

from sparsync.errors import ConfigurationError, WireFormatError
from sparsync.transports.zmq.curve import CurveKeys
from sparsync.transports.zmq.messages import (
    APART,
    HEADER_BYTES,
    HELLO,
    Header,
    Mailboxes,
    Message,
    pack,
)
from sparsync.transports.zmq.sockets import LINGER, TICK, Incoming, Link, ZmqSettings

__all__ = ["Mesh"]

BUSY: Final = 10  # ticks between looks at connections while messages come
# seconds of waiting for a rank, never heard of, before a link to it is opened, just to see whether it
# lives; and between the loss of that link and giving up on it: its first message may be under way
WATCH_AFTER: Final = 0.2
GRACE: Final = 0.5
ALIGNMENT: Final = 8  # bytes; kernels read received payloads as words
SHARED: Final = 8192  # bytes that ZeroMQ reads at once: a shorter frame may lie among others


@final
class Mesh:
    """The links of one rank to all others, opened when first used.

    Attributes:
        dropped: messages that were refused, by reason.
        lost: ranks that are gone, and why.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        incoming: Incoming,
        endpoints: Sequence[str],
        rank: int,
        job: int,
        settings: ZmqSettings,
        keys: CurveKeys | None,
    ) -> None:
        self.context, self.incoming, self.endpoints = context, incoming, list(endpoints)
        self.rank, self.job, self.settings, self.keys = rank, job, settings, keys
        self.world_size = len(self.endpoints)
        self.links: dict[int, Link] = {}
        self.wake_word = secrets.token_bytes(16)  # nobody else can say it
        self.mailboxes = Mailboxes(settings.max_unclaimed)
        self.dropped: Counter[str] = Counter()
        self.lost: dict[int, str] = {}
        self._heard: set[int] = set()
        self._ended: set[int] = set()
        self._busy = False  # a message has come since the last look at the clock
        self._looked = self._next_look = 0.0
        self._waiting_since: dict[int, float] = {}
        self.close = weakref.finalize(self, _close, context, incoming, self.links, os.getpid())

    # ---- sending -------------------------------------------------------------------------------

    def link(self, peer: int) -> Link:
        """Return the link to a peer, opened now if it is the first use."""
        link = self.links.get(peer)
        if link is None:
            link = Link(self.context, peer, self.endpoints[peer], self.settings, self.keys)
            self.links[peer] = link
            hello = pack(HELLO, self.rank, self.job, 0, 0, 0, 0, 0)
            link.socket.send(hello, zmq.NOBLOCK)
        return link

    # ---- progress ------------------------------------------------------------------------------

    def advance(self, seconds: float, expected: int = 1) -> None:
        """Wait at most ``seconds`` (and at most two ticks) for anything to happen, and do it.

        Args:
            seconds: 0 does not wait.
            expected: messages that the caller needs; a long wait looks at them together, since a
                rank that shares its core pays most for what it does between two naps.
        """
        if seconds <= 0:
            self.drain()
        elif any(link.queue for link in self.links.values()):
            self._wait_for_room(min(seconds, TICK))
        elif seconds >= TICK:
            self._take_several(expected)  # sleeps inside ZeroMQ, for one tick
        elif self.incoming.socket.poll(max(round(seconds * 1000), 1)):
            self.drain()
        now = time.monotonic()
        if self._busy:  # as long as messages come, looks are rarer: they ask every socket
            self._busy = False
            self._next_look = min(now + TICK, self._looked + BUSY * TICK)
        if now >= self._next_look:
            self._looked, self._next_look = now, now + TICK
            self._look(now)

    def drain(self) -> None:
        """Take in all that has arrived, and send what waits, without waiting."""
        try:
            while True:
                self._take(self._receive(zmq.NOBLOCK))
        except zmq.Again:
            pass
        for link in self.links.values():
            if link.queue:
                link.flush()

    def _wait_for_room(self, seconds: float) -> None:
        poller = zmq.Poller()
        poller.register(self.incoming.socket, zmq.POLLIN)
        for link in self.links.values():
            if link.queue and not link.lost:
                poller.register(link.socket, zmq.POLLOUT)
        poller.poll(max(round(seconds * 1000), 1))
        self.drain()

    def _look(self, now: float) -> None:
        """Notice deaths: ended connections, and ranks that are waited for but never heard of."""
        self._ended.update(self.incoming.look())
        for link in self.links.values():
            link.look()
        if self._ended:
            self.drain()  # an end is reported after the last message
            for rank in sorted(self._ended):
                self.lose(rank, "its connection ended; it died, or it closed its communicator")
            self._ended.clear()
        wanted = self.mailboxes.waiting_for()
        self._waiting_since = {r: self._waiting_since.get(r, now) for r in wanted}
        for rank in wanted:
            self._watch(rank, now)
        if len(self.lost) == self.world_size - 1 and self.lost:
            self.mailboxes.fail(None, "all other ranks are gone")

    def _watch(self, rank: int, now: float) -> None:
        """Judge a rank that a receive waits for by the link to it, unless it has sent before."""
        if rank in self.lost:
            self.mailboxes.fail(rank, self.lost[rank])
        elif rank in self.incoming.ranks.values():
            return
        elif rank not in self.links:
            if now - self._waiting_since[rank] >= WATCH_AFTER:
                self.link(rank)
        elif self.links[rank].lost and now - self.links[rank].lost_at >= GRACE:
            self.drain()
            if rank not in self.incoming.ranks.values():
                self.lose(rank, self.links[rank].lost)

    def lose(self, rank: int, reason: str) -> None:
        """Give up on a rank: receives that name it fail, and so does what is asked of it later."""
        self.lost.setdefault(rank, f"rank {rank}: {reason}")
        self.mailboxes.fail(rank, self.lost[rank])

    # ---- receiving -----------------------------------------------------------------------------

    def _take_several(self, count: int) -> None:
        """Take in ``count`` messages, or those that come within a tick."""
        arrived, until = list[list[zmq.Frame]](), time.monotonic() + TICK
        try:
            while len(arrived) < count and time.monotonic() < until:
                arrived.append(self._receive(0))
        except zmq.Again:
            pass  # a tick without one
        for frames in arrived:
            self._take(frames)

    def _receive(self, flags: int) -> list[zmq.Frame]:
        """Receive one message, whatever it is."""
        frames = [self.incoming.socket.recv(flags, copy=False)]
        while frames[-1].more:
            frames.append(self.incoming.socket.recv(copy=False))
        return frames

    def _take(self, frames: list[zmq.Frame]) -> None:
        """Look at a message, and give it to whom it is for."""
        if len(frames) == 1 and frames[0].buffer == self.wake_word:
            return  # another thread of this rank wants this one to look up
        self._busy = True
        try:
            self._judge(frames)
        except WireFormatError:
            self.dropped["malformed"] += 1

    def _judge(self, frames: list[zmq.Frame]) -> None:
        frame = frames[0]
        raw = frame.buffer
        header = Header.parse(raw)
        if header.job != self.job:
            self.dropped["of another job"] += 1
        elif header.source >= self.world_size or header.source == self.rank:
            self.dropped["from an unknown rank"] += 1
        elif self.keys is not None and frame.get("User-Id") != str(header.source):
            self.dropped["from a rank that poses as another"] += 1
        else:
            if header.source not in self._heard:
                self._hear(header.source, frame)
            if header.flags != HELLO:
                apart, inline = header.flags == APART, len(raw) - HEADER_BYTES
                body = frames[-1].buffer if apart else raw[HEADER_BYTES:]
                if len(body) != header.length or len(frames) != 1 + apart or (apart and inline):
                    raise WireFormatError("the frames are not as long as the header says")
                payload = _taken(body)
                self._deliver(header, payload)

    def _deliver(self, header: Header, payload: Tensor) -> None:
        source = header.source
        due = self.mailboxes.next_sequence(source, header.tag)
        if header.sequence < due or source in self.lost:
            self.dropped["a second time, or from a rank given up"] += 1
        elif header.sequence > due:
            self.lose(
                source, f"its message {header.sequence} arrived where {due} was due: one is lost"
            )
        elif not self.mailboxes.deliver(
            Message(source, header.tag, header.step, header.phase, payload)
        ):
            self.lose(
                source,
                f"messages that nobody receives would take more than {self.settings.max_unclaimed} "
                "bytes; raise max_unclaimed if a rank may run so far ahead",
            )

    def _hear(self, source: int, frame: zmq.Frame) -> None:
        """Note which connection is whose: its end, in order after its messages, is a rank's end."""
        self._heard.add(source)
        descriptor = frame.get(zmq.SRCFD)
        self._ended.update(self.incoming.look())
        if descriptor in self.incoming.connected:
            self.incoming.ranks[descriptor] = source
        else:
            self._ended.add(source)  # it connected, spoke, and left

    def refusals(self) -> dict[str, int]:
        """Count what was refused, by reason: messages, and connections whose key is not listed."""
        keeper = self.incoming.doorkeeper
        refused = {} if keeper is None or not keeper.refused else {"unlisted keys": keeper.refused}
        return {**self.dropped, **refused}

    def check_open(self) -> None:
        """Refuse the use of a closed communicator."""
        if not self.close.alive:
            raise ConfigurationError(
                f"rank {self.rank}: this communicator is closed; make a new one"
            )


def _taken(raw: memoryview) -> Tensor:
    """Make a tensor of a frame's own memory, which the tensor keeps alive, or a copy.

    A short one is copied: ZeroMQ keeps it in a buffer with others, and all would stay alive.
    """
    if len(raw) == 0:
        return torch.empty(0, dtype=torch.uint8)
    if len(raw) <= SHARED:
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    payload = torch.frombuffer(raw, dtype=torch.uint8)
    return payload if payload.data_ptr() % ALIGNMENT == 0 else payload.clone()


def _close(
    context: zmq.Context[Any],
    incoming: Incoming,
    links: dict[int, Link],
    pid: int,
) -> None:
    """Let the last messages leave, then close everything.  Not a method: it runs at exit as well."""
    if context.closed or os.getpid() != pid:  # a forked child has no part in its parent's sockets
        return
    deadline = time.monotonic() + LINGER
    for link in links.values():
        while link.queue and not link.lost and time.monotonic() < deadline:
            link.flush()
            link.socket.poll(10, zmq.POLLOUT)
            link.look()
    for link in links.values():
        link.look()
        link.close(max(deadline - time.monotonic(), 0.01))
    incoming.close()
    context.term()
    if incoming.doorkeeper is not None:
        incoming.doorkeeper.thread.join()
