"""The ``Communicator`` over MPI, through mpi4py: no copies of messages, and MPI's own allreduce."""

from __future__ import annotations

import atexit
import functools
import importlib
import time
from collections.abc import Callable
from typing import Any, Final, final

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError, DeadlineError, PeerError, first_line, require
from sparsync.transports.actors import Actor, Host
from sparsync.transports.communicator import Communicator, ReduceOp, check_timeout
from sparsync.transports.driver import Finished, Operation, run
from sparsync.transports.ledger import Framing

__all__ = ["MpiCommunicator", "load_mpi"]

# sleep between checks, as a fraction of the time waited; it bounds how late a wait ends
_NAP: Final = 0.125
_LONGEST_NAP: Final = 0.0005  # seconds; large messages make progress only while MPI is called
_LINGER: Final = 1.0  # seconds that ``close`` waits for messages in flight
# The dtypes that MPI itself reduces.  Floats are only summed there, because MPI's max and min may lose a
# NaN.
_INTEGERS: Final = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATS: Final = (torch.float32, torch.float64)


def load_mpi() -> Any:
    """Import ``mpi4py.MPI``, which initialises MPI.

    Raises:
        ConfigurationError: mpi4py or an MPI library is missing; the error says what to install.
    """
    try:
        return importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError, OSError) as error:
        raise ConfigurationError(
            f"transport 'mpi' needs mpi4py and an MPI library ({first_line(error)}); "
            "pip install 'sparsync[mpi]' brings both, and mpiexec"
        ) from error


