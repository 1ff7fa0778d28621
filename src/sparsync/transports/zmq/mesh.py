"""The sockets of a rank, one that all others send to and a link to each of them, and their progress."""

from __future__ import annotations

import os
import secrets
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, final

import torch
import zmq
from torch import Tensor
from zmq.utils.monitor import recv_monitor_message

from sparsync.errors import ConfigurationError, WireFormatError
from sparsync.transports.zmq.curve import CurveKeys, Doorkeeper
from sparsync.transports.zmq.messages import (
    APART,
    GIVE_UP,
    HEADER_BYTES,
    HELLO,
    Header,
    Mailboxes,
)

__all__ = ["Link", "Mesh", "Parcel", "bind", "tcp"]

LINGER: Final = 5.0  # seconds that ``close`` gives the last messages to leave
LINGER_ABORTED: Final = 1.0  # the same after ``abort``, of what was sent in earlier exchanges
TICK: Final = 0.05  # seconds between looks at connections while a wait is on
BUSY: Final = 10  # ticks between looks at connections while messages come
# seconds of silence of a connection, asked for a sign of life, after which its other end is dead; a
# death that the operating system reports is noticed at once
HEARTBEAT: Final = 20.0
# seconds between the loss of the link to a rank that was never heard of and giving up on that rank: its
# first message may be under way
GRACE: Final = 0.5
ALIGNMENT: Final = 8  # bytes; kernels read received payloads as words
SHARED: Final = 8192  # bytes that ZeroMQ reads at once: a shorter frame may lie among others
HIGH_WATER: Final = (
    64  # messages per link that ZeroMQ queues on either side; above, the sender waits
)
MAX_MESSAGE: Final = 2**31  # bytes of one payload; a peer that announces more is cut off
MAX_UNCLAIMED: Final = 2**31  # bytes of messages that arrived before anybody asked for them
MAX_EARLY: Final = 2**26  # bytes of messages of a group that this rank is not in yet
MOST_MEMBERS: Final = 1024  # of a group that changes
# payloads up to this many bytes travel in the header's frame: one copy more, but a frame less to pass
# to ZeroMQ's thread and back (``benchmarks/transports.py``: of 57 kB to each of 7 ranks, a second frame
# took 13 us of the caller and 7 us of that thread; the copy 10 us)
INLINE: Final = 2**17
# payloads from this many bytes on are sent from the tensor's own memory, which costs a thread's
# wake-up (a memcpy of 1 MiB takes as long)
ZERO_COPY: Final = 2**20
# longer payloads travel in frames of this size: every frame is a sign of life, so that a payload that
# takes longer than a heartbeat over a slow link does not look like a death
PIECE: Final = 2**20
WATCHED: Final = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


