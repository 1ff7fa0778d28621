"""What MPI has under way: requests that are tested, with a deadline, and that keep their buffers."""

from __future__ import annotations

import atexit
import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from sparsync.errors import ConfigurationError, DeadlineError, PeerError
from sparsync.transports.base import Operation, ReduceOp
from sparsync.transports.ledger import Ledger

__all__ = ["Patience", "Request", "Session", "load_mpi", "native_type"]


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


@dataclass(frozen=True)
class Patience:
    """How a wait looks for its end; MPI itself would spin, which starves ranks that share cores.

    Attributes:
        spin: seconds of looking again and again, letting others run in between.  Ours: about what a
            small message takes among more ranks than cores.
        nap: then it sleeps this fraction of the time waited so far, so it ends at most that late.
        longest: seconds of the longest sleep; MPI moves large messages only when it is called.
    """

    spin: float = 0.0002
    nap: float = 0.125
    longest: float = 0.0005

    def rest(self, waited: float, left: float) -> None:
        """Let others run, when ``waited`` seconds are over and ``left`` are to come."""
        if waited < self.spin:
            time.sleep(0)
        else:
            time.sleep(max(0.0, min(waited * self.nap, self.longest, left)))


@dataclass(eq=False)
class Session:
    """What a communicator and its channels share.

    Attributes:
        mpi: the module ``mpi4py.MPI``.
        comm: a communicator of our own, so that no message meets the caller's.
        rank: this rank in it.
        ledger: of all channels.
        timeout: seconds that any wait may take.
        patience: how waits look.
        contexts: per channel, a communicator for its native collectives.
        pending: requests that MPI has not ended: it reads or writes their buffers until then.
        closed: nothing may be started any more.
    """

    mpi: Any
    comm: Any
    rank: int
    ledger: Ledger
    timeout: float
    patience: Patience
    contexts: dict[int, Any] = field(default_factory=dict)
    pending: dict[int, Request] = field(default_factory=dict)
    closed: bool = False

    def close(self, linger: float = 1.0) -> None:
        """Give what was sent ``linger`` seconds to leave, drop the receives, free what is ours."""
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
            self.patience.rest(self.patience.spin, until)
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
            seconds = min(seconds, session.patience.longest)
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
            session.patience.rest(now - self.waiting_since, until - now)
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
        """See whether MPI is through with the buffers; what came is not looked at any more."""
        try:
            ended = self.native.Test()
        except self.session.mpi.Exception:
            ended = True
        if ended:
            self.session.pending.pop(id(self), None)

    def _begin(self) -> None:
        with _Named(self):
            self.native = self.start()
        self.session.pending[id(self)] = self

    def _ended(self) -> bool:
        if self.done or self.native is None:
            return self.done
        try:
            with _Named(self):
                if not self.native.Test(self.status):
                    return False
        except PeerError:
            self.session.pending.pop(id(self), None)
            raise
        self.session.pending.pop(id(self), None)
        if self.finish is not None:
            self.result = self.finish(self.status)
        self.done = True
        return True

    @property
    def _place(self) -> str:
        return f"rank {self.session.rank}, step {self.session.ledger.step}: {self.where}"


@final
class _Named:
    """Turns what mpi4py raises into an error that names rank, phase and step."""

    def __init__(self, request: Request) -> None:
        self.request = request

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        mpi = self.request.session.mpi
        if not isinstance(error, mpi.Exception):
            return
        place = self.request._place
        if error.Get_error_class() == mpi.ERR_TRUNCATE:
            raise PeerError(
                f"{place} is longer than it can be here; do the ranks disagree on size, k, codec or "
                "version?"
            ) from error
        first_line = (str(error) or "no message").splitlines()[0]
        raise PeerError(f"{place} failed: the peer is gone or broke off ({first_line})") from error