@final
class MpiCommunicator(Communicator):
    """One rank of an MPI job.

    Messages are sent point to point, directly from tensors into tensors; their tag is the channel.  MPI
    reports their length, so no message is padded and no round is spent on sizes.  For integers and float
    sums, ``allreduce`` is MPI's own, the dense baseline of every comparison.  Ranks may outnumber the
    cores, so a wait sleeps between checks.  Only one thread at a time may use a communicator and its
    channels.

    Args:
        comm: an ``mpi4py.MPI.Intracomm``, which is duplicated; None for ``COMM_WORLD``.
        timeout: seconds that any wait may take before it fails with an error.
        spin: how many seconds a wait polls without pauses, before it starts to sleep between checks.
            The default is about the time that a small message takes when ranks outnumber the cores.

    Raises:
        ConfigurationError: mpi4py or MPI is missing, MPI lacks thread support, or an argument is wrong.
        DeadlineError: not all ranks arrived within ``timeout``.

    Example (``mpiexec -n 4 python this.py``)::

        with MpiCommunicator() as comm:
            reduced = sparsync.allreduce(vector, comm, k=1000)
    """

    def __init__(self, comm: Any = None, *, timeout: float = 300.0, spin: float = 0.0002) -> None:
        mpi = load_mpi()
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
        self.timeout = check_timeout(timeout)
        self.spin, self.mpi = spin, mpi
        self.pending: dict[int, _Request] = {}  # MPI may access their buffers until they end
        self.tags = 1 + int(comm.Get_attr(mpi.TAG_UB))
        # A duplicate's messages never match the caller's; the duplicate becomes COMM_NULL when freed.
        # Idup is used because Dup would wait without a deadline for ranks that never arrive.
        self.comm, request = comm.Idup()
        _Request(self, "wait for all ranks to connect", lambda: request).wait()
        # let MPI return errors, so that ``_Request`` can raise them with rank and phase; MPI's default
        # handler ends the job
        self.comm.Set_errhandler(mpi.ERRORS_RETURN)

    @classmethod
    def of(cls, comm: Any) -> MpiCommunicator:
        """Return the communicator that wraps mpi4py's ``comm``; it lives until ``comm`` is freed.

        The first call is collective.

        Raises:
            ConfigurationError: ``comm`` is null or was freed, or the constructor raised this error.
        """
        mpi = load_mpi()
        require(
            comm != mpi.COMM_NULL,
            "comm is MPI.COMM_NULL: it was freed, or this rank is not in it (Split with MPI.UNDEFINED); "
            "call only on the ranks of a live communicator",
        )
        key = _key(mpi)
        kept = comm.Get_attr(key)
        if kept is None or kept.closed:
            kept = cls(comm)
            comm.Set_attr(key, kept)
        assert isinstance(kept, MpiCommunicator)
        return kept

    @classmethod
    def over(cls, comm: Communicator, *, timeout: float = 300.0) -> MpiCommunicator:
        """Connect the ranks of another communicator, started by ``mpiexec``; this is collective.

        Raises:
            ConfigurationError: MPI does not know these ranks.
        """
        mpi = load_mpi()
        world = mpi.COMM_WORLD
        mine = torch.tensor([world.Get_rank(), world.Get_size()], device="cpu")
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
        # Create_group has no deadline, but needs none: its members have just communicated
        part = world.Create_group(group)
        try:
            return cls(part, timeout=timeout)
        finally:  # the constructor has made a duplicate
            part.Free()
            group.Free()
            everyone.Free()

    def host(self, actor: Actor) -> Host:
        """Run an actor over ZeroMQ, so that it can sleep until any rank sends it a message."""
        # imported here, because most groups run no actor and do not need pyzmq
        from sparsync.transports.zmq import host_over

        return host_over(actor, self, self)

    # ---- point to point ------------------------------------------------------------------------

    def start_send(self, payload: Tensor, dest: int, phase: str, framing: Framing) -> Operation:
        """Start ``Isend`` directly from the payload."""
        if payload.numel() == 0 and not framing.variable:
            return Finished()  # both sides know that there is nothing to send
        buffer = [payload.contiguous().numpy(), self.mpi.BYTE]
        where = f"send to rank {dest} in phase '{phase}'"
        return _Request(self, where, lambda: self.comm.Isend(buffer, dest, self.tag))

    def start_recv(self, source: int, capacity: int, phase: str, framing: Framing) -> Operation:
        """Start ``Irecv`` into a buffer of ``capacity`` bytes; MPI's status reports the length."""
        if capacity == 0 and not framing.variable:
            self.ledger.received(phase, 0)
            return Finished(torch.empty(0, dtype=torch.uint8, device="cpu"))
        buffer = torch.empty(capacity, dtype=torch.uint8, device="cpu")

        def finish(status: Any) -> Tensor:
            length = status.Get_count(self.mpi.BYTE)
            if length != capacity and not framing.variable:
                raise PeerError(
                    f"rank {self.rank}, {self.ledger.place()}: message from rank {source} in phase "
                    f"'{phase}' has {length} bytes where {capacity} were expected; do the ranks "
                    "disagree on size or k?"
                )
            self.ledger.received(phase, length)
            return buffer[:length]

        return _Request(
            self,
            f"message from rank {source} in phase '{phase}' (at most {capacity} bytes)",
            lambda: self.comm.Irecv([buffer.numpy(), self.mpi.BYTE], source, self.tag),
            finish,
            receiving=True,
        )

    # ---- the native collective -----------------------------------------------------------------

    async def allreduce(
        self, tensor: Tensor, phase: str, op: ReduceOp = "sum", *, in_place: bool = False
    ) -> Tensor:
        """Use the native call for integers, and for sums of float32 and float64.

        The ledger counts 2 n (P - 1) / P as sent and received.  Native float sums are equal on all
        ranks, and equal to other transports' sums up to rounding.  Two cases are reduced point to point:
        max and min of floats, in which MPI may lose a NaN, and dtypes that MPI lacks.
        """
        # Only this collective is native, because only here the native call is always faster than
        # point-to-point messages: it takes 0.4 to 0.9 of their time (``docs/mpi.md``)
        native = tensor.dtype in _INTEGERS or (op == "sum" and tensor.dtype in _FLOATS)
        if not native or self.world_size == 1 or tensor.numel() == 0:
            return await super().allreduce(tensor, phase, op, in_place=in_place)
        mpi = self.mpi
        result = tensor.detach().to("cpu", copy=not in_place).contiguous()
        buffer, native_op = (
            result.view(-1).numpy(),
            {"sum": mpi.SUM, "max": mpi.MAX, "min": mpi.MIN},
        )
        # MPI cannot cancel a collective: an abandoned call stays pending, and the other ranks' next
        # collective would match it
        with self.exchange():
            await _Request(
                self,
                f"allreduce in phase '{phase}'",
                lambda: self.comm.Iallreduce(mpi.IN_PLACE, buffer, native_op[op]),
                late=True,
            )
        self.ledger.reduced(phase, result, self.world_size)
        return tensor.copy_(result) if in_place else result.to(tensor.device)

    # ---- the end -------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether no more messages can be sent."""
        return bool(self.mpi.Is_finalized()) or self.comm == self.mpi.COMM_NULL

    def rest(self, waited: float, left: float) -> None:
        """Let other ranks run between checks; MPI itself would spin and starve ranks on the same core."""
        # sleep for an eighth of the time waited so far, so that a wait ends at most an eighth late
        nap = 0.0 if waited < self.spin else min(waited * _NAP, _LONGEST_NAP, left)
        time.sleep(max(nap, 0.0))

    def close(self) -> None:
        """Cancel receives, wait up to a second for sent messages, and free the duplicated communicator.

        MPI itself keeps running.
        """
        super().close()
        if self.closed:
            return
        for request in list(self.pending.values()):
            request.cancel()
        until = time.monotonic() + _LINGER
        while self.pending and time.monotonic() < until:
            for request in list(self.pending.values()):
                request.drain()
            self.rest(self.spin, until - time.monotonic())
        if self.pending:
            # MPI may access these requests' buffers until it ends; references that are kept until exit
            # prevent the memory from being reused
            atexit.register(list, self.pending.values())
        self.comm.Free()  # MPI frees it once all pending operations have ended


