"""A rank's sockets: one for incoming messages and a link to every other rank."""

from __future__ import annotations

import errno
import os
import secrets
import socket as network
import time
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, final

import torch
import zmq
from torch import Tensor

from sparsync.errors import ConfigurationError, WireFormatError
from sparsync.transports.rendezvous import check_one_interface
from sparsync.transports.zmq.curve import CurveKeys, Doorkeeper, Password
from sparsync.transports.zmq.descriptors import OWN, require_descriptors
from sparsync.transports.zmq.mailbox import (
    APART,
    GIVE_UP,
    HEADER_BYTES,
    HELLO,
    Header,
    Mailboxes,
)
from sparsync.transports.zmq.peers import (
    MAX_MESSAGE,
    PIECE,
    TAMPERED,
    Link,
    Parcel,
    happened,
    host_and_port,
    longest_silence,
    watched,
)

__all__ = ["Mesh", "bind", "tcp"]

LINGER: Final = 5.0  # seconds that ``close`` waits until the last messages are sent
# The same limit, but counted from ``abort``.  It is shorter, because the waiting thread also takes time
# to end, and the whole process must end within 5 s.
LINGER_ABORTED: Final = 4.5
LEAST_LINGER: Final = 1.0  # seconds that ``close`` waits in any case
TICK: Final = 0.05  # seconds between checks of connections during a wait
BUSY: Final = 10  # ticks between checks of connections while messages arrive
# Seconds before this rank gives up on a rank whose link was lost before it sent anything: its first
# message may still be in flight.
GRACE: Final = 0.5
# The same for a rank that has sent messages but was never reached: it may have closed immediately after
# its last messages, which may still be in flight.
LATE: Final = 3.0
ALIGNMENT: Final = 8  # bytes; kernels read received payloads as words
# bytes that ZeroMQ reads at a time; shorter frames may share a buffer with others
SHARED: Final = 8192
# limit on the bytes of messages that no receive has claimed yet; even the longest message must fit
MAX_UNCLAIMED: Final = MAX_MESSAGE
MAX_EARLY: Final = 2**26  # limit on the bytes of messages for groups not joined yet
# memory overhead per message, in bytes; it matters because many messages are short
PER_MESSAGE: Final = 2**9
MOST_FRAMES: Final = 1 + MAX_MESSAGE // PIECE  # limit on the frames of one message
HANDSHAKE: Final = 10.0  # seconds within which a connecting peer must identify itself
STRANGERS: Final = 16  # silent connections allowed besides those of ranks that have sent nothing
MOST_MEMBERS: Final = 1024  # limit on the members of a changing group


@final
class _Patience:
    """The time left for the last messages, kept outside of the mesh, which may be freed before exit."""

    def __init__(self) -> None:
        self.aborted: float | None = None  # on the monotonic clock

    def until(self) -> float:
        """Return the time at which messages that are still unsent are dropped."""
        now = time.monotonic()
        if self.aborted is None:
            return now + LINGER
        return max(self.aborted + LINGER_ABORTED, now + LEAST_LINGER)


