"""Requests of MPI, tested until a deadline; they keep their buffers."""

from __future__ import annotations

import atexit
import importlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, final

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError, DeadlineError, PeerError
from sparsync.transports.actors import Actor, ThreadHost
from sparsync.transports.communicator import ReduceOp
from sparsync.transports.driver import Operation
from sparsync.transports.ledger import Ledger

__all__ = ["MpiHost", "Request", "Session", "load_mpi", "native_type"]

_NAP: Final = 0.125  # of the time waited so far, slept between looks: a wait ends at most that late
_LONGEST_NAP: Final = 0.0005  # seconds; MPI moves large messages only when it is called
_LOOK: Final = 0.001  # seconds between looks for an actor's messages; a wake ends a nap
_LINGER: Final = 5.0  # seconds that a host gives the last messages to leave


def load_mpi() -> Any:
    """Import ``mpi4py.MPI``, which initialises MPI.

    Raises:
        ConfigurationError: mpi4py or an MPI library is missing; says what to install.
    """
    try:
        return importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError, OSError) as error:
        why = str(error).partition("\n")[0]
        raise ConfigurationError(
            f"transport 'mpi' needs mpi4py and an MPI library ({why}); "
            "pip install 'sparsync[mpi]' brings both, and mpiexec"
        ) from error


def native_type(mpi: Any, dtype: torch.dtype, op: ReduceOp) -> Any:
    """Return the type by which MPI reduces a dtype; None where its own reduction does not do."""
    integers = {
        torch.uint8: mpi.UINT8_T,
        torch.int8: mpi.INT8_T,
        torch.int16: mpi.INT16_T,
        torch.int32: mpi.INT32_T,
        torch.int64: mpi.INT64_T,
    }
    # its max and min may lose a NaN
    floats = {torch.float32: mpi.FLOAT, torch.float64: mpi.DOUBLE} if op == "sum" else {}
    return {**integers, **floats}.get(dtype)


@dataclass(eq=False)
class Session:
    """The state that a communicator and its channels share.

    Attributes:
        mpi: the module ``mpi4py.MPI``.
        comm: a communicator of the library's own, so that no message meets the caller's.
        rank: this rank in it.
        ledger: of all channels.
        timeout: seconds that any wait may take.
        spin: seconds of looking again and again before a wait sleeps between looks.
        contexts: per channel, a communicator for its native allreduce.
        pending: requests that MPI has not ended: it reads or writes their buffers until then.
        closed: nothing may be started any more.
    """

    mpi: Any
    comm: Any
    rank: int
    ledger: Ledger
    timeout: float
    spin: float
    contexts: dict[int, Any] = field(default_factory=dict)
    pending: dict[int, Request] = field(default_factory=dict)
    closed: bool = False

    def rest(self, waited: float, left: float) -> None:
        """Let others run between looks; MPI itself would spin, which starves ranks that share cores."""
        nap = 0.0 if waited < self.spin else min(waited * _NAP, _LONGEST_NAP, left)
        time.sleep(max(nap, 0.0))

    def close(self, linger: float = 1.0) -> None:
        """Give what was sent ``linger`` seconds to leave, drop the receives, free the communicators."""
        if self.closed or self.mpi.Is_finalized():
            self.closed = True
            return
        self.closed = True
        for request in list(self.pending.values()):
            request.cancel()
        until = time.monotonic() + linger
        while self.pending and time.monotonic() < until:
            for request in list(self.pending.values()):
                request.drain()
            self.rest(self.spin, until)
        if self.pending:  # MPI may use their buffers until it ends, so these must not be reused
            atexit.register(list, self.pending.values())
        for comm in (*self.contexts.values(), self.comm):
            if comm != self.mpi.COMM_NULL:
                comm.Free()
        self.contexts.clear()


