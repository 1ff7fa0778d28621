"""The ``Communicator`` over ZeroMQ; messages carry length, step and phase, and may be encrypted."""

from __future__ import annotations

import copy
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, final

import torch
import zmq
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from sparsync.errors import CommunicationError, ConfigurationError, DeadlineError, PeerError
from sparsync.transports.actors import Actor, Host
from sparsync.transports.communicator import Communicator, check_timeout
from sparsync.transports.driver import Finished, Operation
from sparsync.transports.groups import SoloHost
from sparsync.transports.interfaces import (
    VARIABLE,
    described,
    family_of,
    is_loopback,
    own_interfaces,
)
from sparsync.transports.ledger import Framing, Ledger, Parts
from sparsync.transports.rendezvous import (
    check_ports,
    check_sockets,
    choose_interface,
    convene,
    host_of_rank_0,
    network,
)
from sparsync.transports.zmq import peers as limits
from sparsync.transports.zmq.curve import load_curve_keys, own_curve_keys
from sparsync.transports.zmq.mailbox import APART, NO_LOCAL_STEP, Claim, Header
from sparsync.transports.zmq.mesh import Mesh
from sparsync.transports.zmq.peers import Link, Parcel, host_and_port, resolved

__all__ = ["Receive", "ZmqCommunicator", "host_over"]

# seconds between checks for arrivals while ZeroMQ is still reading a payload
_MEMORY_TICK: Final = 0.002