@functools.cache
def _key(mpi: Any) -> int:
    """Return the key of the MPI attribute whose deletion closes the ``MpiCommunicator`` stored in it."""
    # Attributes are MPI's own way for libraries to attach data to a communicator.  Duplicates do not
    # inherit them, and freeing the communicator deletes them.  A weak dictionary keyed by mpi4py objects
    # would not work, because several of these objects may refer to one communicator.
    key: int = mpi.Comm.Create_keyval(delete_fn=lambda _comm, _key, kept: kept.close())
    return key


@final
class _Request(Operation):
    """A send, a receive or a collective in MPI.

    Args:
        start: calls MPI; the request that it returns keeps the buffers alive.
        finish: takes the status and returns the result; None if there is no result.
        receiving: whether the request is a receive; only receives may be cancelled.
        late: whether to start only at the first wait.  All ranks must start an MPI communicator's
            collectives in the same order.  If several channels are in flight, a rank waits only for the
            oldest, which is the same one on all ranks.
    """

    def __init__(
        self,
        comm: MpiCommunicator,
        where: str,
        start: Callable[[], Any],
        finish: Callable[[Any], Tensor] | None = None,
        *,
        receiving: bool = False,
        late: bool = False,
    ) -> None:
        if comm.closed:
            raise ConfigurationError(
                f"rank {comm.rank}: this MPI communicator is closed; connect again"
            )
        self.comm, self.where = comm, where
        self.start, self.finish, self.receiving = start, finish, receiving
        self.native: Any = None
        self.status = comm.mpi.Status()
        self.waiting_since: float | None = None
        if not late:
            self.poll(0.0, begin=True)

    def poll(self, seconds: float, *, begin: bool = False) -> bool:
        """Wait at most ``seconds``; wait less if other channels are in flight, so that they progress."""
        if self.native is None and (begin or seconds > 0):
            self._begin()
        if self._ended() or seconds <= 0:
            return self.done
        comm, now = self.comm, time.monotonic()
        if self.waiting_since is None:
            self.waiting_since = now
        # count the deadline from the first wait, because a receive may be posted long before its message
        # arrives
        deadline = self.waiting_since + comm.timeout
        if any(other.comm.tag != comm.tag for other in comm.pending.values()):
            seconds = min(seconds, _LONGEST_NAP)
        until = min(now + seconds, deadline)
        while not self._ended():
            comm.check_open()
            now = time.monotonic()
            if now >= deadline:
                self.cancel()
                raise DeadlineError(
                    f"{self._place} did not complete within {comm.timeout:g} s; "
                    "is that rank alive? Raise timeout= if it is only slow"
                )
            if now >= until:
                break
            comm.rest(now - self.waiting_since, until - now)
        return self.done

    def wait(self) -> None:
        """Block until done, at most until the deadline."""
        while not self.poll(self.comm.timeout):
            pass

    def cancel(self) -> None:
        """Abandon a receive; a sent message cannot be withdrawn, so it stays pending."""
        if self.receiving and self.native is not None and not self.done:
            self.native.Cancel()
            self.drain()

    def drain(self) -> None:
        """Check whether MPI no longer needs the buffers; ignore their content."""
        try:
            ended = self.native.Test()
        except self.comm.mpi.Exception:
            ended = True
        if ended:
            self.comm.pending.pop(id(self), None)

    def _begin(self) -> None:
        try:
            self.native = self.start()
        except self.comm.mpi.Exception as error:
            raise self._failure(error) from error
        self.comm.pending[id(self)] = self

    def _ended(self) -> bool:
        if self.done or self.native is None:
            return self.done
        try:
            if not self.native.Test(self.status):
                return False
        except self.comm.mpi.Exception as error:
            self.comm.pending.pop(id(self), None)
            raise self._failure(error) from error
        # no longer pending, even if ``finish`` raises: MPI has ended the request, which must not be
        # tested again
        self.comm.pending.pop(id(self), None)
        if self.finish is not None:
            self.result = self.finish(self.status)
        self.done = True
        return True

    def _failure(self, error: Any) -> PeerError:
        if error.Get_error_class() == self.comm.mpi.ERR_TRUNCATE:
            return PeerError(
                f"{self._place} is longer than expected; do the ranks disagree on size, k, codec "
                "or version?"
            )
        return PeerError(
            f"{self._place} failed: the peer is gone or broke off ({first_line(error)})"
        )

    @property
    def _place(self) -> str:
        return f"rank {self.comm.rank}, {self.comm.ledger.place()}: {self.where}"
