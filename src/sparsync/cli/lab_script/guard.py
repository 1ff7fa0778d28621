"""End all processes in a lab's namespaces; run as a program, wait until the lab's process has ended.

``python -I -S guard.py FILE...`` waits until its standard input ends.  Each file is a namespace; while
the file is open, no other namespace gets the same inode number.  Processes are found by their namespace,
because a script may start processes in new sessions, as torchrun does.

The program imports nothing from sparsync, so that it starts immediately.
"""

import os
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

__all__ = ["end_all", "identity", "inside", "signal_all"]

_LOOK = 0.05  # seconds between checks of the processes

Identity = tuple[int, int]


def identity(file: int | str) -> Identity:
    """Return the device and inode of a namespace, given as an open file or a path."""
    status = os.fstat(file) if isinstance(file, int) else Path(file).stat()
    return status.st_dev, status.st_ino


def inside(namespaces: Iterable[Identity]) -> list[int]:
    """Return the process ids of all processes that live in one of the namespaces."""
    wanted, found = set(namespaces), list[int]()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # the process has ended, or belongs to another user
                if identity(f"{entry}/ns/net") in wanted:
                    found.append(int(entry.name))
    return found


def signal_all(namespaces: Iterable[Identity], number: int) -> None:
    """Send a signal to all processes in these namespaces."""
    for pid in inside(namespaces):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def end_all(namespaces: Iterable[Identity], seconds: float) -> None:
    """Send SIGTERM to all processes in these namespaces; after ``seconds``, kill any that still run."""
    known = list(namespaces)
    signal_all(known, signal.SIGTERM)
    deadline = time.monotonic() + seconds
    while inside(known):
        if time.monotonic() > deadline:
            signal_all(known, signal.SIGKILL)
        time.sleep(_LOOK)


if __name__ == "__main__":
    kept = [identity(int(file)) for file in sys.argv[1:]]
    sys.stdin.buffer.read()
    end_all(kept, 5.0)
