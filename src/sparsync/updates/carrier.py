"""Runs exchanges of updates on the handle's thread."""

from __future__ import annotations

import time
from collections.abc import Awaitable
from concurrent.futures import Future
from contextlib import nullcontext
from typing import final

import torch

from sparsync.transports.driver import Engine, Operation, run
from sparsync.updates.fragments import Begin

__all__ = ["Carrier"]


@final
class Carrier:
    """Runs exchanges on the handle's thread, and measures their durations.

    Attributes:
        busy: seconds that exchanges took.
        waited: seconds that the training thread waited for them.
    """

    def __init__(self, engine: Engine, device: torch.device) -> None:
        self.engine, self._device = engine, device
        self.busy = self.waited = 0.0

    def carry(self, exchange: Begin) -> Awaitable[None]:
        """Queue an exchange.

        On a GPU, the job uses this thread's stream: the weights were read on it, and will be written on
        it.
        """
        gpu = self._device.type == "cuda"
        stream = torch.cuda.current_stream(self._device) if gpu else None

        def job() -> float:
            begin = time.perf_counter()
            # ``torch.cuda.stream(None)`` would do nothing except initialise CUDA
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                run(exchange())
            return time.perf_counter() - begin

        return _Carried(self.engine.submit(job), self)

    def book(self, busy: float, waited: float) -> None:
        """Add the seconds of an exchange, and the seconds that the training thread waited for it."""
        self.busy += busy
        self.waited += waited


@final
class _Carried(Operation):
    """An exchange in flight on the engine's thread.

    The class is not a coroutine: if the process ended before the exchange was applied, Python would warn
    about a coroutine that was never awaited.

    Attributes:
        goes_on: whether the last wait was interrupted, e.g. by Ctrl-C, while the exchange continues.
    """

    def __init__(self, future: Future[float], carrier: Carrier) -> None:
        self._future, self._carrier, self.goes_on = future, carrier, False

    def wait(self) -> None:
        """Block until the exchange has ended; record the durations of the exchange and of this wait."""
        begin, future = time.perf_counter(), self._future
        try:
            busy = future.result()
        except BaseException as error:
            self.goes_on = not (future.done() and future.exception() is error)
            raise
        self._carrier.book(busy, time.perf_counter() - begin)
        self.done = True