@final
class Mesh:
    """The sockets of one rank: an incoming one, bound to one interface, and a link to every peer."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        keys: CurveKeys | None,
        interface: str,
        timeout: float,
        connect_timeout: float,
        port_range: tuple[int, int] | None = None,
        advertise: str | None = None,
        *,
        changing: bool = False,
    ) -> None:
        self.rank, self.world_size, self.keys = rank, world_size, keys
        self._timeouts = timeout, connect_timeout
        self.job, self.endpoints = 0, list[str]()
        # messages for groups that this rank has not joined yet; None if the group never changes
        self._early: deque[tuple[int, list[zmq.Frame]]] | None = deque() if changing else None
        self._early_bytes = 0  # bytes of all early messages
        self._past: set[int] = set()  # job numbers of groups that this rank has left
        self.links: dict[int, Link] = {}
        self.wake_word = secrets.token_bytes(16)  # no peer can guess it
        self.mailboxes = Mailboxes(MAX_UNCLAIMED)
        self.dropped: Counter[str] = Counter()  # refused messages, by reason
        self.lost: dict[int, str] = {}  # rank that was given up -> reason
        self._connected: dict[int, float] = {}  # file descriptor -> time of the connection
        self._spoke: set[int] = set()  # descriptors over which a message has arrived
        self._ranks: dict[int, int] = {}  # file descriptor -> rank, once it has identified itself
        self._heard: set[int] = set()  # ranks from which a message has arrived
        self._ended: set[int] = set()  # ranks whose connection has ended, until the next check
        self._foreign = 0  # number of connections of another protocol
        # time of a failure that seems to be of a rank's connection, whose bytes were changed; or None
        self._suspected: float | None = None
        self._aborted = False
        self._busy = False  # whether a message has arrived since the last check
        self._looked = self._next_look = 0.0

        require_descriptors(rank, world_size - 1, OWN)
        # use a private context, so that no other user of pyzmq in this process can exhaust or terminate
        # it
        context: zmq.Context[Any] = zmq.Context()
        sockets = list[zmq.Socket[Any]]()
        guards = list[Doorkeeper]()
        # The finalizer is created before any socket: a context with an open socket never terminates, and
        # neither does its process.  The finalizer refers to the containers, which are filled later, and
        # not to ``self``, which it would keep alive.
        self._patience = _Patience()
        self._reserved = [os.open(os.devnull, os.O_RDONLY)]  # a descriptor kept free for ``_cut``
        containers = sockets, self.links, guards, self._reserved
        self.close = weakref.finalize(
            self, _close, context, *containers, self._patience, os.getpid()
        )
        # a link has three sockets: its own and the two ends of its monitor
        context.max_sockets = 8 + 3 * (MOST_MEMBERS if changing else world_size)
        context.linger = 0
        context.rcvhwm = 0  # a full queue of events would block the thread that moves the bytes
        self.context = context
        try:
            self._listen(interface, port_range, advertise, sockets, guards)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigurationError(f"rank {rank} cannot open its sockets: {error}") from error
        except BaseException:
            self.close()
            raise

    def _listen(
        self,
        interface: str,
        port_range: tuple[int, int] | None,
        advertise: str | None,
        sockets: list[zmq.Socket[Any]],
        guards: list[Doorkeeper],
    ) -> None:
        """Bind the incoming socket behind a guard: peers must authenticate before they can send."""
        self.incoming, self._events = watched(
            self.context, zmq.PULL, f"{tcp(interface)}:*", self._timeouts[0], HANDSHAKE
        )
        sockets += self.incoming, self._events
        # start the guard before binding: a peer that connected in between would not be checked
        guard: CurveKeys | Password = Password() if self.keys is None else self.keys
        self.doorkeeper = guard.guard(self.incoming)
        guards.append(self.doorkeeper)
        self.incoming.rcvtimeo = round(TICK * 1000)
        self.address = bind(self.incoming, interface, port_range, advertise)
        # the endpoint is all that other ranks need to connect, apart from this rank's public key
        self.endpoint = self.address
        if isinstance(guard, Password):
            self.endpoint = f"{self.address} {guard.word.decode()}"

    def connect(self, job: int, endpoints: list[str]) -> None:
        """Open the missing links, and greet all peers so that they know this rank."""
        self.job, self.endpoints = job, endpoints
        known = {link.endpoint: link for link in self.links.values() if not link.lost}
        closing = [link for link in self.links.values() if link.lost]
        new = [e for rank, e in enumerate(endpoints) if rank != self.rank and e not in known]
        require_descriptors(self.rank, len(new))
        self.links.clear()  # keep the dictionary itself, because the finalizer closes the links in it
        try:
            # rotate the peers, so that not all ranks connect to rank 0 first
            for shift in range(1, self.world_size):
                peer = (self.rank + shift) % self.world_size
                link = known.pop(endpoints[peer], None) or Link(
                    self.context, peer, endpoints[peer], self.keys, *self._timeouts
                )
                link.begin(peer)
                self.links[peer] = link
        finally:
            for link in (*closing, *known.values()):
                link.leave()
        self._tell_all(HELLO)  # sends may fail, because a peer may have disconnected again

    def regroup(self, rank: int, job: int, endpoints: list[str]) -> None:
        """Leave the group for a new one, on the same socket; drop the former group's messages."""
        if self.keys is not None:
            publics = [endpoint.partition(" ")[2].encode() for endpoint in endpoints]
            unlisted = [rank for rank, key in enumerate(publics) if key not in self.keys.listed]
            if unlisted:
                raise ConfigurationError(
                    f"rank {rank}: the keys of ranks {unlisted} of the new group are not listed; "
                    "form groups of ranks whose keys every rank lists, and append its public key "
                    "to each endpoint"
                )
            self.keys = replace(self.keys, publics=publics)
        for link in self.links.values():
            link.look()
        self._past.add(self.job)
        self.mailboxes.break_off("this rank is in another group now")
        self.rank, self.world_size, self.mailboxes = rank, len(endpoints), Mailboxes(MAX_UNCLAIMED)
        for known in (self.lost, self._ranks, self._heard, self._ended):
            known.clear()
        self.connect(job, endpoints)
        # Handle the messages that members of the new group sent before this rank joined.  Messages of
        # other groups are again kept for later.
        early, self._early, self._early_bytes = self._early or (), deque(), 0
        for _, frames in early:
            self._take(frames)

    def give_up(self) -> None:
        """Tell the other ranks that this rank has stopped waiting, so that they also stop."""
        self._tell_all(GIVE_UP)

    def _tell_all(self, flag: int) -> None:
        header = Header(flag, self.rank, self.job, 0, 0, 0, 0, 0, 0).pack()
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        for link in self.links.values():
            link.send(Parcel(header, nothing))

    def abort(self) -> None:
        """End other threads' waits; the caller closes the sockets once these waits have ended."""
        self._aborted = True
        self._patience.aborted = time.monotonic()
        # do not close the mesh at exit: if the other thread were still running, libzmq would abort the
        # process
        self.close.atexit = False

    def check_open(self) -> None:
        """Raise an error if the communicator is closed."""
        if self._aborted or not self.close.alive:
            raise ConfigurationError(
                f"rank {self.rank}: this communicator is closed; make a new one"
            )

    def refusals(self) -> dict[str, int]:
        """Return the numbers of refused messages and connections, by reason."""
        connections = {
            "wrong passwords" if self.keys is None else "unlisted keys": self.doorkeeper.refused,
            "connections of another protocol": self._foreign,
        }
        return {**self.dropped, **{why: count for why, count in connections.items() if count}}

    def state_of(self, rank: int) -> str:
        """Describe how far a rank is connected to this one; empty if it is, in both directions."""
        link = self.links.get(rank)
        if link is None:  # a channel of a former group is being used
            return f"this group of {self.world_size} has no such rank; make channels again"
        if link.state or rank in self._heard:
            return link.state
        return f"it has not reached this rank at {self.address}"

    # ---- progress ------------------------------------------------------------------------------

    def advance(self, seconds: float, expected: int = 1) -> None:
        """Wait at most ``seconds``, and at most two ticks, for an event; handle all events.

        A long wait receives all ``expected`` messages before it handles them, because work between two
        sleeps is expensive on a core that several ranks share.
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
        if self._busy:  # check less often while messages arrive, because a check polls every socket
            self._busy = False
            self._next_look = min(now + TICK, self._looked + BUSY * TICK)
        if now >= self._next_look:
            self._looked, self._next_look = now, now + TICK
            self._look(now)

    def drain(self) -> None:
        """Receive all messages that have arrived, and send queued ones, without waiting."""
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
        """Detect lost ranks: by ended connections, or because they were not reached or sent nothing."""
        self._look_at_incoming()
        for link in self.links.values():
            link.look()
        # The end of a connection is reported after its last message.  Receive all messages first, because
        # receives whose message has arrived must not fail.
        altered = self._suspected is not None and now > self._suspected + TICK
        if self._ended or altered or self._unreached(now):
            self.drain()
        if altered:
            self._break_off_altered()
        for rank in sorted(self._ended):
            self.lose(
                rank,
                "its connection ended; it died, closed its communicator, or gave no sign of life for "
                f"{longest_silence(self._timeouts[0]):g} s{TAMPERED if self.keys else ''}",
            )
        self._ended.clear()
        for rank, reason in self._unreached(now).items():
            self.lose(rank, reason)
        for rank, reason in self.lost.items():
            self.mailboxes.fail(rank, reason)
        if len(self.lost) == self.world_size - 1 and self.lost:
            self.mailboxes.fail(None, "all other ranks are gone")
        self._turn_away(now)

    def _unreached(self, now: float) -> dict[int, str]:
        """Return the ranks to give up on because no connection was possible, with the reasons.

        Ended connections are not handled here: the incoming socket reports the end in order, after the
        rank's messages.
        """
        found, here = dict[int, str](), set(self._ranks.values())
        for rank, link in self.links.items():
            if rank in self.lost:
                continue
            if link.lost and not (link.opened and rank in here):
                if now - link.lost_at >= (LATE if rank in here else GRACE):
                    unheard = link.opened and rank not in self._heard
                    found[rank] = link.lost + f"; {self._unheard()}" * unheard
            elif rank not in self._heard and self._early is None and now > link.by + GRACE:
                found[rank] = f"{self._unheard()} within {self._timeouts[1]:g} s"
        return found

    def _unheard(self) -> str:
        return (
            f"it has not reached this rank at {self.address}: see its own error, and let that port in "
            "through the firewall here"
        )

    def _look_at_incoming(self, heard: int | None = None) -> None:
        """Record the events of connections; ``heard`` is the connection of the message just received."""
        # A rank's first message and the failure of its second may be read together.  The rank has then
        # already sent a message when the failure is handled here, but ``_spoke`` does not include it yet.
        spoke = {*self._spoke, *(() if heard is None else (heard,))}
        for event, value in happened(self._events):
            if event == zmq.EVENT_ACCEPTED:
                self._connected[value] = time.monotonic()
                # an earlier connection, whose number this one got, has sent the messages
                for spoken in (self._spoke, spoke):
                    spoken.discard(value)
            elif event == zmq.EVENT_DISCONNECTED:
                if self._suspected is not None and value not in spoke and value not in self._ranks:
                    self._suspected = None
                    self._foreign += 1
                self._connected.pop(value, None)
                self._spoke.discard(value)
                spoke.discard(value)
                if value in self._ranks:
                    self._ended.add(self._ranks.pop(value))
            elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                # The event does not say which connection failed.  As long as any connection has sent
                # nothing, assume that a stranger's failed, so that no stranger can end the job this way.
                # For the same reason, a rank's connection is only suspected: a stranger's ends at once,
                # whereas ZeroMQ leaves a rank's open (``_break_off_altered``).
                ranks = self._ranks or heard is not None
                if ranks and self._connected.keys() <= spoke:
                    self._suspected = self._suspected or time.monotonic()
                else:
                    self._foreign += 1
            elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                # the other end noticed first that the protocols differ, and disconnected
                self._foreign += 1

    def _break_off_altered(self) -> None:
        """End all waits, because a message to this rank is lost and ZeroMQ does not report its sender.

        ZeroMQ 4.3.5 stops reading such a connection but leaves it open (its event overwrites the error
        number that would close it).  So in a changing group, this method closes all connections.  The
        peers notice this, and reconnect in the next group.
        """
        self._suspected = None
        self.mailboxes.break_off(
            "bytes on their way to this rank were changed, so a message was refused; something between "
            "the machines damages them, or somebody tampers with them"
        )
        for descriptor in list(self._ranks) if self._early is not None else ():
            self._cut(descriptor)

    def _turn_away(self, now: float) -> None:
        """Close the oldest silent connections if there are too many."""
        most = STRANGERS + self.world_size - 1 - len(self._heard)
        if len(self._connected) - len(self._spoke) > most:
            silent = [
                (since, descriptor)
                for descriptor, since in self._connected.items()
                if descriptor not in self._spoke and now - since > GRACE
            ]
            for _, descriptor in sorted(silent)[: max(len(silent) - most, 0)]:
                self._cut(descriptor)

    def _cut(self, descriptor: int) -> None:
        """End an incoming connection.

        ZeroMQ has no call for this, but it closes connections that have ended.  So this method shuts the
        connection down in the kernel, through a second descriptor of the same socket.
        """
        # use the reserved descriptor, because strangers may hold all other descriptors that are allowed
        try:
            twin = network.socket(fileno=os.dup2(descriptor, self._reserved[0], inheritable=False))
        except OSError:
            return  # the connection has already ended
        try:
            # ``descriptor`` may belong to a newer connection by now.  But its number can be reused only
            # after ZeroMQ has closed the old connection, and ZeroMQ reports the end before it closes.
            # So if no end has been reported, the twin is the right connection.
            self._look_at_incoming()
            if descriptor in self._connected:
                twin.shutdown(network.SHUT_RDWR)
        except OSError:
            pass  # the connection has ended in the meantime
        finally:
            twin.detach()  # the number stays reserved

    def lose(self, rank: int, reason: str) -> None:
        """Give up on a rank; receives from it fail from now on."""
        self.lost.setdefault(rank, f"rank {rank}: {reason}")
        self.mailboxes.fail(rank, self.lost[rank])

    # ---- receiving -----------------------------------------------------------------------------

    def _take_several(self, count: int) -> None:
        """Receive ``count`` messages, or as many as arrive within a tick."""
        arrived, until = list[list[zmq.Frame]](), time.monotonic() + TICK
        try:
            while len(arrived) < count and time.monotonic() < until:
                arrived.append(self._receive(0))
        except zmq.Again:
            pass  # no message for a tick
        for frames in arrived:
            self._take(frames)

    def _receive(self, flags: int) -> list[zmq.Frame]:
        """Receive one message of any kind; return one empty frame if it is too long."""
        frames = [self.incoming.recv(flags, copy=False)]
        nbytes = len(frames[0].buffer)
        while frames[-1].more:
            frames.append(self.incoming.recv(copy=False))
            nbytes += len(frames[-1].buffer)
            if len(frames) > MOST_FRAMES or nbytes > MAX_MESSAGE + HEADER_BYTES:
                return self._too_long(frames[0])
        return frames

    def _too_long(self, first: zmq.Frame) -> list[zmq.Frame]:
        """Cut the connection over which ``first`` came; read and drop the rest of the message."""
        self._look_at_incoming()
        self._cut(first.get(zmq.SRCFD))
        while self.incoming.rcvmore:
            self.incoming.recv()
        return [zmq.Frame(b"")]

    def _take(self, frames: list[zmq.Frame]) -> None:
        """Check a message, and give it to the receive that waits for it."""
        if len(frames) == 1 and frames[0].buffer == self.wake_word:
            return  # not a message: another thread on this rank ends this thread's wait
        self._busy = True
        try:
            self._judge(frames)
        except WireFormatError:
            self.dropped["malformed"] += 1

    def _judge(self, frames: list[zmq.Frame]) -> None:
        frame = frames[0]
        raw = frame.buffer
        header = Header.parse(raw)
        # Check all fields of the header, in this order, before touching the payload.  With keys, the
        # claimed rank must also be the one whose key opened the connection.
        if header.job != self.job and self._early is not None and header.job not in self._past:
            self._spoken(frame)
            size = sum(PER_MESSAGE + len(part.buffer) for part in frames)
            self._early.append((size, frames))
            self._early_bytes += size
            while self._early_bytes > MAX_EARLY:
                self._early_bytes -= self._early.popleft()[0]
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
        # ZeroMQ delivers a connection's messages in order.  If a number is too high, a message was lost.
        # If it is too low, the message is a repetition, or its sender has already been given up.
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
                "a rank runs too far ahead of the others, which a barrier would prevent",
            )

    def _hear(self, source: int, frame: zmq.Frame) -> None:
        """Record a rank's connection; once it has ended, after its last message, the rank is lost."""
        self._heard.add(source)
        descriptor = self._spoken(frame, rank=True)
        if descriptor is not None:
            self._ranks[descriptor] = source
        else:
            self._ended.add(source)  # the rank has connected, sent a message, and disconnected

    def _spoken(self, frame: zmq.Frame, *, rank: bool = False) -> int | None:
        """Record that a message has arrived over a connection; return its descriptor if it exists."""
        descriptor: int = frame.get(zmq.SRCFD)
        self._look_at_incoming(descriptor if rank else None)
        if descriptor not in self._connected:
            return None
        self._spoke.add(descriptor)
        return descriptor


