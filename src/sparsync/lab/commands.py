"""Runs iproute2, with a deadline, and says in one line what went wrong."""

from __future__ import annotations

import os
import shutil
import subprocess

from sparsync.errors import CommunicationError, ConfigurationError

__all__ = ["LabError", "find_tool", "run_command"]


class LabError(CommunicationError):
    """The kernel or iproute2 refused a part of the lab's network; names the command."""


def find_tool(name: str, *, also_in: str = "/usr/sbin:/sbin") -> str:
    """Return the path of a program.

    Args:
        name: of the program.
        also_in: directories that an ordinary user's PATH leaves out on Debian.

    Raises:
        ConfigurationError: it is not installed; names the package.
    """
    path = shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:{also_in}")
    if path is None:
        raise ConfigurationError(f"lab: {name!r} is not there; install the package iproute2")
    return path


def run_command(command: str, timeout: float) -> None:
    """Run one command in the calling thread's namespace.

    Args:
        command: words with single spaces between them; the first names a program.
        timeout: seconds after which the command is killed.

    Raises:
        ConfigurationError: the program is not installed.
        LabError: it failed or ran past its deadline.
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
