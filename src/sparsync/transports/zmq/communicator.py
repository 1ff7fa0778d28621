"""The ``Communicator`` over ZeroMQ: messages carry their length, step and phase, encrypted if asked."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import final

import torch
import zmq
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from sparsync.errors import ConfigurationError
from sparsync.transports.actors import Actor, Host, ThreadHost
from sparsync.transports.base import Communicator, Finished, Operation, check_timeout
from sparsync.transports.framing import Framing
from sparsync.transports.ledger import Parts
from sparsync.transports.solo import SoloHost
from sparsync.transports.zmq import rendezvous
from sparsync.transports.zmq.curve import CurveKeys, load_curve_keys
from sparsync.transports.zmq.header import APART, TAGS, pack
from sparsync.transports.zmq.incoming import Incoming
from sparsync.transports.zmq.line import ZmqLine
from sparsync.transports.zmq.mailbox import Expected
from sparsync.transports.zmq.mesh import Mesh
from sparsync.transports.zmq.operations import Gathered, Receive, Send, staged
from sparsync.transports.zmq.parcel import Parcel
from sparsync.transports.zmq.settings import ZmqSettings

__all__ = ["ZmqCommunicator"]


@final
class ZmqCommunicator(Communicator):
    """One rank of a group that talks over ZeroMQ.

    Every rank binds one incoming socket and opens a link to another rank at the first message to
    it.  One thread at a time may use a communicator and its channels (hand it over with a lock or a
    queue, not in the middle of a call); ZeroMQ's own threads move the bytes meanwhile.  It does not
    survive a fork: make it in the process that uses it.  Close it, or leave its ``with`` block, so
    that the last messages are delivered.

    Args:
        rank: this rank, in ``[0, world_size)``.
        world_size: number of ranks P.
        store: where the ranks leave their addresses; any ``torch.distributed`` store.
        address: instead of a store, ``"host:port"`` where rank 0 serves one until all have met.
        interface: the IP address or the name of the interface to bind, and no other.  Default: the
            one that leads to the store's host.
        timeout: seconds that any wait may take before it fails with an error.
        curve_keys: directory of ``make_curve_keys``.  Messages are encrypted, and only ranks with a
            listed key are let in, each as itself.  None: no encryption; whoever can reach the port
            and knows the job's number can send, so use it on networks that you trust.
        settings: buffers and periods.

    Attributes:
        dropped: messages that were refused, by reason (malformed, of another job, ...).
        lost: ranks that are gone, and why.

    Raises:
        ConfigurationError: an argument that cannot work.
        DeadlineError: not all ranks came within ``timeout``; names those that are missing.

    Example:
        >>> from torch.distributed import HashStore
        >>> from sparsync.transports.base import run
        >>> with ZmqCommunicator(0, 1, store=HashStore()) as comm:
        ...     run(comm.allreduce(torch.tensor([2.0]), "demo"))
        tensor([2.])
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        store: Store | None = None,
        address: str | None = None,
        interface: str | None = None,
        timeout: float = 300.0,
        curve_keys: Path | str | None = None,
        settings: ZmqSettings = ZmqSettings(),  # noqa: B008 (frozen)
    ) -> None:
        if not 0 <= rank < world_size:
            raise ConfigurationError(
                f"rank is {rank} of {world_size}; give world_size >= 1 and a rank in [0, world_size)"
            )
        super().__init__(rank, world_size, torch.device("cpu"))
        self.timeout = check_timeout(timeout)
        meeting = rendezvous.meet(store, address, rank, world_size, self.timeout)
        interface = rendezvous.choose_interface(interface, meeting.host)
        self._join(meeting, interface, settings, curve_keys)

    @classmethod
    def over(
        cls,
        comm: Communicator,
        *,
        interface: str | None = None,
        timeout: float = 300.0,
        curve_keys: Path | str | None = None,
        settings: ZmqSettings = ZmqSettings(),  # noqa: B008 (frozen)
    ) -> ZmqCommunicator:
        """Build one beside another communicator of the same ranks, which carries the addresses.

        Args:
            comm: any communicator; all its ranks call this together.
            interface: as for the class.  Default: ``GLOO_SOCKET_IFNAME``, or the one that leads to
                the host of the default process group's store, or to ``MASTER_ADDR``.
            timeout: as for the class.
            curve_keys: as for the class.
            settings: as for the class.
        """
        self = cls.__new__(cls)
        Communicator.__init__(self, comm.rank, comm.world_size, torch.device("cpu"))
        self.timeout = check_timeout(timeout)
        usual, host = rendezvous.group_route()
        interface = rendezvous.choose_interface(interface or usual, host)
        self._join(rendezvous.Over(comm), interface, settings, curve_keys)
        return self

    def _join(
        self,
        meeting: rendezvous.Meeting,
        interface: str,
        settings: ZmqSettings,
        curve_keys: Path | str | None,
    ) -> None:
        """Bind, tell the others where, and learn where they are."""
        self._interface, self._curve_keys = interface, curve_keys
        keys: CurveKeys | None = None
        if curve_keys is not None:
            keys = load_curve_keys(curve_keys, self.rank, self.world_size)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        context.max_sockets = 8 + 3 * self.world_size  # per link: a socket and its monitor's pair
        try:
            incoming = Incoming(context, interface, settings, keys)
            card = rendezvous.Card(incoming.endpoint, keys is not None, settings.max_message)
            job, cards = rendezvous.exchange(meeting, self.rank, self.world_size, card)
        except BaseException:
            context.destroy(linger=0)
            raise
        endpoints = [card.endpoint for card in cards]
        self.mesh = Mesh(context, incoming, endpoints, self.rank, job, settings, keys)
        self.dropped, self.lost = self.mesh.dropped, self.mesh.lost

    def channel(self, tag: int) -> ZmqCommunicator:
        """Return a handle on the same links and ledger whose messages never meet others'."""
        if not 0 <= tag < TAGS:
            raise ConfigurationError(f"channel {tag} does not exist; give a tag in [0, 2^32)")
        twin = copy.copy(self)
        twin.tag = tag
        return twin

    def host(self, actor: Actor) -> Host:
        """Run an actor on a thread of its own, over a mesh of its own with the same keys."""
        if self.world_size == 1:
            return SoloHost(actor)
        twin = ZmqCommunicator.over(
            self,
            interface=self._interface,
            timeout=self.timeout,
            curve_keys=self._curve_keys,
            settings=self.mesh.settings,
        )
        line = ZmqLine(twin)
        return ThreadHost(actor, line, self.rank, self.world_size, self.timeout)

    def isend(self, payload: Tensor, dest: int, phase: str, framing: Framing) -> Operation:
        """Send without waiting; a CUDA payload is staged through pinned memory."""
        return super().isend(staged(payload), dest, phase, framing)

    def start_send(self, payload: Tensor, dest: int, phase: str, framing: Framing) -> Operation:
        """Hand the payload to ZeroMQ, or queue it while the peer is slow."""
        if payload.numel() == 0 and not framing.variable:
            self.mesh.check_open()
            return Finished()  # both sides know that there is nothing
        (operation,) = self._send_all({dest: payload}, phase) or [Finished()]
        return operation

    def _send_all(self, payloads: Mapping[int, Tensor], phase: str) -> list[Operation]:
        """Send each rank its payload; return the operations that are not done at once."""
        mesh, step, sending = self.mesh, self.ledger.step, list[Operation]()
        mesh.check_open()
        number = mesh.phases.number(phase)
        last: tuple[bytes, Tensor, Parcel] | None = None
        for dest, payload in payloads.items():
            length = payload.numel()
            self._check_length(length)
            link = mesh.link(dest)
            flags = APART if length > mesh.settings.inline else 0
            sequence = link.next_sequence(self.tag)
            header = pack(flags, self.rank, mesh.job, self.tag, number, step, sequence, length)
            if last is not None and payload is last[1] and header == last[0]:
                parcel = last[2].again()  # often all ranks get the same
            else:
                parcel = Parcel.wrap(header, payload, mesh.settings)
            last = header, payload, parcel
            link.send(parcel)
            if not parcel.done or link.lost:
                where = f"step {step}: send to rank {dest} in phase '{phase}'"
                sending.append(Send(mesh, link, parcel, where, self.timeout))
        return sending

    def _check_length(self, nbytes: int) -> None:
        if nbytes > self.mesh.settings.max_message:
            raise ConfigurationError(
                f"a payload of {nbytes} bytes exceeds max_message = "
                f"{self.mesh.settings.max_message}; raise it on all ranks"
            )

    def start_recv(self, source: int, capacity: int, phase: str, framing: Framing) -> Operation:
        """Take the message if it is here, or post a receive for it."""
        if capacity == 0 and not framing.variable:
            return Finished(torch.empty(0, dtype=torch.uint8))
        return self._post(source, capacity, phase, framing)

    def irecv_any(self, capacity: int, phase: str, framing: Framing) -> Receive:
        """Receive from whoever is first on this channel, whatever the sender's step.

        The operation's ``source`` and ``step`` tell, when it is done, whose message it was and from
        which step.  Give such messages a channel of their own.
        """
        if self.world_size == 1:
            raise ConfigurationError(
                "a world of one has nobody to receive from; ask for world_size first"
            )
        return self._post(None, capacity, phase, framing)

    def _post(self, source: int | None, capacity: int, phase: str, framing: Framing) -> Receive:
        self.mesh.check_open()
        expected = self._expected(source, capacity, phase, framing)
        return Receive(expected, self.mesh, self.ledger, self.timeout)

    def _expected(
        self, source: int | None, capacity: int, phase: str, framing: Framing
    ) -> Expected:
        exact = not framing.variable
        return Expected(self.rank, source, self.tag, self.ledger.step, phase, capacity, exact)

    async def alltoallv(
        self, payloads: Sequence[Tensor], capacities: Sequence[int], phase: str, framing: Framing
    ) -> list[Tensor]:
        """Send to all, destinations rotated, then take what comes: one operation for all receives.

        The messages are those of ``primitives.alltoallv``: a rank may take the one, its peers the
        other.
        """
        rank, world_size = self.rank, self.world_size
        around = [(rank + shift) % world_size for shift in range(1, world_size)]
        self.mesh.check_open()
        arriving = Gathered(
            [
                self._expected(source, capacities[source], phase, framing)
                for source in around
                if capacities[source] or framing.variable
            ],
            self.mesh,
            self.ledger,
            self.timeout,
        )
        hosts = {id(payload): staged(payload) for payload in payloads}  # often all get the same
        outgoing = {dest: hosts[id(payloads[dest])] for dest in around}
        wanted = {d: p for d, p in outgoing.items() if p.numel() or framing.variable}
        sending = self._send_all(wanted, phase)
        if outgoing:
            self._book(outgoing.values(), phase, framing)  # while the bytes are on their way
        await arriving
        for operation in sending:
            await operation
        nothing = torch.empty(0, dtype=torch.uint8)
        received = [arriving.payloads.get(r, nothing) for r in range(world_size)]
        received[rank] = hosts[id(payloads[rank])]
        return received

    def _book(self, payloads: Collection[Tensor], phase: str, framing: Framing) -> None:
        """Enter what was sent in the ledger."""
        known: dict[int, Parts] = {}
        parts = Parts()
        for payload in payloads:
            if id(payload) not in known:
                known[id(payload)] = framing.parts(payload)
            parts = parts + known[id(payload)]
        nbytes = sum(payload.numel() for payload in payloads)
        self.ledger.sent(phase, nbytes, parts, len(payloads))

    def close(self) -> None:
        """Deliver the last messages (see ``linger``), then close all sockets, of all channels."""
        super().close()
        self.mesh.close()
