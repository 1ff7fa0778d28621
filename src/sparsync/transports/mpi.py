"""The ``Communicator`` over MPI, by mpi4py: messages between tensors' own memory, native collectives."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError, PeerError
from sparsync.transports.actors import Actor, Host, ThreadHost
from sparsync.transports.base import Communicator, Finished, Operation, ReduceOp, check_timeout, run
from sparsync.transports.framing import Framing, Raw
from sparsync.transports.ledger import Parts
from sparsync.transports.mpi_line import MpiLine
from sparsync.transports.mpi_requests import Patience, Request, Session, load_mpi, native_type
from sparsync.transports.primitives import rounds

__all__ = ["MpiCommunicator"]


@final
class MpiCommunicator(Communicator):
    """One rank of an MPI job.

    Messages travel point to point, with the channel as tag, from and into the tensors' own memory;
    a message knows its length: none is padded, no round announces sizes.  Where all sizes are known
    before, ``allreduce``, ``allgather(v)`` and ``alltoallv`` are MPI's own non-blocking collectives.
    Waits look, and sleep between looks: ranks may outnumber the cores.  One thread at a time may use
    a communicator and its channels.

    Args:
        comm: an ``mpi4py.MPI.Intracomm``, which is duplicated; None for ``COMM_WORLD``.
        timeout: seconds that any wait may take before it fails with an error.
        native_channels: channels below this use native collectives, the others point to point.  Each
            has an MPI communicator of its own (MPICH has about 2,000 in all), made at its first one.
        patience: how waits look for their end.

    Raises:
        ConfigurationError: mpi4py or MPI is missing, MPI has no threads, or a wrong argument.
        DeadlineError: not all ranks came within ``timeout``.

    Example (``mpiexec -n 4 python this.py``)::

        with MpiCommunicator() as comm:
            reduced = sparsync.allreduce(vector, comm, k=1000)
    """

    def __init__(
        self,
        comm: Any = None,
        *,
        timeout: float = 300.0,
        native_channels: int = 32,
        patience: Patience = Patience(),  # noqa: B008 (frozen)
    ) -> None:
        mpi = load_mpi()
        timeout = check_timeout(timeout)
        comm = mpi.COMM_WORLD if comm is None else comm
        if not isinstance(comm, mpi.Intracomm):
            raise ConfigurationError(
                f"comm is of type {type(comm).__name__}; give an mpi4py.MPI.Intracomm or None"
            )
        if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
            raise ConfigurationError(
                "MPI was initialised without MPI_THREAD_MULTIPLE, and exchanges run on a thread of "
                "their own; leave mpi4py.rc.threads at True"
            )
        super().__init__(comm.Get_rank(), comm.Get_size(), torch.device("cpu"))
        self._session = Session(mpi, mpi.COMM_NULL, self.rank, self.ledger, timeout, patience)
        self._native_channels = native_channels
        self._tags = int(comm.Get_attr(mpi.TAG_UB))
        self._session.comm = run(self._duplicate(comm, "all ranks to connect"))

    @classmethod
    def over(cls, comm: Communicator, *, timeout: float = 300.0) -> MpiCommunicator:
        """Build one beside another communicator of the same ranks; all of them call this together.

        Args:
            comm: any communicator of processes that ``mpiexec`` started; it tells who they are.
            timeout: as for the class.

        Raises:
            ConfigurationError: MPI does not know these ranks.
        """
        mpi = load_mpi()
        world = mpi.COMM_WORLD
        mine = torch.tensor([world.Get_rank(), world.Get_size()])
        seen = [t.tolist() for t in run(comm.allgather(mine, "mpi ranks"))]
        members = [rank for rank, _ in seen]
        if len(set(members)) < comm.world_size or len({size for _, size in seen}) > 1:
            raise ConfigurationError(
                f"transport 'mpi': this group has {comm.world_size} ranks, but MPI knows of "
                f"{world.Get_size()}; start them with one mpiexec -n {comm.world_size}, of the MPI "
                "that mpi4py uses"
            )
        if members == list(range(world.Get_size())):
            return cls(timeout=timeout)
        everyone = world.Get_group()
        group = everyone.Incl(members)
        part = world.Create_group(group)  # its members have just met
        try:
            return cls(part, timeout=timeout)
        finally:
            part.Free()
            group.Free()
            everyone.Free()

    def channel(self, tag: int) -> MpiCommunicator:
        """Return a handle on the same links and ledger whose messages never meet others'."""
        if not 0 <= tag <= self._tags:
            raise ConfigurationError(
                f"channel {tag} does not exist; this MPI has tags from 0 to {self._tags}"
            )
        twin = copy.copy(self)
        twin.tag = tag
        return twin

    def host(self, actor: Actor) -> Host:
        """Run an actor on a thread of its own, over an MPI communicator of its own."""
        session = self._session
        twin = run(self._duplicate(session.comm, "all ranks to start an actor"))
        return ThreadHost(
            actor, MpiLine(session.mpi, twin), self.rank, self.world_size, session.timeout
        )

    # ---- point to point ------------------------------------------------------------------------

    def start_send(self, payload: Tensor, dest: int, phase: str, framing: Framing) -> Operation:
        """Start ``Isend`` from the payload's own memory."""
        if payload.numel() == 0 and not framing.variable:
            return Finished()  # both sides know that there is nothing
        session, payload = self._session, payload.contiguous()
        return Request(
            session,
            self.tag,
            f"send to rank {dest} in phase '{phase}'",
            lambda: session.comm.Isend([payload.numpy(), session.mpi.BYTE], dest, self.tag),
        )

    def start_recv(self, source: int, capacity: int, phase: str, framing: Framing) -> Operation:
        """Start ``Irecv`` into a buffer of ``capacity`` bytes; the message says how long it is."""
        if capacity == 0 and not framing.variable:
            self.ledger.received(phase, 0)
            return Finished(torch.empty(0, dtype=torch.uint8))
        session, buffer = self._session, torch.empty(capacity, dtype=torch.uint8)

        def finish(status: Any) -> Tensor:
            length = status.Get_count(session.mpi.BYTE)
            if length != capacity and not framing.variable:
                raise PeerError(
                    f"rank {self.rank}, step {self.ledger.step}: message from rank {source} in phase "
                    f"'{phase}' has {length} bytes where {capacity} were expected; do the ranks "
                    "disagree on size or k?"
                )
            self.ledger.received(phase, length)
            return buffer[:length]

        return Request(
            session,
            self.tag,
            f"message from rank {source} in phase '{phase}' (at most {capacity} bytes)",
            lambda: session.comm.Irecv([buffer.numpy(), session.mpi.BYTE], source, self.tag),
            finish,
            receiving=True,
        )

    # ---- native collectives --------------------------------------------------------------------

    async def allreduce(self, tensor: Tensor, phase: str, op: ReduceOp = "sum") -> Tensor:
        """Use the native call for integers, and for sums of float32 and float64.

        Booked as 2 n (P - 1) / P sent and received.  Native float sums are equal on all ranks, and
        to other transports' up to rounding.  MPI's max and min may lose a NaN: of floats they, and
        what MPI has no type for, go point to point.
        """
        session, dtype = self._session, native_type(self._session.mpi, tensor.dtype, op)
        if dtype is None or tensor.numel() == 0 or not self._native:
            return await super().allreduce(tensor, phase, op)
        result = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
        native_op = {"sum": session.mpi.SUM, "max": session.mpi.MAX, "min": session.mpi.MIN}[op]
        context = await self._context()
        await Request(
            session,
            self.tag,
            f"allreduce in phase '{phase}'",
            lambda: context.Iallreduce(session.mpi.IN_PLACE, [result.numpy(), dtype], native_op),
        )
        nbytes = -(-2 * result.numel() * result.itemsize * (self.world_size - 1) // self.world_size)
        kind = Parts(value=nbytes) if tensor.is_floating_point() else Parts(control=nbytes)
        messages = 2 * (self.world_size - 1).bit_length()
        self.ledger.sent(phase, nbytes, kind, messages)
        self.ledger.received(phase, nbytes, messages)
        return result.to(tensor.device)

    async def allgatherv(
        self, payload: Tensor, capacities: Sequence[int], phase: str, framing: Framing
    ) -> list[Tensor]:
        """Use the native call where all sizes are known; booked as what it replaces.

        Otherwise point to point: the native call would need a round for the sizes, or padding.
        """
        if not isinstance(framing, Raw) or sum(capacities) == 0 or not self._native:
            return await super().allgatherv(payload, capacities, phase, framing)
        session, ours = self._session, payload.to(self.device).contiguous()
        self._check_length(ours, capacities[self.rank], phase)
        everyone = torch.empty(sum(capacities), dtype=torch.uint8)
        context = await self._context()
        await Request(
            session,
            self.tag,
            f"allgatherv in phase '{phase}'",
            lambda: context.Iallgatherv(
                [ours.numpy(), session.mpi.BYTE],
                [everyone.numpy(), list(capacities), None, session.mpi.BYTE],
            ),
        )
        self._book_gathered(capacities, phase, framing)
        return list(torch.split(everyone, list(capacities)))

    async def alltoallv(
        self, payloads: Sequence[Tensor], capacities: Sequence[int], phase: str, framing: Framing
    ) -> list[Tensor]:
        """Use the native call where all sizes are known; otherwise as in ``allgatherv``."""
        if not isinstance(framing, Raw) or sum(capacities) == 0 or not self._native:
            return await super().alltoallv(payloads, capacities, phase, framing)
        session, own = self._session, payloads[self.rank].to(self.device)
        leaving = [payload.to(self.device) for payload in payloads]
        leaving[self.rank] = own[:0]  # what stays here is not MPI's business
        for r, payload in enumerate(leaving):
            self._check_length(payload, capacities[self.rank] if r != self.rank else 0, phase)
        sizes = [n if r != self.rank else 0 for r, n in enumerate(capacities)]
        outgoing, arrived = torch.cat(leaving), torch.empty(sum(sizes), dtype=torch.uint8)
        counts = [payload.numel() for payload in leaving]
        context = await self._context()
        await Request(
            session,
            self.tag,
            f"alltoallv in phase '{phase}'",
            lambda: context.Ialltoallv(
                [outgoing.numpy(), counts, None, session.mpi.BYTE],
                [arrived.numpy(), sizes, None, session.mpi.BYTE],
            ),
        )
        self.ledger.sent(phase, outgoing.numel(), framing.parts(outgoing), self.world_size - 1)
        self.ledger.received(phase, arrived.numel(), self.world_size - 1)
        blocks = list(torch.split(arrived, sizes))
        blocks[self.rank] = own
        return blocks

    @property
    def _native(self) -> bool:
        return self.world_size > 1 and self.tag < self._native_channels

    async def _context(self) -> Any:
        """Return this channel's own MPI communicator: its collectives may start at any time."""
        contexts = self._session.contexts
        if self.tag not in contexts:
            contexts[self.tag] = await self._duplicate(self._session.comm, "all ranks to begin")
        return contexts[self.tag]

    async def _duplicate(self, comm: Any, what: str) -> Any:
        made: list[Any] = []

        def start() -> Any:
            twin, request = comm.Idup()
            made.append(twin)
            return request

        where = f"wait for {what} on channel {self.tag}"
        await Request(self._session, self.tag, where, start, late=True)
        made[0].Set_errhandler(self._session.mpi.ERRORS_RETURN)
        return made[0]

    def _check_length(self, payload: Tensor, expected: int, phase: str) -> None:
        if payload.numel() != expected:
            raise ConfigurationError(
                f"rank {self.rank}, phase '{phase}': a message of {payload.numel()} bytes where "
                f"{expected} were announced to all; give the lengths that are sent"
            )

    def _book_gathered(self, capacities: Sequence[int], phase: str, framing: Raw) -> None:
        """Book what the rounds of ``dissemination_allgatherv`` move."""
        around = [capacities[(self.rank + i) % self.world_size] for i in range(self.world_size)]
        for skip, count in reversed(list(rounds(self.world_size))):
            sent = sum(around[:count])
            kind = Parts(value=sent) if framing.kind == "value" else Parts(control=sent)
            self.ledger.sent(phase, sent, kind)
            self.ledger.received(phase, sum(around[skip : skip + count]))

    # ---- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the MPI communicators that were duplicated, of all channels.  MPI itself goes on."""
        super().close()
        self._session.close()