@final
class Request(Operation):
    """A send, a receive or a collective of MPI.

    Args:
        session: of the communicator.
        tag: the channel.
        where: what it is, for errors: "message from rank 3 in phase 'split'".
        start: calls MPI; the request that it returns keeps the buffers.
        finish: takes the status, returns the result; None: there is none.
        receiving: it may be cancelled.
        late: start it when it is first waited for, not now.  Collectives of one MPI communicator
            must start in one order on all ranks; of several channels in flight only the oldest is
            waited for, which is the same on all ranks.
    """

    def __init__(
        self,
        session: Session,
        tag: int,
        where: str,
        start: Callable[[], Any],
        finish: Callable[[Any], Tensor] | None = None,
        *,
        receiving: bool = False,
        late: bool = False,
    ) -> None:
        if session.closed:
            raise ConfigurationError(
                f"rank {session.rank}: this MPI communicator is closed; connect again"
            )
        self.session, self.tag, self.where = session, tag, where
        self.start, self.finish, self.receiving = start, finish, receiving
        self.native: Any = None
        self.status = session.mpi.Status()
        self.waiting_since: float | None = None
        if not late:
            self.poll(0.0, begin=True)

    def poll(self, seconds: float, *, begin: bool = False) -> bool:
        """Wait at most ``seconds``; less, when other channels are in flight and may go on."""
        if self.native is None and (begin or seconds > 0):
            self._begin()
        if self._ended() or seconds <= 0:
            return self.done
        session, now = self.session, time.monotonic()
        if self.waiting_since is None:
            self.waiting_since = now
        deadline = self.waiting_since + session.timeout
        if any(other.tag != self.tag for other in session.pending.values()):
            seconds = min(seconds, _LONGEST_NAP)
        until = min(now + seconds, deadline)
        while not self._ended():
            now = time.monotonic()
            if now >= deadline:
                self.cancel()
                raise DeadlineError(
                    f"{self._place} did not complete within {session.timeout:g} s; "
                    "is that rank alive? Raise timeout= if it is only slow"
                )
            if now >= until:
                break
            session.rest(now - self.waiting_since, until - now)
        return self.done

    def wait(self) -> None:
        """Block until done, at most until the deadline."""
        while not self.poll(self.session.timeout):
            pass

    def cancel(self) -> None:
        """Give a receive up.  What was sent cannot be taken back: it stays pending."""
        if self.receiving and self.native is not None and not self.done:
            self.native.Cancel()
            self.drain()

    def drain(self) -> None:
        """See whether MPI is through with the buffers; nobody looks at what arrived."""
        try:
            ended = self.native.Test()
        except self.session.mpi.Exception:
            ended = True
        if ended:
            self.session.pending.pop(id(self), None)

    def _begin(self) -> None:
        try:
            self.native = self.start()
        except self.session.mpi.Exception as error:
            raise self._failure(error) from error
        self.session.pending[id(self)] = self

    def _ended(self) -> bool:
        if self.done or self.native is None:
            return self.done
        try:
            if not self.native.Test(self.status):
                return False
        except self.session.mpi.Exception as error:
            self.session.pending.pop(id(self), None)
            raise self._failure(error) from error
        self.session.pending.pop(id(self), None)
        if self.finish is not None:
            self.result = self.finish(self.status)
        self.done = True
        return True

    def _failure(self, error: Any) -> PeerError:
        if error.Get_error_class() == self.session.mpi.ERR_TRUNCATE:
            return PeerError(
                f"{self._place} is longer than it can be here; do the ranks disagree on size, k, codec "
                "or version?"
            )
        first_line = (str(error) or "no message").splitlines()[0]
        return PeerError(f"{self._place} failed: the peer is gone or broke off ({first_line})")

    @property
    def _place(self) -> str:
        return f"rank {self.session.rank}, step {self.session.ledger.step}: {self.where}"


@final
class MpiHost(ThreadHost):
    """Carries an actor's messages over an MPI communicator of its own: probed for, with naps.

    Args:
        actor: to run.
        session: of the communicator whose rank this is.
        comm: used by nobody else; freed at the end.
    """

    survives = False  # MPI ends with its first dead rank

    def __init__(self, actor: Actor, session: Session, comm: Any) -> None:
        super().__init__(actor, session.rank, comm.Get_size(), session.timeout)
        self._mpi, self._comm = session.mpi, comm
        self._awake = threading.Event()
        self._sending: list[tuple[Any, Tensor]] = []  # MPI reads the memory until a request is done
        self._thread.start()

    def send(self, dest: int, payload: Tensor) -> None:
        """Start ``Isend`` from the payload's own memory."""
        self._sending = [pair for pair in self._sending if not pair[0].Test()]
        payload = payload.contiguous()
        request = self._comm.Isend([payload.numpy(), self._mpi.BYTE], dest)
        self._sending.append((request, payload))

    def take(self, seconds: float) -> tuple[int, Tensor] | None:
        """Look for a message until one is there."""
        until, status = time.monotonic() + seconds, self._mpi.Status()
        while True:
            message = self._comm.Improbe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG, status)
            if message is not None:
                body = torch.empty(status.Get_count(self._mpi.BYTE), dtype=torch.uint8)
                message.Recv([body.numpy(), self._mpi.BYTE])
                return status.Get_source(), body
            left = until - time.monotonic()
            if left <= 0:
                return None
            if self._awake.wait(min(left, _LOOK)):
                self._awake.clear()
                return None

    def deaths(self) -> list[tuple[int, str]]:
        """Return nothing: MPI ends the job itself."""
        return []

    def wake(self) -> None:
        """End a nap."""
        self._awake.set()

    def leave(self) -> None:
        """Let the last messages leave."""
        until = time.monotonic() + _LINGER
        while self._sending and time.monotonic() < until:
            self._sending = [pair for pair in self._sending if not pair[0].Test()]
            time.sleep(_LOOK)
        if not self._sending and not self._mpi.Is_finalized():
            self._comm.Free()
