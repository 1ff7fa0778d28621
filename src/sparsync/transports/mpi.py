"""The ``Communicator`` over MPI, by mpi4py: messages from and to tensors' memory, native allreduce."""

from __future__ import annotations

import atexit
import functools
import importlib
import time
from collections.abc import Callable
from typing import Any, Final, final

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError, DeadlineError, PeerError, first_line
from sparsync.transports.actors import Actor, Host
from sparsync.transports.communicator import Communicator, ReduceOp, check_timeout
from sparsync.transports.driver import Finished, Operation, run
from sparsync.transports.ledger import Framing

__all__ = ["MpiCommunicator", "load_mpi"]

_NAP: Final = 0.125  # of the time waited so far, slept between looks: a wait ends at most that late
_LONGEST_NAP: Final = 0.0005  # seconds; MPI moves large messages only while it is called
_LINGER: Final = 1.0  # seconds that ``close`` gives messages under way
# dtypes that MPI reduces itself.  Of floats only sums: its max and min may lose a NaN
_INTEGERS: Final = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATS: Final = (torch.float32, torch.float64)


def load_mpi() -> Any:
    """Import ``mpi4py.MPI``, which initialises MPI.

    Raises:
        ConfigurationError: mpi4py or an MPI library is missing; says what to install.
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

    Messages travel point to point, with the channel as tag, from and into the tensors' own memory.
    MPI tells their length: none is padded, and no round announces sizes.  ``allreduce`` is MPI's own
    for integers and float sums: it is the dense baseline of every comparison.  Waits sleep between
    looks, since ranks may outnumber the cores.  One thread at a time may use a communicator and its
    channels.

    Args:
        comm: an ``mpi4py.MPI.Intracomm``, which is duplicated; None for ``COMM_WORLD``.
        timeout: seconds that any wait may take before it fails with an error.
        spin: seconds for which a wait looks without a pause, before it sleeps between looks.  The default
            is about the time of a small message among more ranks than cores.

    Raises:
        ConfigurationError: mpi4py or MPI is missing, MPI has no threads, or a wrong argument.
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
        self.pending: dict[int, _Request] = {}  # MPI reads or writes their buffers until they end
        self.tags = 1 + int(comm.Get_attr(mpi.TAG_UB))
        # a duplicate, whose messages are never matched with the caller's; COMM_NULL once it is freed.
        # Idup and not Dup, whose wait for ranks that never come has no deadline
        self.comm, request = comm.Idup()
        _Request(self, "wait for all ranks to connect", lambda: request).wait()
        # errors are raised, and can name rank and phase; MPI's default handler ends the job
        self.comm.Set_errhandler(mpi.ERRORS_RETURN)

    @classmethod
    def of(cls, comm: Any) -> MpiCommunicator:
        """Return the communicator over one of mpi4py's: made once, and kept until that one is freed.

        All ranks make their first call together.

        Raises:
            ConfigurationError: as from the constructor.
        """
        key = _key(load_mpi())
        kept = comm.Get_attr(key)
        if kept is None or kept.closed:
            kept = cls(comm)
            comm.Set_attr(key, kept)
        assert isinstance(kept, MpiCommunicator)
        return kept

    @classmethod
    def over(cls, comm: Communicator, *, timeout: float = 300.0) -> MpiCommunicator:
        """Connect the ranks of another communicator, which ``mpiexec`` started; all of them call it.

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
        # Create_group has no deadline, but its members have just met
        part = world.Create_group(group)
        try:
            return cls(part, timeout=timeout)
        finally:  # the constructor has duplicated it
            part.Free()
            group.Free()
            everyone.Free()

    def host(self, actor: Actor) -> Host:
        """Run an actor over ZeroMQ, where it can sleep until any sender's message comes."""
        # imported here, since most groups run no actor and need no pyzmq
        from sparsync.transports.zmq import host_over

        return host_over(actor, self, self)

    # ---- point to point ------------------------------------------------------------------------

    def start_send(self, payload: Tensor, dest: int, phase: str, framing: Framing) -> Operation:
        """Start ``Isend`` from the payload's own memory."""
        if payload.numel() == 0 and not framing.variable:
            return Finished()  # both sides know that there is nothing to send
        buffer = [payload.contiguous().numpy(), self.mpi.BYTE]
        where = f"send to rank {dest} in phase '{phase}'"
        return _Request(self, where, lambda: self.comm.Isend(buffer, dest, self.tag))

    def start_recv(self, source: int, capacity: int, phase: str, framing: Framing) -> Operation:
        """Start ``Irecv`` into a buffer of ``capacity`` bytes; MPI's status tells the length."""
        if capacity == 0 and not framing.variable:
            self.ledger.received(phase, 0)
            return Finished(torch.empty(0, dtype=torch.uint8))
        buffer = torch.empty(capacity, dtype=torch.uint8)

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

        Booked as 2 n (P - 1) / P sent and received.  Native float sums are equal on all ranks, and equal
        to other transports' up to rounding.  Max and min of floats, in which MPI may lose a NaN, and
        dtypes that MPI lacks go point to point.
        """
        # alone among the collectives: only of allreduce it is certain that it is faster than point to
        # point, in 0.4 to 0.9 of the time (``docs/mpi.md``)
        native = tensor.dtype in _INTEGERS or (op == "sum" and tensor.dtype in _FLOATS)
        if not native or self.world_size == 1 or tensor.numel() == 0:
            return await super().allreduce(tensor, phase, op, in_place=in_place)
        mpi = self.mpi
        result = tensor.detach().to("cpu", copy=not in_place).contiguous()
        buffer, native_op = (
            result.view(-1).numpy(),
            {"sum": mpi.SUM, "max": mpi.MAX, "min": mpi.MIN},
        )
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
        """Let others run between looks; MPI itself would spin, which starves ranks that share cores."""
        # naps grow with the wait, by an eighth of it: so a wait is late by an eighth at most
        nap = 0.0 if waited < self.spin else min(waited * _NAP, _LONGEST_NAP, left)
        time.sleep(max(nap, 0.0))

    def close(self) -> None:
        """Drop the receives, give sent messages a second to leave, and free the duplicate.

        MPI itself goes on.
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
            # MPI may read or write their buffers until it ends: a reference at exit keeps the memory
            # from being used for anything else
            atexit.register(list, self.pending.values())
        self.comm.Free()  # MPI frees it when the operations that are pending on it have ended


