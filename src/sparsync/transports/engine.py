"""The engine: one background thread that runs the communication of one model, in the order submitted.

All ranks submit in the same order, so all threads are in the same collective; nothing waits inside
another's callback (which deadlocks gloo).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar, final

from sparsync.errors import ConfigurationError

__all__ = ["Engine"]

T = TypeVar("T")


@final
class Engine:
    """Runs callables one after the other on a daemon thread.

    Example:
        >>> engine = Engine("demo")
        >>> engine.submit(lambda: 6 * 7).result(timeout=5)
        42
        >>> engine.close()
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"sparsync-{name}", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queue a job; the future has its result or its exception."""
        if not self._thread.is_alive():  # nobody would run it: its future would wait for ever
            raise ConfigurationError("this engine is closed; make a new one")
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
        while (item := self._jobs.get()) is not None:
            job, future = item
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)
            del item, job, future  # while this waits, it must not keep a model alive
