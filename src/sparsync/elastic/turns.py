"""Mutual exclusion of two threads: one takes training steps, the other leaves the group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

__all__ = ["Turns"]


@final
class Turns:
    """A lock held by the training thread during a step; a step may end on another thread.

    Leaving has a deadline, so no step waits forever.
    """

    # A plain lock and a flag, because only the thread that has acquired an RLock can release it:
    # autograd's thread may begin a step, with its first gradient, and the training thread ends the step.
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
        """Return a context that is a step."""
        self.take()
        try:
            yield
        finally:
            self.end()

    def unless_leaving(self, call: Callable[[], None]) -> None:
        """Call a function on the training thread, unless this rank is leaving."""
        # never block: such calls only save time, and must not delay a forward pass
        if self._training:
            call()
        elif self._lock.acquire(blocking=False):
            try:
                call()
            finally:
                self._lock.release()

    def begin_leaving(self, seconds: float) -> bool:
        """Wait for the end of a step; if it comes in time, return True, and further steps must wait."""
        return self._lock.acquire(timeout=seconds)

    def end_leaving(self) -> None:
        """Let steps proceed."""
        self._lock.release()
