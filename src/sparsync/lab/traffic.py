"""Bytes as the kernel counts them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sparsync.lab.network import INTERFACE

__all__ = ["LinkTraffic", "counters_here", "interface_counters", "own_traffic"]


@dataclass(frozen=True)
class LinkTraffic:
    """What crossed a rank's link: bytes, with the headers of Ethernet, IP and TCP.

    Attributes:
        sent: by the rank.
        received: by the rank.

    Example:
        >>> LinkTraffic(sent=900, received=500) - LinkTraffic(sent=200, received=100)
        LinkTraffic(sent=700, received=400)
    """

    sent: int
    received: int

    def __sub__(self, earlier: LinkTraffic) -> LinkTraffic:
        return LinkTraffic(self.sent - earlier.sent, self.received - earlier.received)


def interface_counters(text: str) -> dict[str, LinkTraffic]:
    """Read the format of ``/proc/net/dev``.

    Example:
        >>> interface_counters("eth0: 10 1 0 0 0 0 0 0 20 2 0 0 0 0 0 0")
        {'eth0': LinkTraffic(sent=20, received=10)}
    """
    rows = (line.partition(":") for line in text.splitlines())
    cells = {name.strip(): numbers.split() for name, colon, numbers in rows if colon}
    return {name: LinkTraffic(int(c[8]), int(c[0])) for name, c in cells.items()}


def counters_here() -> dict[str, LinkTraffic]:
    """Return the counters of the namespace that the calling thread is in."""
    return interface_counters(Path("/proc/thread-self/net/dev").read_text())


def own_traffic() -> LinkTraffic:
    """Return the counters of the link of the rank whose namespace the calling thread is in."""
    return counters_here()[INTERFACE]