@final
class ZmqCommunicator(Communicator):
    """One rank of a group that communicates over ZeroMQ.

    Every rank binds one incoming socket and opens a link to every other rank.  Only one thread at a time
    may use a communicator and its channels; hand them over with a lock or a queue, never during a call.
    ZeroMQ's own threads transfer the bytes in the background.  A communicator does not survive a fork.
    Close it, or leave its ``with`` block, so that the last messages are delivered.

    Args:
        rank: this rank, in ``[0, world_size)``.
        world_size: number of ranks P.
        store: where the ranks exchange their addresses: any ``torch.distributed`` store, or an existing
            communicator of the same ranks.
        interface: the IP address or the name of the only interface to bind.  Default:
            ``GLOO_SOCKET_IFNAME``, or the interface on the route to the store's host or to rank 0's
            host.
        port_range: first and last port that may be bound, for firewalls.  A rank needs one port, and a
            second one if it runs an actor.  Default: any free port.
        advertise: the address at which the others reach this rank, if it differs from the interface's,
            e.g. the address of a static NAT that forwards ``port_range`` to this machine.
        timeout: seconds that any wait may take before it fails with an error; a rank may stall for that
            long.
        connect_timeout: seconds that opening the connections between ranks may take.
        curve_keys: a directory written by ``make_curve_keys``.  Messages are then encrypted, and only
            ranks with a listed key may connect, each under its own number.  With None, messages are not
            encrypted, and a random password protects each rank.  Anybody who listens on the network can
            read both, so use trusted networks only.
        changing: whether the group may change (see ``regroup``).  ``curve_keys`` is then a directory
            whose only secret key is this rank's, or the file of that key.

    Attributes:
        dropped: number of refused messages by reason (malformed, from another job, ...).
        lost: the reason for each rank that has been given up.

    Raises:
        ConfigurationError: an argument is invalid.
        DeadlineError: not all ranks arrived within ``timeout``; the message names the missing ones.

    Example:
        >>> from torch.distributed import HashStore
        >>> from sparsync.transports.driver import run
        >>> with ZmqCommunicator(0, 1, store=HashStore()) as comm:
        ...     run(comm.allreduce(torch.tensor([2.0]), "demo"))
        tensor([2.])
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        store: Store | Communicator,
        interface: str | None = None,
        port_range: tuple[int, int] | None = None,
        advertise: str | None = None,
        timeout: float = 300.0,
        connect_timeout: float = 60.0,
        curve_keys: Path | str | None = None,
        changing: bool = False,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ConfigurationError(
                f"rank is {rank} of {world_size}; give world_size >= 1 and a rank in [0, world_size)"
            )
        super().__init__(rank, world_size, torch.device("cpu"))
        self.timeout = check_timeout(timeout)
        check_timeout(connect_timeout, "connect_timeout")
        self._sockets: dict[str, Any] = {
            "interface": interface,
            "port_range": port_range,
            "advertise": advertise,
            "connect_timeout": connect_timeout,
            "curve_keys": curve_keys,
        }

        opened = list[Mesh]()
        # ``host_of_rank_0`` is collective, so call it before ``ready``, which may fail on a single rank
        meeting = host_of_rank_0(store) if isinstance(store, Communicator) else store

        def ready() -> dict[str, Any]:
            """Start to listen; if this fails, all ranks get the error during the rendezvous."""
            check_sockets(self._sockets)
            keys = None
            if curve_keys is not None:
                every = (curve_keys, rank, world_size)
                keys = own_curve_keys(curve_keys) if changing else load_curve_keys(*every)
            mesh = Mesh(
                rank,
                world_size,
                keys,
                choose_interface(interface, meeting),
                timeout,
                connect_timeout,
                check_ports(port_range),
                advertise,
                changing=changing,
            )
            opened.append(mesh)
            # Every rank draws a job number, and all ranks use rank 0's.  Messages of a former job on the
            # same ports carry a different number and are refused.
            job = secrets.randbits(63)
            card = {"endpoint": mesh.endpoint, "keys": keys.digest if keys else "", "job": job}
            card["world_size"] = world_size
            far = {family_of(text)[-1] for one in own_interfaces() for text in one.far_addresses}
            families = "".join(sorted(far)) or "46"  # if no family is known, refuse none
            return {**card, "reach": [network(), families, advertise is not None]}

        try:
            # all ranks listen before any rank connects, because links do not retry
            cards = convene(store, rank, world_size, ready, timeout)
            opened[0].connect(*_agreed(rank, cards))
        except BaseException:
            for mesh in opened:
                mesh.close()
            raise
        self.mesh = opened[0]
        self.dropped, self.lost = self.mesh.dropped, self.mesh.lost

    def regroup(self, rank: int, job: int, endpoints: list[str]) -> None:
        """Leave the current group for a new one; receives in the former group end with an error.

        Sends to ranks that are not in the new group also fail; other sends that wait for room end at
        their deadline.  The incoming socket stays: only links to new ranks are opened, and links to
        former ranks are closed.  Messages of the new group that arrived early are kept.  Channels must
        be created again.  An endpoint is a rank's ``mesh.endpoint``, i.e. its address, followed by a
        blank and its password or, with keys, its public key.
        """
        self.mesh.regroup(rank, job, endpoints)
        self.rank, self.world_size = rank, len(endpoints)

    def give_up(self) -> None:
        """Make all other ranks' waits in this group end with an error."""
        self.mesh.give_up()

    def host(self, actor: Actor) -> Host:
        """Run an actor on a separate thread, over a separate mesh with the same keys."""
        return host_over(actor, self, self, **self._sockets)

    def isend(self, payload: Tensor, dest: int, phase: str, framing: Framing) -> Operation:
        """Send without waiting; a CUDA payload is staged through pinned memory."""
        return super().isend(_staged(payload), dest, phase, framing)

    def start_send(self, payload: Tensor, dest: int, phase: str, framing: Framing) -> Operation:
        """Hand the payload to ZeroMQ, or queue it while the peer is slow."""
        self.mesh.check_open()
        if payload.numel() == 0 and not framing.variable:
            return Finished()  # both sides know that there is nothing to send
        (operation,) = self._send_all({dest: payload}, phase) or [Finished()]
        return operation

    def _send_all(self, payloads: Mapping[int, Tensor], phase: str) -> list[Operation]:
        """Send each rank its payload; return the operations that are not done immediately."""
        mesh, ledger, sending = self.mesh, self.ledger, list[Operation]()
        local = NO_LOCAL_STEP if ledger.local_step is None else ledger.local_step
        number = mesh.mailboxes.phase_number(phase)
        last: tuple[bytes, Tensor, Parcel] | None = None
        for dest, payload in payloads.items():
            length = payload.numel()
            if length > limits.MAX_MESSAGE:
                raise ConfigurationError(
                    f"a payload of {length} bytes exceeds {limits.MAX_MESSAGE}, the most of a message; "
                    "send it in parts, a model in more units"
                )
            link = mesh.links[dest]
            # The receiver checks the sequence numbers of every link and channel.  A gap means that a
            # message was lost, which ZeroMQ would not report.
            flags = APART if length > limits.INLINE else 0
            sequence = link.next_sequence(self.tag)
            facts = self.rank, mesh.job, self.tag, number, ledger.step, local, sequence, length
            header = Header(flags, *facts).pack()
            # All ranks are often sent the same payload.  Its frames are then made only once.  The copies
            # of the parcel share them, but each copy has its own state.
            if last is None or payload is not last[1] or header != last[0]:
                last = header, payload, Parcel(header, payload)
            parcel = copy.copy(last[2])
            link.send(parcel)
            if not parcel.done or link.lost:
                where = f"{ledger.place()}: send to rank {dest} in phase '{phase}'"
                sending.append(_Send(mesh, link, parcel, where, self.timeout))
        return sending

    def start_recv(self, source: int, capacity: int, phase: str, framing: Framing) -> Operation:
        """Claim the message if it has already arrived; otherwise post a receive for it."""
        if capacity == 0 and not framing.variable:
            return Finished(torch.empty(0, dtype=torch.uint8, device="cpu"))
        return self._receive({source: capacity}, phase, framing)

    def irecv_any(self, capacity: int, phase: str, framing: Framing) -> Receive:
        """Receive the first message on this channel, from any rank and in any step.

        Once the operation is done, its ``source`` is the sender's rank.  Use a separate channel for
        such messages.
        """
        if self.world_size == 1:
            raise ConfigurationError(
                "a world of one has nobody to receive from; check world_size first"
            )
        return self._receive({None: capacity}, phase, framing)

    def _receive(self, capacities: Mapping[Any, int], phase: str, framing: Framing) -> Receive:
        """Post a receive for each source; return one operation for all of them."""
        self.mesh.check_open()
        exact, step, local = not framing.variable, self.ledger.step, self.ledger.local_step
        claims = [
            Claim(self.rank, source, self.tag, step, phase, capacity, exact, local)
            for source, capacity in capacities.items()
        ]
        return Receive(claims, self.mesh, self.ledger, self.timeout)

    async def alltoallv(
        self, payloads: Sequence[Tensor], capacities: Sequence[int], phase: str, framing: Framing
    ) -> list[Tensor]:
        """Send to all ranks, with rotated destinations, then receive in any order, as one operation.

        An operation's messages are polled together, which costs less than polling for each message (see
        ``Mesh.advance``).  The messages are the same as in ``Communicator.alltoallv``, so a rank may use
        this method while its peers use the inherited one.
        """
        rank, world_size = self.rank, self.world_size
        around = [(rank + shift) % world_size for shift in range(1, world_size)]
        wanted = {r: capacities[r] for r in around if capacities[r] or framing.variable}
        arriving = self._receive(wanted, phase, framing)
        # staged once per payload, which is often the same for all
        hosts = {id(payload): _staged(payload) for payload in payloads}
        outgoing = {dest: hosts[id(payloads[dest])] for dest in around}
        given = {dest: p for dest, p in outgoing.items() if p.numel() or framing.variable}
        sending = self._send_all(given, phase)
        if outgoing:  # count only now, while the bytes are already being sent
            booked = {id(payload): framing.parts(payload) for payload in outgoing.values()}
            parts = sum((booked[id(payload)] for payload in outgoing.values()), Parts())
            nbytes = sum(payload.numel() for payload in outgoing.values())
            self.ledger.sent(phase, nbytes, parts, len(outgoing))
        await arriving
        for operation in sending:
            await operation
        received = [torch.empty(0, dtype=torch.uint8, device="cpu")] * world_size
        for claim in arriving.claims:
            if claim.sender is not None and claim.payload is not None:
                received[claim.sender] = claim.payload
        received[rank] = hosts[id(payloads[rank])]
        return received

    def abort(self) -> None:
        """End all waits within two ticks; ``close`` then returns at most 4.5 s after this call."""
        super().abort()
        self.mesh.abort()

    def close(self) -> None:
        """Deliver the last messages (see ``linger``), then close all sockets of all channels."""
        super().close()
        self.mesh.close()


