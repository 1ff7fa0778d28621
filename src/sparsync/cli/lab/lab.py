"""The lab itself: the plan of its network, the commands that build it, and the ranks' places in it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, final

from sparsync.cli.lab.kernel import (
    Namespace,
    enter,
    explain_refusal,
    require_linux,
    run_command,
)
from sparsync.errors import ConfigurationError

__all__ = [
    "Lab",
    "LinkTraffic",
    "Seat",
    "default_burst",
    "interface_counters",
    "local_address",
    "local_traffic",
    "parse_rate",
]

_BRIDGE = "bridge"
_INTERFACE = "eth0"  # the link's end inside a rank's namespace
_ADDRESS = "SPARSYNC_LAB_ADDRESS"
_COUNTERS = Path("/proc/thread-self/net/dev")  # of the namespace that the calling thread is in
_BITS_PER_SECOND = MappingProxyType({"kbit": 10**3, "mbit": 10**6, "gbit": 10**9})
_NUMBER_AND_UNIT = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)(?:/s)?")
_BITS_PER_BYTE = 8
_SEND_BUFFER_SECONDS = (
    0.02  # of wire; with Linux's own 4 MB acknowledgements wait behind seconds of data
)
_LEAST_SEND_BUFFER = 65_536  # bytes; below, TCP stalls
_MOST_SEND_BUFFER = 524_288  # bytes that Linux gives a program that asks for more


def parse_rate(text: str, *, slowest: int = 100_000, fastest: int = 100_000_000_000) -> int:
    """Read the rate of a link.

    Args:
        text: a number and kbit, mbit or gbit (powers of ten, per second).
        slowest: bits per second; below, the bucket of ``tbf`` would hide seconds of the wire.
        fastest: bits per second; above, no single machine keeps up.

    Example:
        >>> parse_rate("100mbit"), parse_rate("1.5 Gbit/s")
        (100000000, 1500000000)
    """
    match = _NUMBER_AND_UNIT.fullmatch(text.strip().lower())
    unit = _BITS_PER_SECOND.get(match.group(2)) if match else None
    if match is None or unit is None:
        raise ConfigurationError(
            f"rate {text!r} is not a number and kbit, mbit or gbit; write it like 100mbit or 1.5gbit"
        )
    rate = round(float(match.group(1)) * unit)
    if not slowest <= rate <= fastest:
        raise ConfigurationError(
            f"rate {text!r} is {rate} bits per second; give {slowest} to {fastest}, as 100mbit"
        )
    return rate


def default_burst(bits_per_second: int, *, lateness: float = 1e-3, smallest: int = 16_384) -> int:
    """Return the bucket of ``tbf`` in bytes: what may leave at once after a silence.

    Smaller hides less of the wire.  But the bucket must cover the lateness of timers and processes,
    or the rate is not reached: at 1 Gbit/s one stream got 72 % of it with 16 KB, 92 % with 32 KB, 99 %
    with 64 KB; dense allreduce on overloaded cores 80 % of its wire time with 64 KB, 90 % with 128 KB.

    Args:
        bits_per_second: the link's rate.
        lateness: seconds, measured on two busy cores as above.
        smallest: bytes; ten packets of 1500 bytes, the first window of a TCP connection.

    Example:
        >>> default_burst(1_000_000_000), default_burst(100_000_000)
        (125000, 16384)
    """
    return max(smallest, round(bits_per_second * lateness / _BITS_PER_BYTE))


@final
class Lab:
    """A network of shaped links between local ranks, for the time of a ``with`` block.

    ::

        with Lab(4, "200mbit") as lab:
            launch(function, 4, lab=lab)
            lab.traffic()

    Args:
        ranks: number of ranks P, each on a link of its own to one bridge; at most 1,000 (a bridge has
            1,024 ports).
        rate: of every link, in each direction, Ethernet headers included; see ``parse_rate``.
        burst_bytes: bucket of ``tbf``, each direction: what a link lets through at once after a
            silence, to be deducted from wire times; None: see ``default_burst``.
        command_timeout: seconds that each command of iproute2 may take.

    Raises:
        ConfigurationError: an argument cannot work, iproute2 is missing, or the kernel forbids
            network namespaces to this process.
        LabError: a command failed.

    Cost: about 7 commands of some milliseconds per rank.
    State: the namespaces, held by open files of this process; no name, file or mount.

    Example:
        >>> lab = Lab(4, "1gbit")
        >>> lab.address(3), lab.bridge_end(3), lab.segment_bytes
        ('10.77.0.4', 'rank3', 31250)
    """

    def __init__(
        self,
        ranks: int,
        rate: str,
        *,
        burst_bytes: int | None = None,
        command_timeout: float = 10.0,
    ) -> None:
        self.ranks, self.bits_per_second = ranks, parse_rate(rate)
        self.burst_bytes = burst_bytes or default_burst(self.bits_per_second)
        _check("ranks", self.ranks, 1, 1000)
        _check("burst_bytes", self.burst_bytes, 3_028, 2**30)  # 2 packets of 1500 bytes or more
        self._command_timeout = command_timeout
        self._bridge: Namespace | None = None
        self._ranks: list[Namespace] = []

    # ---- the plan --------------------------------------------------------------------------------

    def address(self, rank: int) -> str:
        """Return a rank's IPv4 address: 10.77.0.1 and upwards, the same in every lab."""
        return f"10.77.{(rank + 1) >> 8}.{(rank + 1) & 255}"

    def bridge_end(self, rank: int) -> str:
        """Return the name of the link's end on the bridge."""
        return f"rank{rank}"

    @property
    def segment_bytes(self) -> int:
        """Largest packet handed to the link (GSO): a quarter of the bucket.

        One of 64 KB would empty the bucket at once and hold up the acknowledgements after it: both
        directions at a time then got 61 to 81 % of 1 Gbit/s each, and 99 % with 16 KB (burst 64 KB).
        """
        return min(max(self.burst_bytes // 4, 1_514), 65_536)

    @property
    def send_buffer_bytes(self) -> int:
        """Most bytes that a TCP connection may have under way: queues grow to it."""
        wire = self.bits_per_second * _SEND_BUFFER_SECONDS / _BITS_PER_BYTE
        return max(_LEAST_SEND_BUFFER, round(wire))

    @property
    def queue_bytes(self) -> int:
        """Room of a link's queue: for all that P ranks can have under way, so nothing is dropped."""
        return self.burst_bytes + 2 * self.ranks * max(self.send_buffer_bytes, _MOST_SEND_BUFFER)

    def bridge_commands(self) -> list[str]:
        """Make the bridge.  ``addrgenmode none``: no IPv6, whose chatter would be counted."""
        return [
            f"ip link add {_BRIDGE} type bridge mcast_snooping 0",
            f"ip link set {_BRIDGE} addrgenmode none up",
        ]

    def link_commands(self, rank: int, namespace: str) -> list[str]:
        """Make a rank's link, next to the bridge; its other end appears in ``namespace`` (a path)."""
        end, size = self.bridge_end(rank), f"gso_max_size {self.segment_bytes}"
        pair = f"{end} {size} type veth peer name {_INTERFACE} {size}"
        return [
            f"ip link add {pair} netns {namespace}",
            f"ip link set {end} addrgenmode none master {_BRIDGE} up",
            self._shape(end),
        ]

    def rank_commands(self, rank: int) -> list[str]:
        """Bring a rank's end up, inside its namespace."""
        return [
            "ip link set lo up",
            f"ip link set {_INTERFACE} addrgenmode none up",
            f"ip address add {self.address(rank)}/16 dev {_INTERFACE}",
            self._shape(_INTERFACE),
        ]

    def _shape(self, interface: str) -> str:
        return (
            f"tc qdisc add dev {interface} root tbf rate {self.bits_per_second}bit "
            f"burst {self.burst_bytes} limit {self.queue_bytes}"
        )

    # ---- the network -----------------------------------------------------------------------------

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
        return Seat(self._ranks[rank].path, self.address(rank))

    def traffic(self) -> list[LinkTraffic]:
        """Return what has crossed each rank's link since the lab was opened, as the kernel counts."""
        counters = self._open().run(_counters)
        ends = [counters[self.bridge_end(rank)] for rank in range(self.ranks)]
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
        self._run(self._bridge, self.bridge_commands())
        for rank, namespace in enumerate(self._ranks):
            self._run(self._bridge, self.link_commands(rank, namespace.path))
            self._run(namespace, self.rank_commands(rank))
            namespace.run(self._set_up_tcp)

    def _run(self, namespace: Namespace, commands: list[str]) -> None:
        def run_all() -> None:
            for command in commands:
                run_command(command, self._command_timeout)

        namespace.run(run_all)

    def _set_up_tcp(self) -> None:
        settings = Path("/proc/sys/net/ipv4")
        most = self.send_buffer_bytes
        (settings / "tcp_wmem").write_text(f"4096 {min(most, 16_384)} {most}")
        # allowed in every namespace, whatever the host prefers; without loss it fills the link
        (settings / "tcp_congestion_control").write_text("reno")


def _check(name: str, number: Any, least: int, most: int) -> None:
    if not isinstance(number, int) or not least <= number <= most:
        raise ConfigurationError(
            f"lab: {name} is {number!r}; give a whole number from {least} to {most}"
        )


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
        """Move the calling thread to its namespace, and gloo to the interface there."""
        enter(self.namespace)
        os.environ["GLOO_SOCKET_IFNAME"] = _INTERFACE
        os.environ[_ADDRESS] = self.address


def local_address() -> str | None:
    """Return this rank's address on its shaped link; None outside of a lab."""
    return os.environ.get(_ADDRESS)


def local_traffic() -> LinkTraffic | None:
    """Return the bytes on this rank's link so far, as the kernel counts; None outside of a lab."""
    return _counters()[_INTERFACE] if _ADDRESS in os.environ else None


@dataclass(frozen=True)
class LinkTraffic:
    """Bytes that a rank sent and received on its link, with the headers of Ethernet, IP and TCP."""

    sent: int
    received: int


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
