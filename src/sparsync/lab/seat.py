"""A rank's place in a lab, and what a rank can learn there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import final

from sparsync.lab import namespaces
from sparsync.lab.network import INTERFACE
from sparsync.lab.traffic import LinkTraffic, own_traffic

__all__ = ["Seat", "local_address", "local_traffic"]

_ADDRESS = "SPARSYNC_LAB_ADDRESS"


@final
@dataclass(frozen=True)
class Seat:
    """What a new process needs to become a rank of the lab; can be pickled.

    Attributes:
        namespace: path of the rank's namespace.
        address: of the rank's end of its link.
    """

    namespace: str
    address: str

    def enter(self) -> None:
        """Move the calling thread to its namespace, and gloo to the interface there.

        To be called before there are sockets, or threads that open some: those stay outside.

        State: the process's environment.
        """
        namespaces.enter(self.namespace)
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
        os.environ[_ADDRESS] = self.address


def local_address() -> str | None:
    """Return this rank's address on its shaped link; None outside of a lab."""
    return os.environ.get(_ADDRESS)


def local_traffic() -> LinkTraffic | None:
    """Return what has crossed this rank's link so far, as the kernel counts; None outside."""
    return own_traffic() if _ADDRESS in os.environ else None