class _Wait(Operation):
    """An operation that lets all other operations make progress while it waits.

    Its deadline is counted from the first wait.  If the length of the payload is known, the deadline is
    extended by one second per MiB.
    """

    def __init__(self, mesh: Mesh, timeout: float, nbytes: int) -> None:
        self.mesh = mesh
        # a long payload is no reason to give up as long as the link carries at least 1 MiB/s
        self.timeout = timeout + nbytes // limits.PIECE
        self.deadline: float | None = None

    def wait(self) -> None:
        """Block until done."""
        while not self.poll(self.timeout):
            pass

    def begin(self, seconds: float) -> float:
        """Return the time at which a poll that may wait ``seconds`` must return."""
        now = time.monotonic()
        # an operation that is only polled gets no deadline: if several are in flight, a rank waits only
        # for the oldest one
        if seconds > 0 and self.deadline is None:
            self.deadline = now + self.timeout
        return now + seconds

    def check(self, now: float, where: object, peer: int | None) -> None:
        """Raise an error after the deadline.

        The error's text says whether the peer was reached at all.  It also lists the messages and
        connections that were refused, because these reveal a wrong key or version.

        Args:
            now: time on the monotonic clock.
            where: describes the operation.
            peer: the awaited rank, or None for any rank.
        """
        if self.deadline is None or now < self.deadline:
            return
        refused = ", ".join(f"{count} {reason}" for reason, count in self.mesh.refusals().items())
        hint = f" (refused meanwhile: {refused})" if refused else ""
        unreached = "" if peer is None else self.mesh.state_of(peer)
        question = "is that rank alive? Raise timeout= if it is only slow"
        raise DeadlineError(
            f"{where} did not complete within {self.timeout:g} s; {unreached or question}{hint}"
        )


