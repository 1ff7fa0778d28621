"""The messages of an actor over MPI: probed for, with naps between looks."""

from __future__ import annotations

import threading
import time
from typing import Any, Final, final

import torch
from torch import Tensor

from sparsync.transports.actors import Line

__all__ = ["MpiLine"]

_NAP: Final = 0.001  # seconds between looks; a wake ends a nap
_LINGER: Final = 5.0  # seconds that ``close`` gives the last messages to leave


@final
class MpiLine(Line):
    """Carries an actor's messages over an MPI communicator of its own.

    Args:
        mpi: the module ``mpi4py.MPI``.
        comm: used by nobody else; freed at the end.
    """

    survives = False  # MPI ends with its first dead rank

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi, self._comm = mpi, comm
        self._awake = threading.Event()
        self._sending: list[tuple[Any, Tensor]] = []  # MPI reads the memory until a request is done

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
            if self._awake.wait(min(left, _NAP)):
                self._awake.clear()
                return None

    def deaths(self) -> list[tuple[int, str]]:
        """Return nothing: MPI ends the job itself."""
        return []

    def wake(self) -> None:
        """End a nap."""
        self._awake.set()

    def close(self) -> None:
        """Let the last messages leave."""
        until = time.monotonic() + _LINGER
        while self._sending and time.monotonic() < until:
            self._sending = [pair for pair in self._sending if not pair[0].Test()]
            time.sleep(_NAP)
        if not self._sending and not self._mpi.Is_finalized():
            self._comm.Free()
