"""Turns of two threads: training takes steps, or another thread leaves the group, never both at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

__all__ = ["Turns"]


@final
class Turns:
    """A lock that the training thread holds while it is in a step; the step may end on another thread.

    Leaving has deadlines of its own, so no step waits for ever.
    """

    # A plain lock and a flag, for a lock of Python's that counts can be released by its own thread alone:
    # autograd's thread may begin a step, with its first gradient, and the training thread ends it.
    def __init__(self) -> None:
        self._lock, self._training = threading.Lock(), False

    def take(self) -> None:
        """Begin a step once no leaving is under way; within a step this does nothing."""
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
        """Call, on the training thread, unless a leaving is under way."""
        # never waits: it is for calls that only save time, and a forward pass must not stand still for it
        if self._training:
            call()
        elif self._lock.acquire(blocking=False):
            try:
                call()
            finally:
                self._lock.release()

    def begin_leaving(self, seconds: float) -> bool:
        """Wait for the end of a step; if it comes in time, return True, and steps wait from now on."""
        return self._lock.acquire(timeout=seconds)

    def end_leaving(self) -> None:
        """Let steps go on."""
        self._lock.release()