def tcp(host: str) -> str:
    """Return a host's ZeroMQ address, without a port.

    Example:
        >>> tcp("::1"), tcp("[::1]"), tcp("eth0")
        ('tcp://[::1]', 'tcp://[::1]', 'tcp://eth0')
    """
    host = host.strip("[]")
    return f"tcp://[{host}]" if ":" in host else f"tcp://{host}"


def bind(
    socket: zmq.Socket[Any],
    interface: str,
    port_range: tuple[int, int] | None,
    advertise: str | None,
) -> str:
    """Bind the first free port of an interface; return the address to which others connect.

    Raises:
        ConfigurationError: no port is free, or ``interface`` is not one interface of this machine.
    """
    ports = ["*"] if port_range is None else range(port_range[0], port_range[1] + 1)
    reserved = False
    for port in ports:
        try:
            socket.bind(f"{tcp(interface)}:{port}")
            break
        except zmq.ZMQError as error:
            reserved |= error.errno == errno.EACCES  # usually the ports below 1024, except for root
            if port_range is None or error.errno not in (zmq.EADDRINUSE, errno.EACCES):
                raise ConfigurationError(
                    f"cannot listen on interface '{interface}' ({error}); give the IP address or the "
                    "name of an interface of this machine"
                ) from error
    else:
        why = " (this process has no permission for some, such as those below 1024)" * reserved
        raise ConfigurationError(
            f"no port from {ports[0]} to {ports[-1]} is free on interface '{interface}'{why}; widen "
            "port_range, by one port for every communicator of every rank on this machine"
        )
    address = str(socket.get_string(zmq.LAST_ENDPOINT))
    # check the bound address, because the system knows other spellings of "all interfaces", e.g. "0" or
    # "0x0"
    host, taken = host_and_port(address)
    check_one_interface(interface, host)
    return address if advertise is None else f"{tcp(advertise)}:{taken}"