@final
class _Send(_Wait):
    """A message that ZeroMQ has not accepted yet, or whose memory it is still reading."""

    def __init__(self, mesh: Mesh, link: Link, parcel: Parcel, where: str, timeout: float) -> None:
        super().__init__(mesh, timeout, parcel.length)
        self.link, self.parcel, self.where = link, parcel, f"rank {mesh.rank}, {where}"

    def poll(self, seconds: float) -> bool:
        """Wait at most ``seconds``, and receive the messages that arrive meanwhile."""
        until = self.begin(seconds)
        while not self._settled():
            now = time.monotonic()
            self.check(now, self.where, self.link.peer)
            self.mesh.check_open()
            if self.parcel.tracker is None:
                self.mesh.advance(until - now)
            else:
                # ZeroMQ has accepted the message and is reading the payload's memory.  The message's
                # tracker cannot be polled together with sockets, so wait for it only briefly, and
                # receive incoming messages in between.
                try:
                    self.parcel.tracker.wait(max(min(until - now, _MEMORY_TICK), 0.0))
                except zmq.NotDone:
                    self.mesh.advance(0.0)
            if until <= now:
                return self._settled()
        return True

    def _settled(self) -> bool:
        if not self.done and self.link.lost:
            raise PeerError(f"{self.where} failed: {self.link.lost}")
        self.done = self.done or self.parcel.done
        return self.done


@final
class Receive(_Wait):
    """One or more receives, which may end in any order; the result is the first one's payload."""

    def __init__(self, claims: Sequence[Claim], mesh: Mesh, ledger: Ledger, timeout: float) -> None:
        super().__init__(mesh, timeout, sum(claim.capacity for claim in claims if claim.exact))
        self.ledger, self.claims = ledger, claims
        self._waiting = claims
        self._error: CommunicationError | None = None
        for claim in claims:
            mesh.mailboxes.post(claim)
        self._settled()

    @property
    def source(self) -> int | None:
        """The rank that sent the first receive's message; None until then."""
        return self.claims[0].sender

    def poll(self, seconds: float) -> bool:
        """Wait at most ``seconds``, but not after a different operation has received its message.

        A driver of several operations can then continue with the other operation.
        """
        if not self._settled():
            mailboxes = self.mesh.mailboxes
            # this sum stays the same as long as only messages for this operation arrive
            others = mailboxes.handed + len(self._waiting)
            until = self.begin(seconds)
            now = until - seconds
            while True:
                self.mesh.check_open()
                self.mesh.advance(until - now, len(self._waiting))
                now = time.monotonic()
                settled = self._settled()
                if settled or until <= now or mailboxes.handed + len(self._waiting) != others:
                    break
            if not settled:
                self.check(now, self._waiting[0], self._waiting[0].source)
        if self._error is not None:
            raise self._error
        return self.done

    def _settled(self) -> bool:
        """Check which claims have received their messages; return whether the wait is over."""
        if self.done or self._error is not None:
            return True
        failed = [claim.error for claim in self._waiting if claim.error is not None]
        self._waiting = [claim for claim in self._waiting if claim.payload is None]
        if failed:
            self._error = failed[-1]
        elif not self._waiting:
            self.done = True
            payloads = [claim.payload for claim in self.claims if claim.payload is not None]
            if payloads:
                self.result = payloads[0]
                nbytes = sum(payload.numel() for payload in payloads)
                self.ledger.received(self.claims[0].phase, nbytes, len(payloads))
        return self.done or self._error is not None


def _staged(payload: Tensor) -> Tensor:
    """Return the payload in host memory; CUDA payloads pass through pinned memory, which torch reuses.

    Only the payload's stream is synchronised, not the device.
    """
    if payload.device.type == "cpu":
        return payload
    pinned = torch.empty_like(payload, device="cpu", pin_memory=payload.is_cuda)
    pinned.copy_(payload, non_blocking=True)
    # synchronise, because ZeroMQ would otherwise read the memory before the queued copy has run
    if payload.is_cuda:
        torch.cuda.current_stream(payload.device).synchronize()
    return pinned


