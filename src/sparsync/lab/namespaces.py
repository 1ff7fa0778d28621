"""Network namespaces without names: Linux's own calls, and the thread that is inside one."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

from sparsync.errors import ConfigurationError

__all__ = ["Namespace", "enter", "may_create", "require_linux"]

T = TypeVar("T")

_CLONE_NEWNET = 0x40000000  # linux/sched.h
_OWN_NAMESPACE = "/proc/thread-self/ns/net"


class Namespace:
    """A network namespace that lives while this object, or a process inside, does.

    It has no name and no mount, so the kernel takes it away with the last file or process that
    holds it: after ``close``, and also after this process was killed.

    Attributes:
        path: opens the namespace from any process of the same user, while this one lives.
    """

    def __init__(self) -> None:
        self._file = _in_thread(_create)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"

    def run(self, function: Callable[[], T]) -> T:
        """Call ``function`` inside, on a thread of its own; also what it starts is inside."""

        def inside() -> T:
            _call("setns", self._file, _CLONE_NEWNET)
            return function()

        return _in_thread(inside)

    def close(self) -> None:
        """Let go of it; a second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


def enter(path: str) -> None:
    """Move the calling thread, and the threads and processes that it starts from now on, inside."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _call("setns", file, _CLONE_NEWNET)
    finally:
        os.close(file)


def may_create() -> bool:
    """Tell whether the kernel lets this process make network namespaces."""
    try:
        Namespace().close()
    except PermissionError:
        return False
    return True


def require_linux() -> None:
    """Refuse other systems.

    Raises:
        ConfigurationError: there are no network namespaces here.
    """
    if sys.platform != "linux":
        raise ConfigurationError(
            f"lab: {sys.platform} has no network namespaces; run on Linux, or simulate the network"
        )


def _create() -> int:
    _call("unshare", _CLONE_NEWNET)
    return os.open(_OWN_NAMESPACE, os.O_RDONLY | os.O_CLOEXEC)


def _call(name: str, *args: int) -> None:
    """Call libc: Python has ``os.setns`` and ``os.unshare`` from 3.12 on only."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _in_thread(function: Callable[[], T]) -> T:
    """Call on a new thread, so that the caller stays in the namespace that it is in."""
    results: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, name="sparsync-lab")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
