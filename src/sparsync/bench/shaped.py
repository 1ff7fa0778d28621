"""The lab as the commands use it: ``--lab RATE`` puts every rank behind a link of that rate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sparsync.bench.launch import launched
from sparsync.bench.rows import Wire
from sparsync.errors import ConfigurationError
from sparsync.lab import Lab, ensure_privileges, local_traffic, parse_rate

__all__ = ["Shaped", "check_rate", "link_bytes", "privileged", "shaped"]


@dataclass(frozen=True)
class Shaped:
    """A network for local ranks.

    Attributes:
        wire: its links; None without a lab.
        options: for ``launch``.
    """

    wire: Wire | None = None
    options: dict[str, Any] = field(default_factory=dict)


def check_rate(rate: str) -> float:
    """Return bits per second, or refuse what is not a rate, as "100mbit"."""
    return float(parse_rate(rate))


def privileged(rate: str | None) -> None:
    """Get the right to make a lab, if one is asked for, before anything is started or printed.

    Raises:
        ConfigurationError: the kernel does not allow it, or a launcher started this process.
    """
    if rate is None:
        return
    if launched():
        raise ConfigurationError("--lab starts its own ranks; start it as one process, no launcher")
    ensure_privileges()


def link_bytes() -> tuple[int, int] | None:
    """Return what the kernel has counted on this rank's link, sent and received; None without a lab."""
    traffic = local_traffic()
    return None if traffic is None else (traffic.sent, traffic.received)


@contextmanager
def shaped(rate: str | None, ranks: int) -> Iterator[Shaped]:
    """Build the network of ``rate`` for so many ranks; None: the ranks use the machine's own."""
    if rate is None:
        yield Shaped()
        return
    with Lab(ranks, rate=rate) as lab:
        yield Shaped(Wire(lab.bits_per_second, lab.burst_bytes), {"lab": lab})