def _taken(raw: memoryview) -> Tensor:
    """Return a tensor that uses a frame's memory and keeps it alive, or a copy if the frame is short.

    A short frame is copied, because ZeroMQ keeps it in a buffer together with other frames, and the
    whole buffer would stay alive.
    """
    if len(raw) == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    if len(raw) <= SHARED:
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    payload = torch.frombuffer(raw, dtype=torch.uint8)
    return payload if payload.data_ptr() % ALIGNMENT == 0 else payload.clone()


def _joined(pieces: Sequence[memoryview]) -> Tensor:
    """Concatenate the frames of a long payload into one tensor."""
    whole, at = torch.empty(sum(map(len, pieces)), dtype=torch.uint8, device="cpu"), 0
    into = whole.numpy()
    for piece in pieces:
        into[at : at + len(piece)] = piece
        at += len(piece)
    return whole


def _close(
    context: zmq.Context[Any],
    sockets: list[zmq.Socket[Any]],
    links: dict[int, Link],
    guards: list[Doorkeeper],
    reserved: list[int],
    patience: _Patience,
    pid: int,
) -> None:
    """Send the last messages, then close all sockets; at exit, the mesh may no longer exist."""
    if context.closed or os.getpid() != pid:  # a forked child must not touch its parent's sockets
        return
    deadline = patience.until()
    for link in links.values():
        while link.queue and not link.lost and time.monotonic() < deadline:
            link.flush()
            link.socket.poll(10, zmq.POLLOUT)
            link.look()
    linger = max(deadline - time.monotonic(), 0.01)
    for link in links.values():
        link.look()
        sent = link.sequences and not link.lost  # a greeting alone is not worth the time
        link.close(round(1000 * linger) if sent else 0)
    for socket in sockets[:1]:
        socket.disable_monitor()
    for socket in reversed(sockets):
        socket.close()
    context.term()
    for descriptor in reserved:
        os.close(descriptor)
    for guard in guards:
        guard.thread.join()