@final
class Parcel:
    """A message to be sent: one frame with a short payload after its header, or a header and frames."""

    def __init__(self, header: bytes, payload: Tensor) -> None:
        length, view = payload.numel(), payload.contiguous().numpy().data
        self.length = length
        self.frames: list[Any] = [header, view]
        if length <= INLINE:
            self.frames = [header + view if length else header]
        elif length > PIECE:
            self.frames = [header, *(view[at : at + PIECE] for at in range(0, length, PIECE))]
        self.zero_copy = length >= ZERO_COPY
        self.tracker: zmq.MessageTracker | None = None  # until it is done ZeroMQ reads the payload
        self.accepted = False  # by ZeroMQ

    @property
    def done(self) -> bool:
        """Whether the payload may change."""
        return self.accepted and (self.tracker is None or self.tracker.done)

    def send(self, socket: zmq.Socket[Any]) -> bool:
        """Give it to ZeroMQ without waiting; False: the queue is full.

        Once the header is accepted the payload is too: the limit counts whole messages.
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
    """The outgoing socket to one peer, on which nobody else is accepted."""

    def __init__(self, mesh: Mesh, peer: int) -> None:
        self.peer, self.endpoint, keys = peer, mesh.endpoints[peer], mesh.keys
        address = self.endpoint.partition(" ")[0]
        self.socket, self.events = _watched(mesh.context, zmq.PUSH, address)
        if keys is not None:
            keys.show(self.socket, keys.publics[peer])
        self.queue: deque[Parcel] = deque()  # that ZeroMQ did not take yet, in order
        self.sequences: Counter[int] = Counter()  # messages sent, by channel
        self.lost = ""  # why nothing can be sent any more
        self.lost_at = 0.0  # when that was seen, on the monotonic clock
        self.socket.connect(address)

    def close(self) -> None:
        """Close at once; what waits is dropped."""
        self.socket.disable_monitor()
        self.events.close()
        self.socket.close(linger=0)

    def next_sequence(self, tag: int) -> int:
        """Return the number of the next message of a channel, and count it."""
        self.sequences[tag] += 1
        return self.sequences[tag] - 1

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
        for event, value in _happened(self.events):
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


@final
class Mesh:
    """The sockets of one rank: an incoming one, bound to one interface, and a link to every other."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        keys: CurveKeys | None,
        interface: str,
        port_range: tuple[int, int] | None = None,
        advertise: str | None = None,
        *,
        changing: bool = False,
    ) -> None:
        self.rank, self.world_size, self.keys = rank, world_size, keys
        self.job, self.endpoints = 0, list[str]()
        # messages of a group that this rank is not in yet; None: its group never changes
        self._early: deque[tuple[int, list[zmq.Frame]]] | None = deque() if changing else None
        self._past: set[int] = set()  # jobs of groups that it has left
        self.links: dict[int, Link] = {}
        self.wake_word = secrets.token_bytes(16)  # nobody else can say it
        self.mailboxes = Mailboxes(MAX_UNCLAIMED)
        self.dropped: Counter[str] = Counter()  # messages that were refused, by reason
        self.lost: dict[int, str] = {}  # ranks that are gone, and why
        self._connected: set[int] = set()  # file descriptors
        self._ranks: dict[int, int] = {}  # file descriptor -> rank, once it has said who it is
        self._heard: set[int] = set()
        self._ended: set[int] = set()
        self._aborted = False
        self._busy = False  # a message has come since the last look at the clock
        self._looked = self._next_look = 0.0

        context: zmq.Context[Any] = zmq.Context()
        # per link: a socket and its monitor's pair
        context.max_sockets = 8 + 3 * (MOST_MEMBERS if changing else world_size)
        context.linger = 0
        context.rcvhwm = 0  # a full queue of events would block the thread that moves the bytes
        self.context = context
        address = tcp(interface)
        self.incoming, self._events = _watched(context, zmq.PULL, f"{address}:*")
        # accepts encrypted connections only
        self.doorkeeper = None if keys is None else keys.guard(self.incoming)
        self.incoming.rcvtimeo = round(TICK * 1000)
        sockets = self.incoming, self._events
        self._linger = [LINGER]
        self.close = weakref.finalize(
            self, _close, context, sockets, self.links, self.doorkeeper, self._linger, os.getpid()
        )
        try:
            bind(self.incoming, address, port_range)
        except zmq.ZMQError as error:
            self.close()
            if port_range is not None and error.errno == zmq.EADDRINUSE:
                raise ConfigurationError(
                    f"no port from {port_range[0]} to {port_range[1]} is free on interface "
                    f"'{interface}'; give a port_range= with one for every communicator of every rank "
                    "on this machine"
                ) from error
            raise ConfigurationError(
                f"cannot listen on interface '{interface}' ({error}); give the IP address or the "
                "name of an interface of this machine"
            ) from error
        self.endpoint = str(self.incoming.get_string(zmq.LAST_ENDPOINT))
        if advertise is not None:
            self.endpoint = f"{tcp(advertise)}:{self.endpoint.rpartition(':')[2]}"

    def connect(self, job: int, endpoints: list[str]) -> None:
        """Open the links that are not open, and tell the other ends who this is."""
        self.job, self.endpoints = job, endpoints
        known = {link.endpoint: link for link in self.links.values() if not link.lost}
        closing = [link for link in self.links.values() if link.lost]
        self.links.clear()  # the dictionary stays: at exit, its links are closed
        for shift in range(1, self.world_size):
            peer = (self.rank + shift) % self.world_size
            link = known.pop(endpoints[peer], None) or Link(self, peer)
            link.peer = peer
            link.queue.clear()
            link.sequences.clear()
            self.links[peer] = link
        for link in (*closing, *known.values()):
            link.close()
        self._tell_all(HELLO)  # a peer may be gone again already

    def regroup(self, rank: int, job: int, endpoints: list[str]) -> None:
        """Be a rank of another group, over the same incoming socket; the former one's messages go."""
        if self.keys is not None:
            publics = [endpoint.partition(" ")[2].encode() for endpoint in endpoints]
            unlisted = [rank for rank, key in enumerate(publics) if key not in self.keys.listed]
            if unlisted:
                raise ConfigurationError(
                    f"rank {rank}: the keys of ranks {unlisted} of the new group are not listed; form "
                    "groups of ranks whose keys all have, and end their endpoints with these"
                )
            self.keys = replace(self.keys, publics=publics)
        for link in self.links.values():
            link.look()
        self._past.add(self.job)
        self.rank, self.world_size, self.mailboxes = rank, len(endpoints), Mailboxes(MAX_UNCLAIMED)
        for known in (self.lost, self._ranks, self._heard, self._ended):
            known.clear()
        self.connect(job, endpoints)
        early, self._early = self._early or (), deque()
        for _, frames in early:
            self._take(frames)  # those of yet another group wait on

    def give_up(self) -> None:
        """Tell the others that this rank waits for nobody any more, and let them not wait either."""
        self._tell_all(GIVE_UP)

    def _tell_all(self, flag: int) -> None:
        header = Header(flag, self.rank, self.job, 0, 0, 0, 0, 0).pack()
        nothing = torch.empty(0, dtype=torch.uint8)
        for link in self.links.values():
            link.send(Parcel(header, nothing))

    def abort(self) -> None:
        """Let the waits of another thread end; whoever calls closes the sockets when they have."""
        self._aborted = True
        self._linger[0] = LINGER_ABORTED
        # not at exit by itself: where the other thread does not end, libzmq would abort the process
        self.close.atexit = False

    def check_open(self) -> None:
        """Refuse the use of a closed communicator."""
        if self._aborted or not self.close.alive:
            raise ConfigurationError(
                f"rank {self.rank}: this communicator is closed; make a new one"
            )

    def refusals(self) -> dict[str, int]:
        """Count what was refused, by reason: messages, and connections whose key is not listed."""
        refused = 0 if self.doorkeeper is None else self.doorkeeper.refused
        return {**self.dropped, **({"unlisted keys": refused} if refused else {})}

    # ---- progress ------------------------------------------------------------------------------

    def advance(self, seconds: float, expected: int = 1) -> None:
        """Wait at most ``seconds`` (and at most two ticks) for anything to happen, and do it.

        A long wait looks at the ``expected`` messages together, since a rank that shares its core pays
        most for what it does between two naps.
        """
        if seconds <= 0:
            self.drain()
        elif any(link.queue for link in self.links.values()):
            self._wait_for_room(min(seconds, TICK))
        elif seconds >= TICK:
            self._take_several(expected)  # sleeps inside ZeroMQ, for one tick
        elif self.incoming.poll(max(round(seconds * 1000), 1)):
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
        poller.register(self.incoming, zmq.POLLIN)
        for link in self.links.values():
            if link.queue and not link.lost:
                poller.register(link.socket, zmq.POLLOUT)
        poller.poll(max(round(seconds * 1000), 1))
        self.drain()

    def _look(self, now: float) -> None:
        """Notice deaths: ended connections, and ranks that never spoke and take nothing."""
        self._look_at_incoming()
        for link in self.links.values():
            link.look()
        silent = [
            rank
            for rank, link in self.links.items()
            if link.lost and now - link.lost_at >= GRACE and rank not in self.lost
        ]
        if self._ended or silent:
            self.drain()  # an end is reported after the last message
        for rank in sorted(self._ended):
            self.lose(rank, "its connection ended; it died, or it closed its communicator")
        self._ended.clear()
        for rank in silent:
            if rank not in self._ranks.values():
                self.lose(rank, self.links[rank].lost)
        for rank, reason in self.lost.items():
            self.mailboxes.fail(rank, reason)
        if len(self.lost) == self.world_size - 1 and self.lost:
            self.mailboxes.fail(None, "all other ranks are gone")

    def _look_at_incoming(self) -> None:
        for event, descriptor in _happened(self._events):
            if event == zmq.EVENT_ACCEPTED:
                self._connected.add(descriptor)
            elif event == zmq.EVENT_DISCONNECTED:
                self._connected.discard(descriptor)
                if descriptor in self._ranks:
                    self._ended.add(self._ranks.pop(descriptor))

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
        frames = [self.incoming.recv(flags, copy=False)]
        while frames[-1].more:
            frames.append(self.incoming.recv(copy=False))
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
        if header.job != self.job and self._early is not None and header.job not in self._past:
            self._early.append((sum(len(part.buffer) for part in frames), frames))
            while sum(size for size, _ in self._early) > MAX_EARLY:
                self._early.popleft()
                self.dropped["of a group that did not come"] += 1
        elif header.job != self.job:
            self.dropped["of another job"] += 1
        elif header.source >= self.world_size or header.source == self.rank:
            self.dropped["from an unknown rank"] += 1
        elif self.keys and frame.get("User-Id") != self.keys.publics[header.source].decode():
            self.dropped["from a rank that poses as another"] += 1
        else:
            if header.source not in self._heard:
                self._hear(header.source, frame)
            if header.flags == GIVE_UP:
                self.mailboxes.break_off(f"rank {header.source} has given this step up")
            elif header.flags != HELLO:
                apart, inline = header.flags == APART, len(raw) - HEADER_BYTES
                pieces = [part.buffer for part in frames[1:]] if apart else [raw[HEADER_BYTES:]]
                if (
                    sum(map(len, pieces)) != header.length
                    or (apart and inline)
                    or (len(frames) > 1 and not apart)
                ):
                    raise WireFormatError("the frames are not as long as the header says")
                self._deliver(header, _taken(pieces[0]) if len(pieces) == 1 else _joined(pieces))

    def _deliver(self, header: Header, payload: Tensor) -> None:
        source = header.source
        due = self.mailboxes.next_sequence(source, header.tag)
        if header.sequence < due or source in self.lost:
            self.dropped["a second time, or from a rank given up"] += 1
        elif header.sequence > due:
            self.lose(
                source, f"its message {header.sequence} arrived where {due} was due: one is lost"
            )
        elif not self.mailboxes.deliver(header, payload):
            self.lose(
                source,
                f"messages that nobody receives would take more than {MAX_UNCLAIMED} bytes; "
                "a rank runs too far ahead of the others, as a barrier would prevent",
            )

    def _hear(self, source: int, frame: zmq.Frame) -> None:
        """Note which connection is whose: its end, in order after its messages, is a rank's end."""
        self._heard.add(source)
        descriptor = frame.get(zmq.SRCFD)
        self._look_at_incoming()
        if descriptor in self._connected:
            self._ranks[descriptor] = source
        else:
            self._ended.add(source)  # it connected, spoke, and left


