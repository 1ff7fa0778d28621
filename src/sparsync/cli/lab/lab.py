"""The lab itself: builds the network, seats the ranks, counts the bytes on their links."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import final

from sparsync.cli.lab.kernel import (
    Namespace,
    enter,
    explain_refusal,
    require_linux,
    run_command,
)
from sparsync.cli.lab.network import INTERFACE, Network, parse_rate
from sparsync.errors import ConfigurationError

__all__ = ["Lab", "LinkTraffic", "Seat", "interface_counters", "local_address", "local_traffic"]

_ADDRESS = "SPARSYNC_LAB_ADDRESS"
_COUNTERS = Path("/proc/thread-self/net/dev")  # of the namespace that the calling thread is in


@final
class Lab:
    """A network of shaped links between local ranks, for the time of a ``with`` block.

    ::

        with Lab(4, "200mbit") as lab:
            launch(function, 4, lab=lab)
            lab.traffic()

    Args:
        ranks: number of ranks P.
        rate: of every link, in each direction, e.g. "200mbit"; see ``parse_rate``.
        burst_bytes: bucket of ``tbf``; None: see ``default_burst``.
        command_timeout: seconds that each command of iproute2 may take.

    Raises:
        ConfigurationError: an argument cannot work, iproute2 is missing, or the kernel forbids
            network namespaces to this process.
        LabError: a command failed.

    Cost: about 7 commands of some milliseconds per rank.
    State: the namespaces, held by open files of this process; no name, file or mount.
    """

    def __init__(
        self,
        ranks: int,
        rate: str,
        *,
        burst_bytes: int | None = None,
        command_timeout: float = 10.0,
    ) -> None:
        self.network = Network(ranks, parse_rate(rate), burst_bytes or 0)
        self._command_timeout = command_timeout
        self._bridge: Namespace | None = None
        self._ranks: list[Namespace] = []

    @property
    def ranks(self) -> int:
        """Number of ranks P."""
        return self.network.ranks

    @property
    def bits_per_second(self) -> int:
        """Rate of every link, in each direction."""
        return self.network.bits_per_second

    @property
    def burst_bytes(self) -> int:
        """Bytes that a link lets through at once after a silence; deduct them from wire times."""
        return self.network.burst_bytes

    def __enter__(self) -> Lab:
        require_linux()
        if self._bridge is not None:
            raise ConfigurationError("lab: this one is open already; make another")
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release all namespaces; they are gone when the ranks inside are."""
        for namespace in (*self._ranks, *([self._bridge] if self._bridge else ())):
            namespace.close()
        self._bridge, self._ranks = None, []

    def seat(self, rank: int) -> Seat:
        """Return what a process needs to enter the namespace of a rank."""
        self._open()
        return Seat(self._ranks[rank].path, self.network.address(rank))

    def traffic(self) -> list[LinkTraffic]:
        """Return what has crossed each rank's link since the lab was opened, as the kernel counts."""
        counters = self._open().run(_counters)
        ends = [counters[self.network.bridge_end(rank)] for rank in range(self.ranks)]
        # what the bridge's end receives is what the rank sent
        return [LinkTraffic(sent=end.received, received=end.sent) for end in ends]

    def _open(self) -> Namespace:
        if self._bridge is None:
            raise ConfigurationError("lab: it is not open; use it inside `with Lab(...) as lab:`")
        return self._bridge

    def _build(self) -> None:
        try:
            self._bridge = Namespace()
            for _ in range(self.ranks):
                self._ranks.append(Namespace())
        except PermissionError as error:
            raise explain_refusal(str(error)) from None
        self._run(self._bridge, self.network.bridge_commands())
        for rank, namespace in enumerate(self._ranks):
            self._run(self._bridge, self.network.link_commands(rank, namespace.path))
            self._run(namespace, self.network.rank_commands(rank))
            namespace.run(self._write_settings)

    def _run(self, namespace: Namespace, commands: list[str]) -> None:
        def run_all() -> None:
            for command in commands:
                run_command(command, self._command_timeout)

        namespace.run(run_all)

    def _write_settings(self) -> None:
        for path, text in self.network.settings().items():
            Path(path).write_text(text)


# ---- ranks -----------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class Seat:
    """A rank's place in the lab, for the process that becomes the rank; can be pickled.

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
        enter(self.namespace)
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
        os.environ[_ADDRESS] = self.address


def local_address() -> str | None:
    """Return this rank's address on its shaped link; None outside of a lab."""
    return os.environ.get(_ADDRESS)


def local_traffic() -> LinkTraffic | None:
    """Return the bytes on this rank's link so far, as the kernel counts; None outside of a lab."""
    return _counters()[INTERFACE] if _ADDRESS in os.environ else None


@dataclass(frozen=True)
class LinkTraffic:
    """Bytes that crossed a rank's link, with the headers of Ethernet, IP and TCP.

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


def _counters() -> dict[str, LinkTraffic]:
    return interface_counters(_COUNTERS.read_text())
