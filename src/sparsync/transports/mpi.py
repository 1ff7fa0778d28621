"""The ``Communicator`` over MPI, by mpi4py: messages between tensors' own memory, native allreduce."""

from __future__ import annotations

import copy
from typing import Any, final

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError, PeerError
from sparsync.transports.actors import Actor, Host
from sparsync.transports.communicator import Communicator, ReduceOp, check_timeout
from sparsync.transports.driver import Finished, Operation, run
from sparsync.transports.ledger import Framing
from sparsync.transports.mpi_requests import (
    MpiHost,
    Request,
    Session,
    load_mpi,
    native_type,
)

__all__ = ["MpiCommunicator"]

# channels below this use the native allreduce, each with an MPI communicator of its own, made at its
# first one (MPICH has about 2,000 in all); the others go point to point
_NATIVE_CHANNELS = 32


@final
class MpiCommunicator(Communicator):
    """One rank of an MPI job.

    Messages travel point to point, with the channel as tag, from and into the tensors' own memory;
    a message knows its length: none is padded, no round announces sizes.  ``allreduce`` is MPI's own
    for integers and float sums: it is the dense baseline of every comparison.  Waits
    look, and sleep between looks: ranks may outnumber the cores.  One thread at a time may use a
    communicator and its channels.

    Args:
        comm: an ``mpi4py.MPI.Intracomm``, which is duplicated; None for ``COMM_WORLD``.
        timeout: seconds that any wait may take before it fails with an error.
        spin: seconds of looking again and again before a wait sleeps between looks.  The default is
            about what a small message takes among more ranks than cores.

    Raises:
        ConfigurationError: mpi4py or MPI is missing, MPI has no threads, or a wrong argument.
        DeadlineError: not all ranks arrived within ``timeout``.

    Example (``mpiexec -n 4 python this.py``)::

        with MpiCommunicator() as comm:
            reduced = sparsync.allreduce(vector, comm, k=1000)
    """

    def __init__(
        self,
        comm: Any = None,
        *,
        timeout: float = 300.0,
        spin: float = 0.0002,
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
        self._session = Session(mpi, mpi.COMM_NULL, self.rank, self.ledger, timeout, spin)
        self._tags = int(comm.Get_attr(mpi.TAG_UB))
        self._session.comm = run(self._duplicate(comm, "all ranks to connect"))

    @classmethod
    def over(cls, comm: Communicator, *, timeout: float = 300.0) -> MpiCommunicator:
        """Build one next to another communicator of the same ranks; all of them call this together.

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
        return MpiHost(actor, session, twin)

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

    # ---- the native collective -----------------------------------------------------------------

    async def allreduce(self, tensor: Tensor, phase: str, op: ReduceOp = "sum") -> Tensor:
        """Use the native call for integers, and for sums of float32 and float64.

        Booked as 2 n (P - 1) / P sent and received.  Native float sums are equal on all ranks, and
        to other transports' up to rounding.  MPI's max and min may lose a NaN: of floats they, and
        what MPI has no type for, go point to point.
        """
        session, tag = self._session, self.tag
        dtype = native_type(session.mpi, tensor.dtype, op)
        alone = self.world_size == 1 or tensor.numel() == 0
        if dtype is None or alone or tag >= _NATIVE_CHANNELS:
            return await super().allreduce(tensor, phase, op)
        result = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
        native_op = {"sum": session.mpi.SUM, "max": session.mpi.MAX, "min": session.mpi.MIN}[op]
        if tag not in session.contexts:
            session.contexts[tag] = await self._duplicate(session.comm, "all ranks to begin")
        context, buffer = session.contexts[tag], [result.numpy(), dtype]
        await Request(
            session,
            tag,
            f"allreduce in phase '{phase}'",
            lambda: context.Iallreduce(session.mpi.IN_PLACE, buffer, native_op),
        )
        self.ledger.reduced(phase, result, self.world_size)
        return result.to(tensor.device)

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

    # ---- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the MPI communicators that were duplicated, of all channels.  MPI itself goes on."""
        super().close()
        self._session.close()