def tcp(host: str) -> str:
    """Return ZeroMQ's address of a host, without a port."""
    return f"tcp://[{host}]" if ":" in host else f"tcp://{host}"


def bind(socket: zmq.Socket[Any], address: str, port_range: tuple[int, int] | None) -> None:
    """Bind the first port that is free."""
    if port_range is None:
        socket.bind(f"{address}:*")
        return
    first, last = port_range
    for port in range(first, last + 1):
        try:
            socket.bind(f"{address}:{port}")
            return
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE or port == last:
                raise


def _watched(
    context: zmq.Context[Any], kind: int, address: str
) -> tuple[zmq.Socket[Any], zmq.Socket[Any]]:
    """Return a socket for one end of connections, and the one that tells what happens to them.

    No reconnection: a new connection after a death would hide it, and the loss of what was queued.
    """
    socket = context.socket(kind)
    socket.ipv6 = ":" in address.removeprefix("tcp://").rpartition(":")[0]  # colons before the port
    socket.sndhwm = socket.rcvhwm = HIGH_WATER
    socket.maxmsgsize = MAX_MESSAGE
    socket.reconnect_ivl = -1
    socket.heartbeat_timeout = socket.heartbeat_ttl = round(HEARTBEAT * 1000)
    socket.heartbeat_ivl = socket.heartbeat_timeout // 4
    return socket, socket.get_monitor_socket(WATCHED)


