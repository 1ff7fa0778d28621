"""May this process make a lab?  If not as it is, then perhaps inside a user namespace."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from sparsync.errors import ConfigurationError
from sparsync.lab import user_namespace
from sparsync.lab.commands import find_tool
from sparsync.lab.namespaces import may_create, require_linux

__all__ = ["ensure_privileges", "explain_refusal"]


def ensure_privileges(*, timeout: float = 10.0) -> None:
    """Return if this process may make a lab; else start it again inside a user namespace.

    Root may.  Anybody else becomes root of a user namespace of their own, where the kernel allows
    it; only a process without threads can do that, so the same command line is executed anew, in the
    same process, with the same files open.  Call it before anything else happened.

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
    # a trial first: after the real thing there is no way back to a clear error
    probe = [ip, "link", "add", "probe", "type", "veth", "peer", "name", "other"]
    try:
        trial = subprocess.run(
            _inside_user_namespace("--network", *probe),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise explain_refusal(f"no answer within {timeout:g} s") from None
    if trial.returncode != 0:
        raise explain_refusal(" ".join(trial.stderr.split()))
    sys.stdout.flush()
    sys.stderr.flush()
    again = _inside_user_namespace(sys.executable, *sys.orig_argv[1:])
    os.execv(again[0], again)


def explain_refusal(reason: str) -> ConfigurationError:
    """Return the error of a process that may not make a lab."""
    return ConfigurationError(
        f"lab: this process may not make network namespaces ({reason}); run as root (in a container: "
        "with CAP_SYS_ADMIN and CAP_NET_ADMIN), or allow unprivileged user namespaces "
        "(sysctl kernel.apparmor_restrict_unprivileged_userns=0, user.max_user_namespaces > 0)"
    )


def _inside_user_namespace(*command: str) -> list[str]:
    # -I -S: the script needs the standard library alone, and none of the user's settings
    script = Path(user_namespace.__file__)
    return [sys.executable, "-I", "-S", str(script), *command]