def _agreed(rank: int, cards: Sequence[Mapping[str, Any]]) -> tuple[int, list[str]]:
    """Return the job number, drawn by rank 0, and all endpoints; check that the ranks are compatible."""
    try:
        names = "job", "endpoint", "world_size", "keys", "reach"
        facts = [[card[name] for name in names] for card in cards]
    except KeyError as error:
        raise PeerError(
            f"a rank left no {error} with its address; all ranks need the same version of sparsync"
        ) from error
    jobs, endpoints, sizes, keys, reach = (list(column) for column in zip(*facts, strict=True))
    addresses = [endpoint.partition(" ")[0] for endpoint in endpoints]
    near = list[bool]()
    for peer, address in enumerate(addresses):
        try:
            near.append(resolved(address).startswith(("tcp://127.", "tcp://[::1]")))
        except OSError as error:
            raise ConfigurationError(
                f"rank {rank}: rank {peer} should be at {address}, but this machine cannot resolve "
                f"that name ({error.strerror}); give rank {peer} an advertise= that all ranks can "
                "resolve, or an "
                "IP address"
            ) from error
    # if a hosts file maps one rank's host name to 127.0.1.1, that rank has bound loopback, where ranks on
    # other machines cannot reach it
    places = ["loopback" if local else "reachable" for local in near]
    told = ", ".join(f"rank {peer} {address}" for peer, address in enumerate(addresses))
    for what, values, cure in (
        ("world_size", sizes, "the same world_size"),
        ("encrypted", [key != "" for key in keys], "the same curve_keys"),
        ("the digest of curve_keys", keys, "the same .key files"),
        ("interface", places, f"interface=, or GLOO_SOCKET_IFNAME ({told})"),
    ):
        others = [peer for peer, value in enumerate(values) if value != values[0]]
        if others:
            raise ConfigurationError(
                f"{what} differs: rank 0 has {values[0]}, ranks {', '.join(map(str, others))} have "
                f"{values[others[0]]}; give all ranks {cure}"
            )
    _check_reachable(rank, addresses, reach)
    return jobs[0], endpoints


def _check_reachable(
    rank: int, addresses: Sequence[str], reach: Sequence[tuple[str, str, bool]]
) -> None:
    """Refuse an address that ranks on other networks cannot reach; all ranks refuse the same one.

    Args:
        rank: this rank.
        addresses: the address at which each rank listens.
        reach: for each rank, its network (see ``rendezvous.network``), the families of its addresses
            ("4", "6" or "46"), and whether its address comes from ``advertise=`` and may therefore
            belong to another machine.
    """
    owners = dict[str, int]()
    # one rank stands for all ranks of its network, because they have the same interfaces
    others = {place: peer for peer, (place, _, _) in reversed([*enumerate(reach)])}
    for peer, (address, (place, _, advertised)) in enumerate(zip(addresses, reach, strict=True)):
        if advertised:
            continue
        host, _ = host_and_port(address)
        family, owner = family_of(host), owners.setdefault(host, peer)
        for there, other in others.items():
            if there == place:
                continue
            if is_loopback(host):
                why = "loopback is its own"
            elif family[-1] not in reach[other][1]:
                why = f"it has no {family} address"
            elif reach[owner][0] == there:
                why = f"rank {owner} there listens at the same address"
            else:
                continue
            raise ConfigurationError(
                f"rank {peer} listens at {address}, where rank {other} on another network cannot reach "
                f"it ({why}); give interface=, or set {VARIABLE}, to an interface that leads to the "
                f"other ranks; rank {rank} has {described(own_interfaces())}"
            )


def host_over(
    actor: Actor, comm: Communicator, store: Store | Communicator, **options: Any
) -> Host:
    """Run an actor over a mesh of ``comm``'s ranks, whatever its transport; this is collective.

    The ranks rendezvous in ``store``.  The mesh gets the timeout of ``comm``; ``options`` are passed to
    ``ZmqCommunicator``.
    """
    if comm.world_size == 1:
        return SoloHost(actor)
    # imported here, because most groups run no actor
    from sparsync.transports.zmq.host import ZmqHost

    mesh = ZmqCommunicator(comm.rank, comm.world_size, store=store, timeout=comm.timeout, **options)
    return ZmqHost(actor, mesh)
