"""Linux's part of the lab: unnamed network namespaces, iproute2, and the right to use both."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from sparsync.errors import ConfigurationError

__all__ = [
    "LabError",
    "Namespace",
    "ensure_privileges",
    "enter",
    "explain_refusal",
    "find_tool",
    "may_create",
    "require_linux",
    "run_command",
]

T = TypeVar("T")

_CLONE_NEWNET = 0x40000000  # linux/sched.h


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
    """Refuse systems without network namespaces."""
    if sys.platform != "linux":
        raise ConfigurationError(
            f"lab: {sys.platform} has no network namespaces; run on Linux, or simulate the network"
        )


def _create() -> int:
    _call("unshare", _CLONE_NEWNET)
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _call(name: str, *args: int) -> None:
    """Call libc: Python has ``os.setns`` and ``os.unshare`` from 3.12 on only."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _in_thread(function: Callable[[], T]) -> T:
    """Call on a new thread, so that the caller stays in the namespace that it is in."""
    with ThreadPoolExecutor(1, "sparsync-lab") as thread:
        return thread.submit(function).result()


# ---- iproute2 ----------------------------------------------------------------------------------------


class LabError(ConfigurationError):
    """The kernel or iproute2 refused a part of the lab's network; names the command."""


def find_tool(name: str, *, package: str = "iproute2", also_in: str = "/usr/sbin:/sbin") -> str:
    """Return the path of a program; ``also_in`` is what a user's PATH leaves out on Debian.

    Raises:
        ConfigurationError: the program is not installed; names the package.
    """
    path = shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:{also_in}")
    if path is None:
        raise ConfigurationError(f"lab: {name!r} is not there; install the package {package}")
    return path


def run_command(command: str, timeout: float) -> None:
    """Run one command of iproute2, its words with single spaces between, in this thread's namespace.

    Raises:
        ConfigurationError: the program is not installed.
        LabError: it failed, or was killed after ``timeout`` seconds.
    """
    name, *words = command.split(" ")
    try:
        result = subprocess.run(
            [find_tool(name), *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LabError(f"lab: {command!r} did not end within {timeout:g} s; killed") from None
    if result.returncode != 0:
        said = " ".join(result.stderr.split()) or "nothing on stderr"
        raise LabError(f"lab: {command!r} failed with exit code {result.returncode}: {said}")


# ---- privileges --------------------------------------------------------------------------------------


def ensure_privileges(*, timeout: float = 10.0) -> None:
    """Return if this process may make a lab; else start it again inside a user namespace.

    Root may.  Anybody else becomes root of a user namespace of their own, where the kernel allows
    it; only a process without threads can do that, so ``unshare`` executes the same command line
    again, in the same process, with the same files open.  Call it before anything else has happened.

    Args:
        timeout: seconds that the kernel has to answer whether it allows it.

    Raises:
        ConfigurationError: the kernel allows neither, or iproute2 is missing.
    """
    require_linux()
    ip = find_tool("ip")
    find_tool("tc")
    if may_create():
        return
    become_root = [find_tool("unshare", package="util-linux"), "--map-root-user"]
    # a trial first: after the real thing there is no way back to a clear error
    trial = f"{' '.join(become_root)} --net {ip} link add probe type veth peer name other"
    try:
        run_command(trial, timeout)
    except LabError as error:
        raise explain_refusal(str(error).rpartition(": ")[2]) from None
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(become_root[0], [*become_root, sys.executable, *sys.orig_argv[1:]])


def explain_refusal(reason: str) -> ConfigurationError:
    """Return the error of a process that may not make a lab."""
    return ConfigurationError(
        f"lab: this process may not make network namespaces ({reason}); run as root (in a container: "
        "with CAP_SYS_ADMIN and CAP_NET_ADMIN), or allow unprivileged user namespaces "
        "(sysctl kernel.apparmor_restrict_unprivileged_userns=0, user.max_user_namespaces > 0)"
    )