def _happened(events: zmq.Socket[Any]) -> Iterator[tuple[int, int]]:
    """Yield ``(event, value)`` of all that happened since the last call, in order."""
    while events.poll(0):
        message = recv_monitor_message(events)
        yield int(message["event"]), int(message["value"])


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


def _joined(pieces: Sequence[memoryview]) -> Tensor:
    """Make one tensor of a long payload's frames."""
    whole, at = torch.empty(sum(map(len, pieces)), dtype=torch.uint8), 0
    into = whole.numpy()
    for piece in pieces:
        into[at : at + len(piece)] = piece
        at += len(piece)
    return whole


def _close(
    context: zmq.Context[Any],
    incoming: tuple[zmq.Socket[Any], zmq.Socket[Any]],
    links: dict[int, Link],
    doorkeeper: Doorkeeper | None,
    patience: list[float],
    pid: int,
) -> None:
    """Let the last messages leave, then close everything.  Not a method: it runs at exit as well."""
    if context.closed or os.getpid() != pid:  # a forked child has no part in its parent's sockets
        return
    deadline = time.monotonic() + patience[0]
    for link in links.values():
        while link.queue and not link.lost and time.monotonic() < deadline:
            link.flush()
            link.socket.poll(10, zmq.POLLOUT)
            link.look()
    linger = max(deadline - time.monotonic(), 0.01)
    for link in links.values():
        link.look()
        sent = link.sequences and not link.lost  # a greeting alone is not worth the time
        link.socket.linger = round(1000 * linger) if sent else 0
    for socket, events in [*((link.socket, link.events) for link in links.values()), incoming]:
        socket.disable_monitor()
        events.close()
        socket.close()
    context.term()
    if doorkeeper is not None:
        doorkeeper.thread.join()
