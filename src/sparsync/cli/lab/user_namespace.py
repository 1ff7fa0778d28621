"""A script: become root of a new user namespace, then execute a command in the same process.

Run by its path, with the standard library alone: the kernel refuses processes that have threads.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

__all__ = ["main"]

_CLONE_NEWUSER = 0x10000000  # linux/sched.h
_CLONE_NEWNET = 0x40000000


def main(arguments: list[str]) -> None:
    """Execute ``arguments``; after a first ``--network``, in a network namespace of its own too."""
    user, group = os.geteuid(), os.getegid()
    flags = _CLONE_NEWUSER
    if arguments[0] == "--network":
        flags, arguments = flags | _CLONE_NEWNET, arguments[1:]
    if ctypes.CDLL(None, use_errno=True).unshare(flags) != 0:
        sys.exit(f"user namespaces: {os.strerror(ctypes.get_errno())}")
    try:
        # the kernel wants setgroups denied before an unprivileged process may map its group
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        os.execv(arguments[0], arguments)
    except OSError as error:
        sys.exit(f"user namespaces: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
