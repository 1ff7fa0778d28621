"""The engine: one background thread that runs the communication of one model.

Coroutines run side by side (``flight.py``), started in the order submitted, which is the same on all
ranks; a callable waits until everything before it has ended.  Nothing waits inside another's
callback (which deadlocks gloo).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, final

from sparsync.errors import ConfigurationError
from sparsync.transports.base import Operation
from sparsync.transports.flight import Flight

__all__ = ["Engine"]

T = TypeVar("T")
Job = Callable[[], Any] | Coroutine[Operation, None, Any]
_Item = tuple[Job, "Future[Any]"]

_PATIENCE = 0.001  # seconds between looks for a new job while others are in flight
_LONG = 0.1  # seconds between looks at the younger members when no new one may start


@final
class Engine:
    """Runs jobs on a daemon thread.

    Example:
        >>> engine = Engine("demo")
        >>> engine.submit(lambda: 6 * 7).result(timeout=5)
        42
        >>> engine.close()
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[_Item | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"sparsync-{name}", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """The thread takes jobs."""
        return self._thread.is_alive()

    def submit(self, job: Callable[[], T] | Coroutine[Operation, None, T]) -> Future[T]:
        """Queue a job; the future has its result or its exception.

        When a coroutine fails, those in flight beside it fail with the same exception.
        """
        if not self._thread.is_alive():  # nobody would run it: its future would wait for ever
            if isinstance(job, Coroutine):
                job.close()
            raise ConfigurationError(
                "this engine is closed, or its handle was: attach again to a freshly wrapped model"
            )
        future: Future[T] = Future()
        self._jobs.put((job, future))
        return future

    def stop(self) -> None:
        """Let the thread end when it has finished what is queued; returns at once."""
        self._jobs.put(None)

    def close(self) -> None:
        """Finish what is queued, then end the thread."""
        self.stop()
        self._thread.join()

    def _work(self) -> None:
        flight = _Futures()
        while True:
            item = self._jobs.get() if flight.idle else flight.next_or_wait(self._jobs)
            if item is None:
                return
            job, future = item
            if isinstance(job, Coroutine):
                flight.start(job, future)
            else:
                flight.land()
                try:
                    future.set_result(job())
                except BaseException as error:
                    future.set_exception(error)
            del item, job, future  # while this waits, it must not keep a model alive


@final
class _Futures:
    """A flight whose members' ends go to futures."""

    def __init__(self) -> None:
        self._flight, self._open = Flight(), list[Future[Any]]()

    @property
    def idle(self) -> bool:
        return len(self._flight) == 0

    def start(self, program: Coroutine[Operation, None, Any], future: Future[Any]) -> None:
        self._open.append(future)
        self._guarded(lambda: self._flight.start(program, future.set_result))

    def next_or_wait(self, jobs: SimpleQueue[_Item | None]) -> _Item | None:
        """Fly until a job comes; when all have landed, wait for one."""
        while not self.idle:
            try:
                item = jobs.get_nowait()
            except Empty:
                self._guarded(lambda: self._flight.wait(_PATIENCE))
                continue
            if item is None:
                self.land()
            return item
        return jobs.get()

    def land(self) -> None:
        """Fly until all have ended."""
        while not self.idle:
            self._guarded(lambda: self._flight.wait(_LONG))

    def _guarded(self, call: Callable[[], None]) -> None:
        """Call; an error ends the flight and goes to all futures that are still open."""
        try:
            call()
        except BaseException as error:
            for future in self._open:
                if not future.done():
                    future.set_exception(error)
        self._open = [future for future in self._open if not future.done()]
