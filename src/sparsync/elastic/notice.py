"""Leave on SIGTERM, by which a machine announces its end, before the program's handler runs."""

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

# seconds after which SIGTERM is passed on even if the rank has not left; well below the 30 s after which
# Slurm and Kubernetes send SIGKILL
_LEAVES: Final = 8.0
_NATIVE: Final = 1.5  # further seconds for the main thread to return to Python, where handlers run


@final
class Notice:
    """Handles SIGTERM instead of the program's handler, which gets the signal once the rank has left.

    Args:
        begin: starts leaving, on any thread; returns False if the handle no longer exists, so that there
            is no rank to leave.
        leave: leaves within the given seconds without the help of the main thread, unless that thread is
            in a step.  It is called on a separate thread.  It returns "", or a line that says why the
            rank has not left.

    Attributes:
        came: whether the signal was received.
    """

    def __init__(self, begin: Callable[[], bool], leave: Callable[[float], str]) -> None:
        self.came = False
        self._start, self._leave = begin, leave
        # store the bound method once: every access creates a new object, which ``is`` would not recognise
        self._handler = self._receive
        self._former: Any = None
        self._late = False
        self._over = threading.Event()  # set once the signal was passed on
        # the lock is reentrant, because a second signal may come while the main thread holds it
        self._lock = threading.RLock()
        self._pipe: tuple[int, int] | None = None
        self.watch()
        self._listen()

    def _listen(self) -> None:
        """Also receive the signal on a thread, because handlers wait until native code returns.

        Python writes the numbers of signals to a single pipe.  If the program already uses this pipe, as
        asyncio does, only the handler receives the signal.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        self._pipe = reads, writes = os.pipe()
        # ``set_wakeup_fd`` requires a non-blocking pipe: Python writes from the signal handler,
        # which must not block
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
        """Replace the program's handler; called in every step, because the program may set a new one.

        On threads other than the main one, Python cannot set handlers, so nothing changes.  Nor does a
        handler change that was not set from Python.
        """
        if self._over.is_set() or threading.current_thread() is not threading.main_thread():
            return
        present = signal.getsignal(signal.SIGTERM)
        if present is not None and present is not self._handler:
            self._former = present
            signal.signal(signal.SIGTERM, self._handler)

    def pass_on(self) -> None:
        """Pass the signal to the program's own handler; called by the main thread after leaving."""
        with self._lock:
            if self._over.is_set():
                return
            self.close()
            # ``close`` has restored the program's handler, which receives this signal
            self._over.set()
            os.kill(os.getpid(), signal.SIGTERM)

    def close(self) -> None:
        """Restore the program's handler, unless the program has set a new one; main thread only."""
        if threading.current_thread() is not threading.main_thread():
            return
        if self._pipe is not None:
            # if the program has installed its own pipe since then, as asyncio does, restore that pipe
            other = signal.set_wakeup_fd(-1)
            if other != self._pipe[1]:
                signal.set_wakeup_fd(other)
            os.close(self._pipe[1])  # ends the thread that reads the pipe
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
        """Leave; pass the signal on once this rank has left or the time is up."""
        until = time.monotonic() + _LEAVES
        if words := self._leave(_LEAVES):
            # meanwhile, the main thread's own steps may still complete the departure
            self._over.wait(max(until - time.monotonic(), 0))
        with self._lock:
            if self._over.is_set():
                return
            if words:
                say(words)
            if signal.getsignal(signal.SIGTERM) is not self._handler:
                self._over.set()  # a handler set since the last ``watch`` has already had the signal
                return
            self._late = True
            # wake the main thread, which may be asleep, to pass the signal on
            os.kill(os.getpid(), signal.SIGTERM)
        if not self._over.wait(_NATIVE) and self._former == signal.SIG_DFL:
            # The main thread is in native code, e.g. compiling, and has not reacted.  The program has no
            # handler of its own, so let the kernel end the process.
            ctypes.pythonapi.PyOS_setsig(signal.SIGTERM, None)
            os.kill(os.getpid(), signal.SIGTERM)
