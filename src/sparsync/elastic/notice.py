"""SIGTERM, the notice that a machine will be taken away: leave first, then call the program's handler."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, Final, final

from sparsync.console import say

__all__ = ["Notice"]

# seconds in which a rank leaves, or ends without: Slurm and Kubernetes kill 30 s after SIGTERM
_LEAVES: Final = 8.0
_NATIVE: Final = 1.5  # seconds more in which the main thread returns to Python, where handlers run


@final
class Notice:
    """Handles SIGTERM in place of the program's handler, which gets the signal when the rank has left.

    Args:
        begin: begins to leave, on any thread; False: the handle is gone, and there is nothing to leave.
        leave: leaves within the seconds given without the main thread, unless that is in a step; it is
            called on a thread of its own, and returns nothing, or a line that says why it has not left.

    Attributes:
        came: the signal was received.
    """

    def __init__(self, begin: Callable[[], bool], leave: Callable[[float], str]) -> None:
        self.came = False
        self._start, self._leave = begin, leave
        # one object: every access to a bound method makes another, and ``is`` would not recognise it
        self._handler = self._receive
        self._former: Any = None
        self._late = False
        self._over = threading.Event()  # it was passed on
        self._lock = threading.RLock()  # a second signal may find the main thread inside
        self._pipe: tuple[int, int] | None = None
        self.watch()
        self._listen()

    def _listen(self) -> None:
        """Hear of the signal on a thread as well: a handler only runs once native code returns.

        Python writes signals to one pipe only.  Where a program uses it, as asyncio does, there is the
        handler alone.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        self._pipe = reads, writes = os.pipe()
        # ``set_wakeup_fd`` demands it: Python writes inside the signal handler, which must not wait
        os.set_blocking(writes, False)
        other = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
        if other != -1:
            signal.set_wakeup_fd(other)
            self._pipe = None
            os.close(reads)
            os.close(writes)
            return

        def hear() -> None:
            while raised := os.read(reads, 64):
                if signal.SIGTERM in raised:
                    self._begin()
            os.close(reads)

        threading.Thread(target=hear, name="sparsync-notice", daemon=True).start()

    def watch(self) -> None:
        """Take the place of the program's handler; called in every step, since it may set another one.

        Does nothing on threads other than the main one, where Python sets no handlers, and for a handler
        that is not Python's.
        """
        if self._over.is_set() or threading.current_thread() is not threading.main_thread():
            return
        present = signal.getsignal(signal.SIGTERM)
        if present is not None and present is not self._handler:
            self._former = present
            signal.signal(signal.SIGTERM, self._handler)

    def pass_on(self) -> None:
        """Let the program's own handler have the signal; the main thread calls this when it has left."""
        with self._lock:
            if self._over.is_set():
                return
            self.close()
            # after ``close`` has put the program's handler back, so that it is the one to get the signal
            self._over.set()
            os.kill(os.getpid(), signal.SIGTERM)

    def close(self) -> None:
        """Put the program's handler back, unless it has set another one; the main thread alone can."""
        if threading.current_thread() is not threading.main_thread():
            return
        if self._pipe is not None:
            # a program that has taken the pipe since then, as asyncio does, keeps it
            other = signal.set_wakeup_fd(-1)
            if other != self._pipe[1]:
                signal.set_wakeup_fd(other)
            os.close(self._pipe[1])  # the thread ends
            self._pipe = None
        if signal.getsignal(signal.SIGTERM) is self._handler:
            signal.signal(signal.SIGTERM, self._former)

    def _receive(self, *_signal: Any) -> None:
        self._begin()
        if self._late:
            self.pass_on()

    def _begin(self) -> None:
        with self._lock:
            if self.came:
                return
            self.came, self._late = True, not self._start()
        if not self._late:
            threading.Thread(target=self._end, name="sparsync-notice", daemon=True).start()

    def _end(self) -> None:
        """Leave, and pass the signal on when that is done, or the time is over."""
        until = time.monotonic() + _LEAVES
        if words := self._leave(_LEAVES):
            # the main thread's own steps may do it
            self._over.wait(max(until - time.monotonic(), 0))
        with self._lock:
            if self._over.is_set():
                return
            if words:
                say(words)
            if signal.getsignal(signal.SIGTERM) is not self._handler:
                self._over.set()  # a handler that was set since ``watch``: it has had the signal
                return
            self._late = True
            # the main thread may be asleep: it hands over there
            os.kill(os.getpid(), signal.SIGTERM)
        if not self._over.wait(_NATIVE) and self._former == signal.SIG_DFL:
            # it is in native code, as in a compilation, and could not: what the kernel would have done
            ctypes.pythonapi.PyOS_setsig(signal.SIGTERM, None)
            os.kill(os.getpid(), signal.SIGTERM)
