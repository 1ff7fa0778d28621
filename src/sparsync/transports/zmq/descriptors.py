"""The number of file descriptors that a mesh needs, and whether this process may open that many."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from sparsync.errors import ConfigurationError

__all__ = ["OWN", "PER_PEER", "require_descriptors"]

# number of descriptors for the context, its threads, the incoming socket and the socket that
# authenticates peers, plus one that is reserved for ending connections
OWN: Final = 13
# descriptors per peer: the link, both ends of its monitor, and the outgoing and the incoming connection
PER_PEER: Final = 5
SPARE: Final = 16  # for files, and for connections opened meanwhile by torch


def require_descriptors(rank: int, peers: int, own: int = 0) -> None:
    """Check that sockets for ``peers`` more ranks, plus ``own`` descriptors, are within the limit.

    Otherwise ZeroMQ would end the process as soon as it failed to get a descriptor.

    Raises:
        ConfigurationError: the message states how many descriptors are needed, and the limit.
    """
    try:
        import resource  # not on Windows, which has no such limit

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if limit == resource.RLIM_INFINITY:
            return
        taken = len(list(Path("/dev/fd").iterdir()))
    except (ImportError, OSError):
        return
    needed = taken + own + PER_PEER * peers + SPARE
    if needed > limit:
        raise ConfigurationError(
            f"rank {rank} needs {needed} file descriptors ({taken} are open, {PER_PEER} more for each of "
            f"{peers} ranks), and its limit is {limit}; raise it before the start: ulimit -n "
            f"{1 << (needed - 1).bit_length()}"
        )
