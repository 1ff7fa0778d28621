"""Mutual exclusion of two threads: one takes training steps, the other leaves the group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

__all__ = ["Turns"]


@final
class Turns:
    """A lock that training holds during a step, which may begin on one thread and end on another.

    Leaving holds the same lock, but has a deadline, so no step waits forever.
    """

    # A plain lock and a flag, because an RLock can be released only by the thread that acquired it.  A
    # step may begin on autograd's thread, with its first gradient, and end on the training thread.
    def __init__(self) -> None:
        self._lock, self._training = threading.Lock(), False

    def take(self) -> None:
        """Begin a step once no departure is in progress; within a step, do nothing."""
        if not self._training:
            self._lock.acquire()
            self._training = True

    def end(self) -> None:
        """End the step, if there is one."""
        if self._training:
            self._training = False
            self._lock.release()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Return a context that begins a step and ends it."""
        self.take()
        try:
            yield
        finally:
            self.end()

    def unless_leaving(self, call: Callable[[], None]) -> None:
        """Call a function on the training thread, unless this rank is leaving."""
        # do not wait for the lock: such calls only save time, and must not delay a forward pass
        if self._training:
            call()
        elif self._lock.acquire(blocking=False):
            try:
                call()
            finally:
                self._lock.release()

    def begin_leaving(self, seconds: float) -> bool:
        """Wait for the end of the step; if it comes in time, block further steps and return True."""
        return self._lock.acquire(timeout=seconds)

    def end_leaving(self) -> None:
        """Let steps proceed."""
        self._lock.release()