@functools.cache
def _key(mpi: Any) -> int:
    """Return the key under which MPI keeps our communicators with the user's, and closes them with it."""
    # attributes are MPI's own way for libraries to remember something of a communicator: a duplicate does
    # not inherit them, and they are deleted when it is freed.  A weak reference would not do, since
    # several of mpi4py's objects may stand for one communicator
    key: int = mpi.Comm.Create_keyval(delete_fn=lambda _comm, _key, kept: kept.close())
    return key


@final
class _Request(Operation):
    """A send, a receive or a collective of MPI.

    Args:
        start: calls MPI; the request that it returns keeps the buffers.
        finish: takes the status and returns the result; None: there is none.
        receiving: whether it may be cancelled.
        late: start it at the first wait for it.  Collectives of one MPI communicator must start in one
            order on all ranks; of several channels in flight only the oldest is waited for, which is the
            same on all ranks.
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
        """Wait at most ``seconds``, or less if other channels are in flight: they may go on meanwhile."""
        if self.native is None and (begin or seconds > 0):
            self._begin()
        if self._ended() or seconds <= 0:
            return self.done
        comm, now = self.comm, time.monotonic()
        if self.waiting_since is None:
            self.waiting_since = now
        # the deadline counts from the first wait: a message that was posted early may take its time
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
        """Give a receive up.  A message that was sent cannot be taken back: it stays pending."""
        if self.receiving and self.native is not None and not self.done:
            self.native.Cancel()
            self.drain()

    def drain(self) -> None:
        """See whether MPI has finished with the buffers; their content is ignored."""
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
        # not pending any more, before ``finish`` may raise: MPI has ended the request, and it must not be
        # tested again
        self.comm.pending.pop(id(self), None)
        if self.finish is not None:
            self.result = self.finish(self.status)
        self.done = True
        return True

    def _failure(self, error: Any) -> PeerError:
        if error.Get_error_class() == self.comm.mpi.ERR_TRUNCATE:
            return PeerError(
                f"{self._place} is longer than it can be here; do the ranks disagree on size, k, codec "
                "or version?"
            )
        return PeerError(
            f"{self._place} failed: the peer is gone or broke off ({first_line(error)})"
        )

    @property
    def _place(self) -> str:
        return f"rank {self.comm.rank}, {self.comm.ledger.place()}: {self.where}"
